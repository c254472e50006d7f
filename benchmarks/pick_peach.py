"""Pick Peach: speed and success of the scripted expert, where policies put the peach, and why they fail.

    python -m benchmarks.pick_peach                                     # the expert, and the runs of the suite
    python -m benchmarks.pick_peach --strip docs/pick_peach.png         # the pictures of two demonstrations

Writes README.md and results.json to results/pick_peach. The runs are those of suites/pick_peach.yaml, one line for each
method with all its training seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

import numpy as np
from tqdm import tqdm

from diffusion_policy.env.pick_peach import expert
from diffusion_policy.env.pick_peach.pick_peach_env import FAILURES, PLACEMENTS, PickPeachEnv
from diffusion_policy.env.pick_peach.simulation import CAMERAS, draw
from diffusion_policy.scripts.generate_demos import write_episode
from diffusion_policy.storage.atomic import write_text
from diffusion_policy.storage.checkpoint_io import versions
from idp_workspace.suite.statistics import wilson

STARTS_FROM = 600000  # seeds that no demonstration and no evaluation has
FRAMES, STEP_SHARES = (300, 400), (0.2, 0.34, 0.52, 0.72, 0.82, 0.97)  # of the pictures: size, and when


def expert_numbers(episodes: int, with_images: int) -> dict[str, Any]:
    """Attempts, successes, length and speed of demonstrations, written to files, in this process alone."""
    out: dict[str, Any] = {}
    lengths, successes = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for name, count, cameras in (("state", episodes, ()), ("images", with_images, CAMERAS)):
            env = PickPeachEnv(cameras, terminate_on_success=False)
            expert.record(env, STARTS_FROM - 4)  # loads libraries
            wall, cpu = time.perf_counter(), time.process_time()
            for seed in tqdm(range(STARTS_FROM, STARTS_FROM + count), desc=f"expert, {name}", disable=None):
                steps = expert.record(env, seed)
                if steps is not None:
                    write_episode(pathlib.Path(folder) / f"{name}_{seed}.hdf5", steps, {"seed": seed})
                if name == "state":
                    successes += steps is not None
                    lengths += [len(steps["action"])] if steps else []
            out[f"episodes_per_second_{name}"] = count / (time.perf_counter() - wall)
            out[f"episodes_per_core_second_{name}"] = count / (time.process_time() - cpu)
    interval = wilson(successes, episodes)
    return out | {
        "attempts": episodes,
        "successes": successes,
        "interval_95": interval,
        "steps": [min(lengths), float(np.mean(lengths)), max(lengths)],
    }


def evaluations(runs: pathlib.Path) -> list[dict[str, Any]]:
    """The evaluations in the folder of a suite: one entry for each method and kind of evaluation, over all seeds."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for path in sorted(runs.glob("*/eval*/eval_log.json")):
        run = path.parent.parent.name  # task-method-backbone-seed
        name, _, _ = run.rpartition("-")
        found.setdefault((name, path.parent.name), []).append(json.loads(path.read_text()))
    return [{"name": name, "evaluation": kind, **pooled(logs)} for (name, kind), logs in found.items()]


def pooled(logs: list[dict[str, Any]]) -> dict[str, Any]:
    """Success, placements, starts and failures over all episodes of several evaluations."""
    episodes = [episode for log in logs for episode in log["episodes"]]
    count, successes = len(episodes), sum(episode["max_reward"] == 1 for episode in episodes)

    def share(key: str, value: str) -> float:
        return sum(episode[key] == value for episode in episodes) / count

    return {
        "runs": len(logs),
        "episodes": count,
        "success": successes / count,
        "interval_95": wilson(successes, count),
        "by_run": [log["test/mean_score"] for log in logs],
        "placement": {name: share("placement", name) for name in PLACEMENTS},
        "placement_by_run": [{side: log[f"test/placement/{side}"] for side in PLACEMENTS} for log in logs],
        "failure": {name: share("failure", name) for name in FAILURES},
        "success_by_start": {
            start: float(np.mean([e["max_reward"] for e in episodes if e["start"] == start]))
            for start in ("left", "right")
        },
        "n_latency_steps": sorted({log["n_latency_steps"] for log in logs}),
        "latency_ms": float(np.median([log["latency_ms"]["p50"] for log in logs])),
        "nfe": logs[0]["nfe"],
        "global_step": logs[0]["global_step"],
        "dataset": logs[0]["dataset"],
    }


