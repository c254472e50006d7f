"""python -m idp_workspace.suite run SUITE.yaml; report SUITE.yaml; index. `run --help` lists the options."""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import pathlib
import signal
import subprocess
import sys
from collections.abc import Sequence

from diffusion_policy.common.command_line import STOPPED, Parser, reporting, shell_command
from diffusion_policy.common.errors import ConfigError, DataError
from idp_workspace.suite import grid, records
from idp_workspace.suite.grid import ROOT, Run, Suite, folder_name


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def setting(text: str) -> tuple[str, str]:
    """Read KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def parser() -> argparse.ArgumentParser:
    out = Parser(prog="python -m idp_workspace.suite", description="From a suite of runs to tables and a page.")
    commands = out.add_subparsers(dest="command", required=True, parser_class=Parser)
    common = Parser(add_help=False)
    common.add_argument("suite", type=pathlib.Path, metavar="SUITE.yaml", help="such as those of suites/")
    common.add_argument("--preset", help="one of the suite's presets, such as cpu or paper (default: the suite's)")
    common.add_argument(
        "--output", type=pathlib.Path, help="folder of the runs and the report (default data/suites/SUITE_PRESET)"
    )
    run = commands.add_parser("run", parents=[common], help="make the runs that are not done", prog=f"{out.prog} run")
    run.add_argument("--only", nargs="+", metavar="PATTERN", help="runs whose name has this in it, or matches *, ?")
    run.add_argument("--jobs", type=positive, help="runs at the same time (default: what cores and memory allow)")
    run.add_argument("--threads", type=positive, help="threads of each run (default: the suite's, else 1)")
    run.add_argument("--memory", type=float, metavar="GB", help="of a run (default: the suite's, else 2)")
    run.add_argument("--gpus", type=int, default=0, metavar="N", help="give each run one of N GPUs in turn")
    run.add_argument("--launcher", choices=("local", "slurm", "submitit"), default="local", help="default local")
    run.add_argument(
        "--set",
        nargs="+",
        type=setting,
        default=[],
        metavar="KEY=VALUE",
        help="of the launcher: partition, timeout_min",
    )
    run.add_argument("--redo", action="store_true", help="move runs with other settings aside and make them again")
    run.add_argument("--dry-run", action="store_true", help="check everything and list the runs; start nothing")
    report = commands.add_parser(
        "report", parents=[common], help="tables, statistics and the page", prog=f"{out.prog} report"
    )
    report.add_argument("--publish", action="store_true", help="also write the tables to results/SUITE_PRESET/")
    index = commands.add_parser("index", help="write the front page of results/", prog=f"{out.prog} index")
    index.add_argument("--results", type=pathlib.Path, default=ROOT / "results", help="default results/")
    return out


def chosen(suite: Suite, patterns: Sequence[str] | None) -> list[Run]:
    """The runs whose names have one of the patterns; all without patterns."""
    out: dict[str, Run] = {}
    for pattern in patterns or ["*"]:
        full = pattern if set(pattern) & set("*?[") else f"*{pattern}*"
        found = {run.name: run for run in suite.runs if fnmatch.fnmatchcase(run.name, full)}
        if not found:
            names = ", ".join(run.name for run in suite.runs[:5])
            raise ConfigError(f"--only {pattern}: no run of {suite.path} is called so; there are: {names}, ...")
        out |= found
    return [run for run in suite.runs if run.name in out]


def set_aside(suite: Suite, runs: Sequence[Run]) -> None:
    """Move the folders of runs with other settings, or with damaged results, aside."""
    for run in runs:
        folder = suite.output / folder_name(run.name)
        try:
            records.status(folder, run)
        except DataError:
            aside = next(
                path for n in itertools.count(1) if not (path := folder.with_name(f"{folder.name}.{n}")).exists()
            )
            folder.rename(aside)
            print(f"moved aside: {aside}")


def run(options: argparse.Namespace) -> None:
    """Make the runs of a suite that are not done."""
    from idp_workspace.suite.jobs import provenance
    from idp_workspace.suite.launchers import launcher
    from idp_workspace.suite.live import View, headline
    from idp_workspace.suite.scheduler import Scheduler, default_slots

    suite = grid.load(options.suite, options.preset, options.output)
    runs = chosen(suite, options.only)
    if options.redo and not options.dry_run:
        set_aside(suite, runs)
    threads, memory = options.threads or suite.threads, options.memory or suite.memory_gb
    slots = options.jobs or (default_slots(threads, memory) if options.launcher == "local" else len(runs))
    launch = launcher(options.launcher, suite.output, threads, dict(options.set))
    scheduler = Scheduler(
        suite,
        runs,
        slots=slots,
        threads=threads,
        memory_gb=memory,
        gpus=options.gpus,
        launch=launch,
        local=options.launcher == "local",
    )
    grid.check(suite, [job.run for job in scheduler.having("waiting")])
    print(
        f"{suite.title}: {headline(scheduler).partition(';')[0]}, {slots} at a time; runs in {suite.output}", flush=True
    )
    if options.dry_run:
        for job in scheduler.jobs:
            print(f"{job.status:<8} {job.run.name}: {job.run.command}")
        return
    again = shell_command("python", "-m", "idp_workspace.suite", *sys.argv[1:])
    if not scheduler.finished:
        scheduler.made = provenance()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs deaf to it
        try:
            scheduler.loop(View())
        except KeyboardInterrupt:
            print("stopping the jobs after a checkpoint; a second Ctrl-C leaves them running", flush=True)
            scheduler.stop()
            print(f"{headline(scheduler)}\ncontinue with\n    {again}")
            sys.exit(STOPPED)
    measure_times(scheduler)
    failed = scheduler.having("failed", "stopped")
    for job in failed:
        print(f"{job.status} {job.run.name}: {job.error} (see {job.folder / 'job.log'})")
    print(headline(scheduler))
    words = ["--preset", suite.preset] if suite.preset else []
    words += ["--output", options.output] if options.output else []
    print(f"next       {shell_command('python', '-m', 'idp_workspace.suite', 'report', options.suite, *words)}")
    if failed:
        sys.exit(1)


def measure_times(scheduler: object) -> None:
    """Measure the times of the first run of each method and backbone, one after the other."""
    from idp_workspace.suite.scheduler import Scheduler

    assert isinstance(scheduler, Scheduler)
    first = {(job.run.method, job.run.backbone): job for job in reversed(scheduler.having("done"))}
    for job in first.values():
        simulated = "eval" not in job.run.evaluations or "--open-loop" not in job.run.evaluations["eval"]
        if (
            simulated
            and not (job.folder / "times.json").is_file()
            and (job.folder / "checkpoints/latest.ckpt").is_file()
        ):
            command = [sys.executable, "-m", "idp_workspace.suite.timing", str(job.folder)]
            with open(job.folder / "job.log", "a") as log:
                code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log).returncode
            if code:
                print(f"the times of {job.run.name} could not be measured (see {job.folder / 'job.log'})")


def report(options: argparse.Namespace) -> None:
    """Write the report of a suite."""
    from idp_workspace.suite.report import write_report

    suite = grid.load(options.suite, options.preset, options.output)
    write_report(suite, options.publish)


def index(options: argparse.Namespace) -> None:
    """Write the front page of results/."""
    from idp_workspace.suite.index import write_index

    print(f"written to {write_index(options.results)}")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    with reporting():
        {"run": run, "report": report, "index": index}[options.command](options)


if __name__ == "__main__":
    main()
