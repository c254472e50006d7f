"""What a run left in its folder: its status while it goes on, and its row of the tables when it is done."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from diffusion_policy.common.errors import DataError
from idp_workspace.suite import jobs
from idp_workspace.suite.grid import Run, Suite, folder_name

LOG = "logs.json.txt"
#: What a row keeps of the log, for curves: by the name of the curve, the key in the log.
CURVES = {
    "loss": "train_loss",
    "score": "test/mean_score",
    "m_mean": "m_mean",
    "m_p99": "m_p99",
    "m_positive": "m_positive",
    "effective_neighbors": "effective_neighbors",
}
#: Points of a curve; longer ones are thinned.
POINTS = 200
SCORE = "test/sim_max_reward_"


def description(
    run: Run, threads: int, environment: Mapping[str, str], made: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What job.json of a run holds."""
    return {
        "name": run.name,
        "train": run.arguments,
        "evaluations": {name: list(options) for name, options in run.evaluations.items()},
        "threads": threads,
        "environment": dict(environment),
        "made": made,
    }


def state_of(folder: pathlib.Path) -> dict[str, Any]:
    """How a job goes, as it says itself; empty if it has not started."""
    return _json(folder / jobs.STATE)


def cost_of(folder: pathlib.Path) -> dict[str, Any]:
    return _json(folder / jobs.COST)


def status(folder: pathlib.Path, run: Run) -> str:
    """done, running, or waiting; the files count, not what the job says.

    Raises:
        DataError: a result is half-written, or was made with another command.
    """
    if not folder.is_dir():
        return "waiting"
    check_same(folder, run)
    results = [folder / "summary.json", *(folder / name / "eval_log.json" for name in run.evaluations)]
    for path in results:
        if path.is_file():
            read_result(path)
    if all(path.is_file() for path in results):
        return "done"
    return "running" if jobs.is_locked(folder / jobs.LOCK) else "waiting"


def check_same(folder: pathlib.Path, run: Run) -> None:
    """Raise DataError if the folder holds a run of another command."""
    if not (folder / jobs.JOB).is_file():
        return
    job = read_result(folder / jobs.JOB)
    pairs = [(job["train"], run.arguments)]
    for name, options in run.evaluations.items():
        if (folder / name / "eval_log.json").is_file():
            pairs.append((job["evaluations"].get(name, []), list(options)))
    for before, now in pairs:
        if before != now:
            gone = " ".join(word for word in before if word not in now) or "nothing"
            new = " ".join(word for word in now if word not in before) or "nothing"
            raise DataError(
                f"run {run.name} was made with other settings ({gone} then, {new} now) and is kept in {folder}: give "
                "the run another name, choose another --output, or move it aside with --redo"
            )


