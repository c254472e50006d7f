"""Score against delay on PushT: a loop that waits for its policy, and the real-time runtime.

    python -m benchmarks.study benchmarks/studies/latency_vs_score.yaml --jobs 1      trains the policies (an hour)
    python -m benchmarks.latency_vs_score                                             plays them (some ten minutes)
    python -m benchmarks.latency_vs_score --only-latency                              on a quiet machine, if it was busy

Every policy is played with every delay, from the same starts. Where each method stands on the curve is measured, too:
the processor time of a call with MIP's transformer on this machine, in control steps of PushT's 10 Hz. Writes
results.json, README.md and latency_vs_score.png to results/latency_vs_score/.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.__main__ import machine
from benchmarks.fleet import RUNTIME, WAITS, play
from benchmarks.untrained import untrained
from diffusion_policy.common.random_state import seed_everything
from diffusion_policy.common.statistics import mean_interval
from diffusion_policy.latency.timing import window
from diffusion_policy.policy.loading import load_policy
from diffusion_policy.storage import atomic

ROOT = pathlib.Path(__file__).resolve().parents[1]
METHODS = {"idp": "IDP", "mip": "MIP", "flow": "Flow (9 calls)", "diffusion": "DP (100 calls)"}
HZ = 10  # of PushT
FIRST_SEED = 100_000  # no demonstration starts there


def own_delay(method: str, preset: str) -> float:
    """Processor time of a call with MIP's transformer at batch 1, its latency on an idle core, in control steps."""
    policy, _ = untrained(f"train_{method}_transformer_lowdim", f"preset={preset}")
    call = functools.partial(policy.predict_action, {"obs": torch.rand(1, policy.n_obs_steps, policy.obs_dim)})
    call()
    return statistics.median(cpu for _, cpu in window(call, calls=30, seconds=10)) / 1000 * HZ


def measure(
    runs: pathlib.Path, methods: list[str], delays: list[int], episodes: int, steps: int
) -> list[dict[str, Any]]:
    """Play the policies of the study with every delay."""
    rows: list[dict[str, Any]] = []
    with tqdm(total=2 * len(methods) * len(delays), unit="evaluation", disable=None) as bar:
        for method in methods:
            policy = load_policy(runs / method, "cpu")
            for mode in (WAITS, RUNTIME):
                for delay in delays:
                    seed_everything(0)
                    scores = play(policy, delay, mode, range(FIRST_SEED, FIRST_SEED + episodes), steps)
                    row = {"method": method, "mode": mode, "delay": delay, "score": float(scores.mean())}
                    rows.append(row | {"interval_95": mean_interval(scores)})
                    bar.update()
    return rows


def own_delays(methods: Iterable[str], preset: str) -> dict[str, float]:
    return {method: own_delay(method, preset) for method in methods}


def curve(data: dict[str, Any], method: str, mode: str) -> tuple[list[int], list[float]]:
    rows = [row for row in data["rows"] if (row["method"], row["mode"]) == (method, mode)]
    return [row["delay"] for row in rows], [row["score"] for row in rows]


def at_own_delay(data: dict[str, Any], method: str, mode: str) -> float | None:
    """The score where the method stands, between the measured delays; None beyond them."""
    delays, scores = curve(data, method, mode)
    own = data["own_delay"][method]
    return float(np.interp(own, delays, scores)) if own <= delays[-1] else None


