"""How well the real-time runtime keeps its rate.

    python -m benchmarks.runtime                    10 minutes per case; run it on a quiet machine
    python -m benchmarks.runtime --seconds 30 --only "MLP, 200 Hz"

The robot is a pair of functions that cost nothing, so that what is measured is the loop, the worker beside it and the
machine. Weights are random: latency does not depend on them. A probe of each core notes when the machine itself stood
still, see `benchmarks.stalls`. Writes results.json, README.md and a plot per case to
results/runtime/; cases that are not run keep their rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import re
from typing import Any

import numpy as np
import torch

from benchmarks import stalls
from benchmarks.__main__ import machine
from benchmarks.process_planner import ProcessPlanner
from benchmarks.untrained import untrained
from diffusion_policy.policy.interface import ChunkPredictor
from diffusion_policy.real_world import ActionChunkExecutor, CadenceReport, ThreadPlanner
from diffusion_policy.storage import atomic

ROOT = pathlib.Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration, a rate, and where its plans are made."""

    name: str
    config: str
    preset: str
    hz: float
    target: bool = False  # no late step is the aim
    process: bool = False


CASES = (
    Case("IDP, MIP's transformer, 50 Hz", "train_idp_transformer_lowdim", "paper", 50, target=True),
    Case("IDP, small MLP, 200 Hz", "train_idp_mlp_lowdim", "cpu", 200, target=True),
    Case("IDP, small MLP, 200 Hz, in a process", "train_idp_mlp_lowdim", "cpu", 200, process=True),
    Case("IDP, MIP's transformer, 50 Hz, in a process", "train_idp_transformer_lowdim", "paper", 50, process=True),
    Case("DP (100 steps), MIP's transformer, 50 Hz", "train_diffusion_transformer_lowdim", "paper", 50),
)


def predictor(config: str, preset: str) -> ChunkPredictor:
    torch.set_num_threads(1)
    return ChunkPredictor(untrained(config, f"preset={preset}")[0])


def run(case: Case, seconds: float, real_time: bool) -> tuple[CadenceReport, dict[str, Any]]:
    """Run one case; return its report, and what the machine did meanwhile.

    A slow policy stops and goes, so the watchdog is off.
    """
    plan = predictor(case.config, case.preset)
    interface = plan.interface
    values = np.random.default_rng(0).random((1000, *interface.observation["obs"].shape))
    step = iter(range(10**9))
    executor = ActionChunkExecutor(
        plan,
        lambda: {"obs": values[next(step) % 1000]},
        lambda action: None,
        case.hz,
        n_obs_steps=interface.n_obs_steps,
        replan_every=interface.n_action_steps,
        watchdog=1e9,
        real_time=real_time,
        planner=(lambda _: ProcessPlanner(predictor, case.config, case.preset)) if case.process else ThreadPlanner,
    )
    found: list[tuple[float, float]] = []
    with stalls.watched(found) as watched:
        report = executor.run(seconds=seconds)
    return report, beside_stalls(report, found) if watched else {}


def beside_stalls(report: CadenceReport, found: list[tuple[float, float]]) -> dict[str, Any]:
    """The stalls of the machine in a run, and the late steps that would have been late without them."""
    period, lateness = 1 / report.hz, report.lateness
    stood = stalls.overlap(report.due, report.due + lateness, found)
    own = int(((lateness > period) & (lateness - stood > period)).sum())
    # A step is missed because the one before it was late.
    return {
        "stalls": len(found),
        "longest_stall_ms": 1000 * max((end - begin for begin, end in found), default=0.0),
        "late_without_stalls": own + report.counts["missed"] if own else 0,
    }


def table(rows: list[dict[str, Any]]) -> str:
    head = (
        "| case | minutes | steps | late | without stalls | stalls, longest | worst, ms | p99, ms | plan p50, ms "
        "| plans used | steps held |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|\n"
    )
    lines = [
        f"| {row['name']} | {row['seconds'] / 60:.1f} | {row['steps']} | {row['late_steps']} "
        f"| {row.get('late_without_stalls', '-')} | {stalled(row)} | {row['worst_ms']:.1f} "
        f"| {row['lateness_ms']['p99']:.2f} | {row['plans']['latency_ms']['p50']:.1f} | {row['plans']['accepted']} "
        f"| {row['held_steps']} |"
        for row in rows
    ]
    return head + "\n".join(lines)


def stalled(row: dict[str, Any]) -> str:
    return f"{row['stalls']}, {row['longest_stall_ms']:.1f} ms" if "stalls" in row else "-"


README = """# The real-time runtime

How well `ActionChunkExecutor` keeps its rate beside a policy on one thread. A step is late if its action was handed
over after the next step was due; `worst` and `p99` are the time from a step's due time to the end of its work. A new
plan is requested every 8 steps. `steps held` is the time without an action: a policy that is slower than its chunk
makes the robot stop and go, and the loop is punctual all the same.

`stalls` are the machine's own: a program on each core that does nothing but sleep for a millisecond at a time, with a
higher priority than the loop and its worker, woke more than 2 ms late. `without stalls` are the steps that are late
when the time of the stalls is taken off.

{table}

Real-time priority of the loop (`real_time=True`): {priority}.
Load of the machine (average over a minute) when each case began: {load}.

Made with `{command}`; versions and all percentiles are in results.json.
"""


def write(folder: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write_text(folder / "results.json", json.dumps({"rows": rows}, indent=2) + "\n")
    load = ", ".join(f"{row['machine']['load_average'][0]:.1f}" for row in rows)
    priority = ", ".join("yes" if row["real_time"] else "no" for row in rows)
    text = README.format(priority=priority, table=table(rows), load=load, command="python -m benchmarks.runtime")
    atomic.write_text(folder / "README.md", text)


def main(arguments: list[str] | None = None) -> None:
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.runtime", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="duration of a case (default 600)")
    parser.add_argument("--only", nargs="+", choices=names, metavar="CASE", help=f"of: {'; '.join(names)}")
    parser.add_argument("--ordinary", action="store_true", help="without real-time priority of the loop")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "results/runtime")
    options = parser.parse_args(arguments)
    before = options.output / "results.json"
    rows = {row["name"]: row for row in json.loads(before.read_text())["rows"]} if before.is_file() else {}
    for case in CASES:
        if options.only and case.name not in options.only:
            continue
        about = {"name": case.name, "seconds": options.seconds, "target": case.target, "machine": machine()}
        report, machine_stalls = run(case, options.seconds, not options.ordinary)
        print(f"{case.name}\n{report}\n{machine_stalls}\n", flush=True)
        rows[case.name] = about | report.as_dict() | machine_stalls
        write(options.output, [rows[name] for name in names if name in rows])
        report.plot(options.output / f"{re.sub('[^a-z0-9]+', '_', case.name.lower()).strip('_')}.png")


if __name__ == "__main__":
    main()