def read_result(path: pathlib.Path) -> dict[str, Any]:
    """A result file; DataError if it is half-written."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is half-written or damaged ({error}): delete it, and it is made again") from error
    if not isinstance(data, dict):
        raise DataError(f"{path} is not a result: delete it, and it is made again")
    return data


def _json(path: pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# ---------------------------------------------------------------------- a run that goes on
@dataclasses.dataclass
class Progress:
    """How far a training is, from the end of its log."""

    stage: str = ""
    step: int = 0
    total: int = 0
    loss: float | None = None
    score: float | None = None
    first: tuple[float, int] | None = None  # time and step when it was seen first
    size: int = -1

    def update(self, folder: pathlib.Path) -> None:
        """Read what is new; cheap if nothing is."""
        self.stage = str(state_of(folder).get("stage", ""))
        path = folder / LOG
        if not self.total:
            self.total = _total_steps(folder / jobs.OUTPUT)
        try:
            size = path.stat().st_size
            if size == self.size:
                return
            self.size = size
            with open(path, "rb") as file:
                file.seek(max(0, size - 20_000))
                lines = file.read().splitlines()
        except OSError:
            return
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            self.step = int(record.get("global_step", self.step)) + 1
            self.loss = record.get("train_loss", self.loss)
            self.score = record.get("test/mean_score", self.score)
        if self.first is None and self.step:
            self.first = (time.time(), self.step)

    def remaining(self) -> float | None:
        """Seconds until the last step, at the pace since it was seen first."""
        if self.first is None or not self.total or self.step <= self.first[1]:
            return None
        pace = (time.time() - self.first[0]) / (self.step - self.first[1])
        return pace * max(0, self.total - self.step)


def _total_steps(path: pathlib.Path) -> int:
    """The number of steps that the training announces."""
    try:
        with open(path, errors="replace") as file:
            found = re.findall(r", (\d+) steps of batch", file.read(100_000))
    except OSError:
        return 0
    return int(found[-1]) if found else 0


# ---------------------------------------------------------------------- a run that is done
def row_of(folder: pathlib.Path, run: Run, curves: bool = False) -> dict[str, Any]:
    """The row of a finished run, from the files in its folder."""
    summary = read_result(folder / "summary.json")
    times, cost = _json(folder / "times.json"), cost_of(folder)
    row: dict[str, Any] = {
        "name": run.name,
        "method": run.method,
        "task": run.task,
        "backbone": run.backbone,
        "seed": run.seed,
        "group": run.group,
        "command": run.command,
        "best_evaluation": summary["best_score"],
        "mean_of_last": summary.get("mean_of_last_scores"),
        "mean_of_best": summary["mean_of_best_scores"],
        "last": summary["score"],
        "evaluations": summary["evaluations"],
        "steps": summary["steps"],
        "dataset": summary.get("dataset"),
        "made": _json(folder / "made.json") or None,
        "cpu_minutes": cost.get("minutes"),
        **{key: times.get(key) for key in ("step_ms", "inference_ms", "nfe")},
    }
    if curves:
        row |= {"curves": read_curves(folder / LOG), "videos": videos_of(folder)}
    if "eval" not in run.evaluations:
        return row | {"score": summary["score"]}
    log = read_result(folder / "eval/eval_log.json")
    row["nfe"] = log["nfe"]
    row["latency_ms"] = log["latency_ms"]["p50"]
    row["by_nfe"] = [
        [each["nfe"], each["latency_ms"]["p50"], each["test/mean_score"]] for each in log.get("by_nfe", {}).values()
    ]
    others = {name.removeprefix("eval_"): _json(folder / name / "eval_log.json") for name in run.evaluations}
    others.pop("eval")
    row["also"] = {name: found.get("test/mean_score") for name, found in others.items()}
    row["also_scores"] = {name: scores_of(found) for name, found in others.items()}
    if "open_loop" in log:
        return row | open_loop_row(log)
    return row | {
        "score": log["test/mean_score"],
        "interval_95": log["interval_95"],
        "n_episodes": log["n_episodes"],
        "ends_still": log.get("test/ends_still"),
        "scores": scores_of(log),
    }


def scores_of(log: Mapping[str, Any]) -> dict[str, float]:
    """Score by start, of the test episodes of an evaluation."""
    return {key: value for key, value in log.items() if key.startswith(SCORE)}


def open_loop_row(log: dict[str, Any]) -> dict[str, Any]:
    """What a row keeps of eval_log.json of an open-loop evaluation; the score is the share of variance explained."""
    found = log["open_loop"]
    kept = {key: found[key] for key in ("names", "rmse", "variance_explained", "jerk", "jerk_per", "episodes", "steps")}
    kept["hold"] = found["hold"]["variance_explained"]
    kept["by_chunk_step"] = found["by_chunk_step"]["rmse"]
    means = {key.removeprefix("val/"): value for key, value in log.items() if key.startswith("val/")}
    return {**means, "open_loop": kept, "nfe": log["nfe"], "latency_ms": log["latency_ms"]["p50"]}


def read_curves(path: pathlib.Path) -> dict[str, list[list[float]]]:
    """The curves of a log: by name, [steps, values]."""
    found: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in CURVES}
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        for name, key in CURVES.items():
            if isinstance(value := record.get(key), (int, float)):
                found[name][0].append(record["global_step"] + 1)
                found[name][1].append(value)
    return {name: thinned(*curve) for name, curve in found.items() if curve[0]}


def thinned(steps: list[int], values: list[float]) -> list[list[float]]:
    """At most POINTS points: means of equal parts, at the last step of each."""
    if len(steps) <= POINTS:
        return [list(steps), [float(f"{value:.5g}") for value in values]]
    parts = np.array_split(np.arange(len(steps)), POINTS)
    array = np.asarray(values, dtype=float)
    return [[steps[part[-1]] for part in parts], [float(f"{array[part].mean():.5g}") for part in parts]]


def videos_of(folder: pathlib.Path) -> list[str]:
    """Videos of the run, relative to its folder: those of its evaluations, else of its training."""
    found = sorted(folder.glob("eval*/media/*.mp4")) or sorted(folder.glob("media/*.mp4"))
    return [str(path.relative_to(folder)) for path in found]


def rows_of(suite: Suite, curves: bool = False) -> list[dict[str, Any]]:
    """Rows of the runs of a suite that are done."""
    rows = []
    for run in suite.runs:
        folder = suite.output / folder_name(run.name)
        if status(folder, run) == "done":
            rows.append(row_of(folder, run, curves) | {"folder": folder.name})
    return rows