def plot(data: dict[str, Any], path: pathlib.Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, mode in zip(figure.subplots(1, 2, sharey=True), (WAITS, RUNTIME), strict=True):
        for i, method in enumerate(data["own_delay"]):
            delays, scores = curve(data, method, mode)
            own, score = data["own_delay"][method], at_own_delay(data, method, mode)
            label = f"{METHODS[method]}: {own:.1f} steps"
            axis.plot(delays, scores, ".-", color=f"C{i}", label=label)
            where = (own, score) if score is not None else (delays[-1], scores[-1])
            axis.plot(*where, "*" if score is not None else ">", color=f"C{i}", markersize=13)
        axis.set(xlabel="delay, control steps of 100 ms", title=mode, ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    lines, labels = axis.get_legend_handles_labels()
    title = "own delay with MIP's transformer: the star, or beyond the arrow"
    figure.legend(lines, labels, loc="outside lower center", ncols=len(labels), title=title)
    figure.axes[0].set_ylabel("mean score")
    figure.savefig(path, dpi=120)


README = """# Score against delay

PushT from state, {episodes} held-out starts, {steps} control steps of 100 ms. A plan arrives so many control steps
after its observations. *Waits*: the robot stands still meanwhile, as in a plain loop. *Runtime*: it goes on with the
last plan and drops what is stale ([docs](../../docs/runtime.md)). The policies are small MLPs, trained for 5,000
steps, which are few for Flow and DP. In PushT nothing moves while the robot stands, so waiting costs time alone; the
runtime is made for worlds that do not wait.
`own delay` is the processor time of a plan with MIP's transformer on one thread of this machine; the last column is
the score there, and the stars in the figure (an arrow: beyond the figure).

![score against delay](latency_vs_score.png)

{table}

Made with `python -m benchmarks.study benchmarks/studies/latency_vs_score.yaml --jobs 1` and
`python -m benchmarks.latency_vs_score`; intervals and versions are in results.json.
"""


def table(data: dict[str, Any]) -> str:
    delays = sorted({row["delay"] for row in data["rows"]})
    lines = [
        f"| method | loop | {' | '.join(f'{delay}' for delay in delays)} | own delay | score at own delay |",
        "|---" * (len(delays) + 4) + "|",
    ]
    for method, own in data["own_delay"].items():
        for mode in (WAITS, RUNTIME):
            scores = " | ".join(f"{score:.2f}" for score in curve(data, method, mode)[1])
            there = at_own_delay(data, method, mode)
            last = f"below {curve(data, method, mode)[1][-1]:.2f}" if there is None else f"{there:.2f}"
            lines.append(f"| {METHODS[method]} | {mode} | {scores} | {own:.1f} steps | {last} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.latency_vs_score",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=pathlib.Path, default=ROOT / "data/studies/latency_vs_score")
    parser.add_argument("--delays", type=int, nargs="+", default=[0, 1, 2, 4, 8, 16, 32])
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--steps", type=int, default=300, help="of an episode")
    parser.add_argument("--preset", default="paper", help="size of the networks whose latency is measured")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "results/latency_vs_score")
    parser.add_argument("--only-latency", action="store_true", help="measure the delays again and keep the scores")
    parser.add_argument("--only", nargs="+", choices=METHODS, help="methods to play; others keep their rows")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    before = options.output / "results.json"
    data: dict[str, Any] = json.loads(before.read_text()) if before.is_file() else {"rows": []}
    if not options.only_latency:
        methods = [name for name in options.only or METHODS if (options.runs / name).is_dir()]
        if not methods:
            parser.error(f"{options.runs} has no trained policies: run the study first")
        if options.only and [data.get(name) for name in ("episodes", "steps")] != [options.episodes, options.steps]:
            data["rows"] = []  # not comparable
        kept = [row for row in data["rows"] if options.only and row["method"] not in methods]
        rows = measure(options.runs, methods, sorted(options.delays), options.episodes, options.steps)
        data = {"episodes": options.episodes, "steps": options.steps, "rows": kept + rows}
    played = {row["method"] for row in data["rows"]}
    data |= machine() | {"own_delay": own_delays([name for name in METHODS if name in played], options.preset)}
    options.output.mkdir(parents=True, exist_ok=True)
    atomic.write_text(options.output / "results.json", json.dumps(data, indent=2) + "\n")
    plot(data, options.output / "latency_vs_score.png")
    text = README.format(table=table(data), episodes=data["episodes"], steps=data["steps"])
    atomic.write_text(options.output / "README.md", text)
    print(table(data))


if __name__ == "__main__":
    main()
