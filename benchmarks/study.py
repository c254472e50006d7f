"""Train and evaluate a list of configurations, and put the numbers into one table.

    python -m benchmarks.study benchmarks/studies/pusht_cpu.yaml [--jobs 2] [--only NAME ...]

A study is a YAML file with a name, overrides for all runs, and the runs, each with a name, a config and overrides; or
with a grid of tasks, methods (a config and overrides) and seeds. Runs go to data/studies/<study>/<run>/, tables to
results/<study>/. A study can be stopped and restarted at any time: finished runs are not repeated, interrupted ones
continue from their checkpoint. On another machine, rows of the table with the same command are kept. `eval: null` takes
the scores from the evaluations during training instead of a final one. Times are measured at the end, run by run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import yaml
from omegaconf import OmegaConf
from tqdm import tqdm

from diffusion_policy.common.config_util import get_class, register_resolvers
from diffusion_policy.common.pytorch_util import dict_apply
from diffusion_policy.scripts.eval import counting
from diffusion_policy.storage import checkpoint_io
from diffusion_policy.storage.atomic import write_atomically
from diffusion_policy.storage.checkpoint_io import versions
from diffusion_policy.workspace.base_workspace import BaseWorkspace

ROOT = pathlib.Path(__file__).resolve().parents[1]


def run(study: dict[str, Any], entry: dict[str, Any], threads: int) -> dict[str, Any]:
    """Train and evaluate one entry, unless that is done already; return its row of the table."""
    if (row := kept_row(study, entry)) is not None:
        return row
    folder = folder_of(study, entry)
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}
    train = train_command(study, entry)
    with open(folder / "study.log", "a") as log:

        def call(*command: str) -> None:
            subprocess.run(
                [sys.executable, *command], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True
            )

        if not (folder / "summary.json").is_file():
            call(*train, "training.resume=true", f"hydra.run.dir={folder}")
        if evaluates(study) and not (folder / "eval/eval_log.json").is_file():
            call(
                "eval.py",
                "--checkpoint",
                str(folder / "checkpoints/latest.ckpt"),
                "--output_dir",
                str(folder / "eval"),
                "--device",
                "cpu",
                *study.get("eval", []),
                *entry.get("eval", []),
            )
    summary = json.loads((folder / "summary.json").read_text())
    times = json.loads((folder / "times.json").read_text()) if (folder / "times.json").is_file() else {}
    row = {
        "name": entry["name"],
        "command": f"python {' '.join(train)}",
        "best_evaluation": summary["best_score"],
        "steps": summary["steps"],
        **{key: times.get(key) for key in ("step_ms", "inference_ms", "nfe")},
    }
    if not evaluates(study):
        return row | {
            "score": summary["score"],
            "mean_of_best": summary["mean_of_best_scores"],
            "evaluations": summary["evaluations"],
        }
    log = json.loads((folder / "eval/eval_log.json").read_text())
    return row | {
        "score": log["test/mean_score"],
        "interval_95": log["interval_95"],
        "n_episodes": log["n_episodes"],
        "nfe": log["nfe"],
    }


def folder_of(study: dict[str, Any], entry: dict[str, Any]) -> pathlib.Path:
    return ROOT / "data/studies" / study["name"] / entry["name"]


def train_command(study: dict[str, Any], entry: dict[str, Any]) -> list[str]:
    return ["train.py", f"--config-name={entry['config']}", *study.get("overrides", []), *entry.get("overrides", [])]


def kept_row(study: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any] | None:
    """The row of an entry that was finished on another machine: same command, and no run of it here."""
    table = ROOT / "results" / study["name"] / "results.json"
    if folder_of(study, entry).exists() or not table.is_file():
        return None
    command = f"python {' '.join(train_command(study, entry))}"
    return next(
        (
            row
            for row in json.loads(table.read_text())["rows"]
            if row["name"] == entry["name"] and row["command"] == command
        ),
        None,
    )


def evaluates(study: dict[str, Any]) -> bool:
    return study.get("eval", []) is not None


def runs_of(study: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs of a study or of its grid, all tasks and methods with the first seed first, for an early comparison."""
    if "grid" not in study:
        return study["runs"]
    grid = study["grid"]
    return [
        {
            "name": f"{task} {method} {seed}",
            "config": config.split()[0],
            "overrides": [f"task.name={task}", f"training.seed={seed}", *config.split()[1:]],
        }
        for seed in grid["seeds"]
        for task in grid["tasks"]
        for method, config in grid["methods"].items()
    ]


