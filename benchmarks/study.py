"""Train and evaluate a list of configurations, and put the numbers into one table: a suite without presets and page.

    python -m benchmarks.study FILE [--jobs 2] [--only NAME ...] [--keep] [--publish]

A study is a YAML file with a name, overrides for all runs, and the runs, each with a name, a config and overrides; or
with a grid of tasks, methods (a config and overrides) and seeds. With `seeds` beside `runs`, each run is made with each
seed (or those of its own `seeds`), and the table has means over them and, if a `reference` run is named, paired
differences to it.

Runs and tables go to data/studies/<study>/. Every run is trained: a study that was stopped continues where it stopped,
a finished one is moved aside and made again. --keep takes finished rows with the same command instead, from the last
study or from results/<study>/, and marks them. --publish also writes the tables to results/<study>/. `eval: null` takes
the scores from the evaluations during training instead of a final one; `also: {NAME: OPTIONS}` evaluates each run with
other options of eval.py, too, into a column of its own. Times are measured at the end, run by run;
core-minutes are the processor time of a training, with its start-up and evaluations.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import pathlib
import shlex
import statistics
import subprocess
import sys
from typing import Any

import yaml
from tqdm import tqdm

from benchmarks import cost_figure, study_open_loop
from benchmarks.comparison import seed_table
from diffusion_policy.common.errors import ConfigError
from diffusion_policy.storage.atomic import write_text
from idp_workspace.suite import grid, jobs, records
from idp_workspace.suite.grid import Run
from idp_workspace.suite.index import write_index
from idp_workspace.suite.jobs import processor_minutes, provenance, read_json, write_json
from idp_workspace.suite.timing import measure

TIMES = (
    "Times are medians (p50) of processor time on one thread, at batch 1 for inference, measured one run after the "
    "other at the end."
)
ROOT = pathlib.Path(__file__).resolve().parents[1]


def run(study: dict[str, Any], entry: Run, threads: int) -> dict[str, Any]:
    """Train and evaluate one entry, unless this study has done so; return its row of the table."""
    folder = folder_of(study, entry)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "summary.json").is_file():
        write_json(folder / "made.json", provenance())
    jobs.make(
        folder,
        entry.arguments,
        entry.evaluations,
        threads=threads,
        device="cpu",
        call=processor_minutes,
        root=ROOT,
    )
    return row_of(study, entry)


def row_of(study: dict[str, Any], entry: Run) -> dict[str, Any]:
    """The row of a finished run, from the files in its folder."""
    return records.row_of(folder_of(study, entry), entry)


def output_of(study: dict[str, Any]) -> pathlib.Path:
    return pathlib.Path(study["output"])


def folder_of(study: dict[str, Any], entry: Run) -> pathlib.Path:
    return output_of(study) / entry.name


def prepare(study: dict[str, Any]) -> None:
    """Continue a study that was stopped; move a finished one, or one with other commands, aside."""
    output = output_of(study)
    state = output / "state.json"
    commands = {entry.name: entry.command for entry in runs_of(study)}
    before = read_json(state) if state.is_file() else {"finished": True, "commands": None}
    if output.exists() and (before["finished"] or before["commands"] != commands):
        aside = next(path for n in itertools.count(1) if not (path := output.with_name(f"{output.name}.{n}")).exists())
        output.rename(aside)
        print(f"the last study is kept in {aside}")
    elif output.exists():
        print(f"continuing the study that was stopped in {output}")
    output.mkdir(parents=True, exist_ok=True)
    write_json(state, {"finished": False, "commands": commands})


def finished_rows(study: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of the last study here and of the published table that have the same commands, marked as reused."""
    found: dict[str, dict[str, Any]] = {}
    for folder in (ROOT / "results" / study["name"], output_of(study)):
        if (folder / "results.json").is_file():
            data = read_json(folder / "results.json")
            made = {"versions": data.get("versions")}  # of rows that do not say it themselves
            found |= {row["name"]: {"made": made} | row for row in data["rows"]}
    return {
        entry.name: found[entry.name] | {"reused": True}
        for entry in runs_of(study)
        if found.get(entry.name, {}).get("command", "").replace("'", "") == entry.command.replace("'", "")
    }


def open_loop(study: dict[str, Any]) -> bool:
    """Whether the runs are compared with held-out episodes instead of playing in a simulator."""
    return "--open-loop" in (study.get("eval") or [])