def markdown(about: dict[str, Any]) -> str:
    demos = about["expert"]
    low, high = demos["interval_95"]
    shortest, mean, longest = demos["steps"]
    lines = [
        "# Pick Peach: the expert, placements and failures",
        f"`{about['command']}`. The task is on [its page](../../docs/pick_peach.md).",
        "## The scripted expert",
        f"{demos['successes']} of {demos['attempts']} attempts succeed (95 % interval {low:.3f} to {high:.3f}), in "
        f"{shortest} to {longest} steps of 20 ms (mean {mean:.0f}). One core writes "
        f"{demos['episodes_per_core_second_state']:.1f} episodes per second of processor time without cameras, and "
        f"{demos['episodes_per_core_second_images']:.2f} with two of 96 x 96 pixels.",
    ]
    for kind in dict.fromkeys(row["evaluation"] for row in about["rows"]):
        rows = [row for row in about["rows"] if row["evaluation"] == kind]
        lines += [f"## {kind}", "\n".join(table(rows))]
    lines.append(
        "Shares of all episodes, of all training seeds together. Intervals (95 %) are Wilson's over episodes, and do "
        "not cover the difference between training seeds, which is in the column of the single runs. Left, right and "
        "middle are where the peach came to rest on the plate; all three are successes. Latency is the median time "
        "of a call and, after the stroke, the control steps that this was taken for."
    )
    return "\n\n".join(lines) + "\n"


def table(rows: list[dict[str, Any]]) -> list[str]:
    head = ["method", "episodes", "success", "95 % interval", "single runs", *PLACEMENTS]
    head += [name.replace("_", " ") for name in FAILURES]
    lines = [f"| {' | '.join([*head, 'latency'])} |", f"|{'---|' * (len(head) + 1)}"]
    for row in rows:
        cells = [row["name"], str(row["episodes"]), f"{row['success']:.2f}"]
        cells += ["{:.2f} to {:.2f}".format(*row["interval_95"]), ", ".join(f"{score:.2f}" for score in row["by_run"])]
        cells += [f"{share:.2f}" for share in (*row["placement"].values(), *row["failure"].values())]
        cells.append(f"{row['latency_ms']:.1f} ms / {', '.join(map(str, row['n_latency_steps']))}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def strip(path: pathlib.Path) -> None:
    """Pictures of a demonstration to the left and one to the right: the start from the head, then from the front."""
    import imageio.v3 as iio

    rows = []
    for seed in (0, 1):
        env = PickPeachEnv(terminate_on_success=False)
        actions = expert.demonstrate(env, seed)
        marks = [round(share * (len(actions) - 40)) for share in STEP_SHARES]
        pictures = [picture(env, "head")]
        for step, action in enumerate(actions[: marks[-1] + 1]):
            if step in marks:
                pictures.append(picture(env, "front"))
            env.step(action)
        rows.append(np.concatenate(pictures, axis=1))
    iio.imwrite(path, np.concatenate(rows), extension=".png")
    print(f"{path}: {os.path.getsize(path) / 1000:.0f} kB")


def picture(env: PickPeachEnv, camera: str) -> np.ndarray:
    """What a camera sees, drawn twice as large and scaled down."""
    import cv2

    height, width = FRAMES
    scene = draw(env.data, camera, height, width, shadows=True)
    return cv2.resize(scene, (width // 2, height // 2), interpolation=cv2.INTER_AREA)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pick_peach",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--strip", type=pathlib.Path, metavar="PNG", help="only draw the pictures, into this file")
    parser.add_argument(
        "--runs", type=pathlib.Path, nargs="*", help="folders of suites (default: those that there are)"
    )
    parser.add_argument("--episodes", type=int, default=200, help="of the expert (default: %(default)s)")
    parser.add_argument("--images", type=int, default=4, help="further ones with cameras (default: %(default)s)")
    parser.add_argument("--output", default="results/pick_peach", type=pathlib.Path, help="(default: %(default)s)")
    options = parser.parse_args(argv)
    if options.strip:
        strip(options.strip)
        return
    if options.episodes < 1 or options.images < 1:
        parser.error("--episodes and --images must be at least 1")
    folders = options.runs if options.runs is not None else sorted(pathlib.Path("data/suites").glob("pick_peach_*"))
    about: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.pick_peach", *(sys.argv[1:] if argv is None else argv)]),
        "versions": versions(),
        "expert": expert_numbers(options.episodes, options.images),
        "rows": [row for folder in folders for row in evaluations(folder)],
    }
    text = markdown(about)
    write_text(options.output / "results.json", json.dumps(about, indent=1) + "\n")
    write_text(options.output / "README.md", text)
    print(text)


if __name__ == "__main__":
    main()