def measure(study: dict[str, Any], entry: dict[str, Any], calls: int = 30) -> None:
    """Write times.json of a finished run: median times of a training step (without data loading) and predict_action.

    Processor time of this process on one thread: equal to wall-clock time on an idle machine, less affected by load.
    """
    folder = folder_of(study, entry)
    register_resolvers()
    torch.set_num_threads(1)
    cfg = OmegaConf.create(checkpoint_io.load(folder / "checkpoints/latest.ckpt")["cfg"])

    def milliseconds(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(calls + 3):
            started = time.process_time()
            call()
            times.append(1000 * (time.process_time() - started))
        return statistics.median(times[3:])

    with tempfile.TemporaryDirectory() as output:
        workspace = get_class(cfg._target_, BaseWorkspace)(cfg, output_dir=output)
        workspace.prepare()
        batch = workspace.stream.batch(0)
        step = milliseconds(lambda: workspace.optimise(itertools.repeat(batch)))
    policy = workspace.policy.eval()
    obs = dict_apply(batch["obs"] if isinstance(batch["obs"], dict) else {"obs": batch["obs"]}, lambda value: value[:1])
    with counting(policy) as counter:
        inference = milliseconds(lambda: policy.predict_action(obs))
    times = {"step_ms": step, "inference_ms": inference, "nfe": counter["network"] / counter["chunks"]}
    write_atomically(folder / "times.json", lambda file: file.write(json.dumps(times).encode()))


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
        lines.append(
            f"| {row['name']} | {row['score']:.3f} | {low:.2f} to {high:.2f} | {row['nfe']:g} | {row['steps']} "
            f"| {number(row['step_ms'], 0)} | {number(row['inference_ms'], 2)} |"
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


def write(
    study: dict[str, Any], source: pathlib.Path, rows: list[dict[str, Any]], jobs: int, threads: int
) -> pathlib.Path:
    folder = ROOT / "results" / study["name"]
    folder.mkdir(parents=True, exist_ok=True)
    command = f"python -m benchmarks.study {source.resolve().relative_to(ROOT)} --jobs {jobs} --threads {threads}"
    data = {
        "command": command,
        "study": study,
        "rows": rows,
        "versions": versions(),
        "cpu_threads_per_run": threads,
        "jobs": jobs,
    }
    write_atomically(folder / "results.json", lambda file: file.write(json.dumps(data, indent=2).encode()))
    shown = grid_table(study, rows) if "grid" in study else table(rows)
    text = (
        f"# {study['title']}\n\n{study['description']}\n\n{shown}\n\n"
        "Times are medians (p50) of processor time on one thread, at batch 1 for inference, measured one run after the "
        f"other at the end. Made with `{command}`; every run's own command, and all versions, are in results.json.\n"
    )
    write_atomically(folder / "README.md", lambda file: file.write(text.encode()))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and evaluate a list of configurations into one table.")
    parser.add_argument("study", type=pathlib.Path, help="a YAML file of benchmarks/studies/")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time (default 2)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run (default 1)")
    parser.add_argument(
        "--only", nargs="*", help="names of the runs to do; the table keeps the others that are finished"
    )
    options = parser.parse_args()
    study = yaml.safe_load(options.study.read_text())
    every = runs_of(study)
    entries = [entry for entry in every if not options.only or entry["name"] in options.only]
    if not entries:
        parser.error(f"no run is called {' or '.join(options.only)}; there are: {', '.join(e['name'] for e in every)}")
    last_file = "eval/eval_log.json" if evaluates(study) else "summary.json"
    entries += [
        entry
        for entry in every
        if entry not in entries and ((folder_of(study, entry) / last_file).is_file() or kept_row(study, entry))
    ]
    rows, failed = [], []
    with (
        concurrent.futures.ThreadPoolExecutor(options.jobs) as pool,
        tqdm(total=len(entries), unit="run", disable=None) as bar,
    ):
        futures = {pool.submit(run, study, entry, options.threads): entry["name"] for entry in entries}
        for future in concurrent.futures.as_completed(futures):
            try:
                rows.append(future.result())
                # after each run, so that an interrupted study has a table
                write(study, options.study, rows, options.jobs, options.threads)
            except subprocess.CalledProcessError as error:
                failed.append(futures[future])
                tqdm.write(
                    f"{futures[future]} failed ({error}); see data/studies/{study['name']}/{futures[future]}/study.log"
                )
            bar.update()
    finished = {row["name"] for row in rows}
    timed = [entry for entry in entries if entry["name"] in finished and folder_of(study, entry).exists()]
    if "grid" in study:  # the cost of a method does not depend on task and seed: one run per method is enough
        timed = list({entry["config"]: entry for entry in reversed(timed)}.values())
    for entry in tqdm(timed, desc="times", unit="run", disable=None):
        if not (folder_of(study, entry) / "times.json").is_file():
            measure(study, entry)
    rows = [run(study, entry, options.threads) for entry in entries if entry["name"] in finished]
    write(study, options.study, rows, options.jobs, options.threads)
    print(grid_table(study, rows) if "grid" in study else table(rows))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