def runs_of(study: dict[str, Any]) -> list[Run]:
    """The runs of a study or of its grid, all tasks and methods with the first seed first, for an early comparison."""
    return grid.expand(study, pathlib.Path(study["name"]))


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, best score first."""
    head = (
        "| run | score | 95 % interval | network calls | steps | training step, ms | inference, ms |\n"
        "|---|---|---|---|---|---|---|\n"
    )

    def number(value: float | None, places: int) -> str:
        return "-" if value is None else f"{value:.{places}f}"

    lines = []
    for row in sorted(rows, key=lambda row: -row["score"]):
        low, high = row["interval_95"]
        name = f"{row['name']} *" if row.get("reused") else row["name"]
        lines.append(
            f"| {name} | {row['score']:.3f} | {low:.2f} to {high:.2f} | {row['nfe']:g} | {row['steps']} "
            f"| {number(row.get('step_ms'), 0)} | {number(row.get('inference_ms'), 2)} |"
        )
    return head + "\n".join(lines)


def grid_table(study: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Markdown: tasks by methods, then the paper's numbers.

    A cell is in per cent: mean over seeds of the mean of the five best evaluations / of the last one.
    """
    grid, paper = study["grid"], study.get("paper", {})
    found = {row["name"]: row for row in rows}

    def runs(task: str, method: str) -> list[dict[str, Any]]:
        return [found[name] for seed in grid["seeds"] if (name := f"{task} {method} {seed}") in found]

    def cell(entries: list[dict[str, Any]]) -> str:
        if not entries:
            return "-"
        best, last = (100 * statistics.mean(entry[key] for entry in entries) for key in ("mean_of_best", "score"))
        missing = "" if len(entries) == len(grid["seeds"]) else f" (of {len(entries)} seed{'s' * (len(entries) > 1)})"
        return f"{best:.0f} / {last:.0f}{missing}"

    methods = list(grid["methods"])
    lines = [
        f"| task | {' | '.join(methods)} | {' | '.join(f'paper: {name}' for name in paper)} |",
        "|---" * (1 + len(methods) + len(paper)) + "|",
    ]
    for task, level in grid["tasks"].items():
        published = [str(numbers.get(task, "-")) for numbers in paper.values()]
        lines.append(
            f"| {task}{f' ({level})' if level else ''} | {' | '.join(cell(runs(task, method)) for method in methods)} "
            f"| {' | '.join(published)} |"
        )
    complete = [
        task for task in grid["tasks"] if all(len(runs(task, method)) == len(grid["seeds"]) for method in methods)
    ]
    if complete:
        means = [
            cell([entry for task in complete for entry in runs(task, method)]).split(" (")[0] for method in methods
        ]
        published = [f"{statistics.mean(numbers[task] for task in complete):.0f}" for numbers in paper.values()]
        which = "" if len(complete) == len(grid["tasks"]) else f" of the {len(complete)} complete tasks"
        lines.append(f"| mean{which} | {' | '.join(means)} | {' | '.join(published)} |")
    lines += ["", "| method | network calls | training step, ms | inference, ms |", "|---|---|---|---|"]
    for method in methods:
        timed = [row for task in grid["tasks"] for row in runs(task, method) if row["step_ms"] is not None]
        if timed:
            lines.append(
                f"| {method} | {timed[0]['nfe']:g} | {statistics.median(row['step_ms'] for row in timed):.0f} "
                f"| {statistics.median(row['inference_ms'] for row in timed):.1f} |"
            )
    return "\n".join(lines)


def tables(study: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    if open_loop(study):
        return study_open_loop.table(rows, study.get("reference"))
    if "seeds" in study:
        return seed_table(study, rows)
    return grid_table(study, rows) if "grid" in study else table(rows)


def write(study: dict[str, Any], rows: list[dict[str, Any]], command: str, folder: pathlib.Path) -> None:
    """Write results.json, README.md and, for a study with seeds and costs, cost.png."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in study.items() if key != "output"}
    write_json(folder / "results.json", {"command": command, "study": settings, "rows": rows})
    reused = sum(bool(row.get("reused")) for row in rows)
    drawn = "seeds" in study and not open_loop(study) and cost_figure.draw(study, rows, folder)
    paragraphs = [
        f"# {study['title']}",
        study["description"],
        tables(study, rows),
        f"Made by an earlier study: {reused} of {len(rows)} rows (* or `reused` in results.json)." if reused else "",
        f"![score against the cost of a training]({cost_figure.NAME})" if drawn else "",
        study.get("notes", ""),
        "" if open_loop(study) else TIMES,
        f"Made with `{command}`; the command, commit, versions and dataset of every run are in results.json.",
    ]
    text = "\n\n".join(paragraph.strip() for paragraph in paragraphs if paragraph) + "\n"
    write_text(folder / "README.md", text)


def load(path: pathlib.Path, output: pathlib.Path | None) -> dict[str, Any]:
    """The study in a file, with its output folder."""
    try:
        study = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        sys.exit(f"error: {path} cannot be read as a study: {error}")
    needed = {"name", "title", "description"}
    if not (isinstance(study, dict) and needed <= study.keys() and ("runs" in study or "grid" in study)):
        sys.exit(f"error: {path} is not a study: it needs name, title, description, and runs or grid")
    return study | {"output": str(output or ROOT / "data/studies" / study["name"])}


def shown_path(path: pathlib.Path) -> str:
    """Relative to the repository if it is inside."""
    path = path.resolve()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def arguments_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.study", description="Train and evaluate a list of configurations into one table."
    )
    parser.add_argument("study", type=pathlib.Path, help="a YAML file, such as those of benchmarks/studies/")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time (default 2)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run (default 1)")
    parser.add_argument("--only", nargs="+", help="names of the runs to make; all, if not given")
    parser.add_argument("--keep", action="store_true", help="reuse finished rows with the same command, marked with *")
    parser.add_argument("--output", type=pathlib.Path, help="folder of runs and tables (default data/studies/<study>)")
    parser.add_argument("--publish", action="store_true", help="also write the tables to results/<study>/")
    return parser


def main(arguments: list[str] | None = None) -> None:
    parser = arguments_of()
    options = parser.parse_args(arguments)
    study = load(options.study, options.output)
    try:
        every = runs_of(study)
    except ConfigError as error:
        sys.exit(f"error: {options.study} is not a study: {error}")
    names = [entry.name for entry in every]
    wanted = options.only or names
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"no run is called {' or '.join(unknown)}; there are: {', '.join(names)}")
    if options.jobs < 1 or options.threads < 1:
        parser.error("--jobs and --threads must be at least 1")
    kept = finished_rows(study) if options.keep else {}
    if not options.keep:
        prepare(study)
    counts = ["--jobs", str(options.jobs), "--threads", str(options.threads)]
    command = shlex.join(["python", "-m", "benchmarks.study", shown_path(options.study), *counts])

    rows, failed = list(kept.values()), []
    entries = [entry for entry in every if entry.name in wanted and entry.name not in kept]
    with (
        concurrent.futures.ThreadPoolExecutor(options.jobs) as pool,
        tqdm(total=len(entries), unit="run", disable=None) as bar,
    ):
        futures = {pool.submit(run, study, entry, options.threads): entry.name for entry in entries}
        for future in concurrent.futures.as_completed(futures):
            name = futures[future]
            try:
                rows.append(future.result())
                write(study, rows, command, output_of(study))  # after each run: an interrupted study has a table
            except subprocess.CalledProcessError as error:
                failed.append(name)
                tqdm.write(f"{name} failed ({error}); see {output_of(study) / name / jobs.OUTPUT}")
            bar.update()
    made = [entry for entry in entries if entry.name not in failed]
    # The cost of a method does not depend on task and seed: one run per method of a grid, and per run with seeds.
    if "grid" in study:
        timed = list({entry.config: entry for entry in reversed(made)}.values())
    else:
        timed = made[: len(study["runs"])] if "seeds" in study else made
    timed = [] if open_loop(study) else timed  # eval.py measures the latency
    for entry in tqdm(timed, desc="times", unit="run", disable=None):
        if not (folder_of(study, entry) / "times.json").is_file():
            measure(folder_of(study, entry))
    new = {entry.name: row_of(study, entry) for entry in made}
    rows = [row for name in names if (row := kept.get(name) or new.get(name))]
    write(study, rows, command, output_of(study))
    if options.publish:
        published = ROOT / "results" / study["name"]
        write(study, rows, command, published)
        write_index(ROOT / "results")
        if open_loop(study):
            study_open_loop.copy_pictures(output_of(study), rows, study.get("reference"), published)
    if len(rows) == len(every):
        write_json(output_of(study) / "state.json", {"finished": True, "commands": {}})
    print((output_of(study) / "README.md").read_text())
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
