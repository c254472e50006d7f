"""Watch a long run from outside: do its memory, file handles or processes grow?

    python -m benchmarks.soak --steps 50000 --output results/reliability/soak.json

Starts `python train.py` on a tiny model with all parts of a run (validation, evaluations in separate processes with a
video, checkpoints, EMA, a data loader process), reads /proc for it and its children every second, and judges one number
per epoch: the median over the middle of the epoch, when only training takes place. Needs Linux.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks.__main__ import machine
from benchmarks.data import write_pusht
from diffusion_policy.storage.atomic import write_atomically

ROOT = pathlib.Path(__file__).resolve().parents[1]
FULL_RUN = 300_000  # steps of the paper's protocol, to which growth is projected
LIMIT = 0.05  # growth that a full run may have, relative to the memory in use
# More threads do not help a tiny model, and slow down a busy machine.
THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
MIDDLE = (0.2, 0.8)  # part of an epoch without evaluation and checkpoint
#: The judged numbers. PSS and USS are recorded only: they also grow when fewer processes share a page, for instance
#: when another program ends or after a write to a page shared by a fork.
MEMORY = {
    "rss": "resident memory of the training process",
    "anonymous": "of it, memory that is no file's",
    "tree_anonymous": "memory that is no file's, sum over all processes",
}
COUNTS = {
    "handles": "file handles of the training process",
    "threads": "threads of the training process",
    "tree_handles": "file handles of all processes",
    "tree_processes": "processes",
}


# ---------------------------------------------------------------------- the run
def overrides(steps: int, epoch: int) -> list[str]:
    training = {
        "device": "cpu",
        "steps_per_epoch": epoch,
        "num_epochs": steps // epoch,
        "log_every": max(1, epoch // 20),
        "val_every": 1,
        "sample_every": 1,
        "rollout_every": 1,
        "checkpoint_every": 1,
        "max_val_steps": "null",
    }
    rollouts = {"n_test": 4, "n_test_vis": 1, "max_steps": 40, "n_envs": 2}
    return [
        "preset=debug",
        "task.dataset.val_ratio=0.2",
        "dataloader.num_workers=1",
        *(f"training.{key}={value}" for key, value in training.items()),
        *(f"task.env_runner.{key}={value}" for key, value in rollouts.items()),
        "+task.env_runner.vector=async",
    ]


# ---------------------------------------------------------------------- the watch
def tree(root: int) -> list[int]:
    """The process and all its descendants that are running, as far as they can be read."""
    children: dict[int, list[int]] = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
        except OSError:  # ended meanwhile
            continue
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def measure(pid: int) -> dict[str, int]:
    """Bytes of memory, open files and threads of one process."""
    folder = pathlib.Path(f"/proc/{pid}")
    kilobytes = {
        name: int(rest.split()[0])
        for name, _, rest in (line.partition(":") for line in (folder / "smaps_rollup").read_text().splitlines()[1:])
    }
    return {
        "rss": 1024 * kilobytes["Rss"],
        "anonymous": 1024 * kilobytes["Anonymous"],
        "pss": 1024 * kilobytes["Pss"],
        "uss": 1024 * (kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]),
        "pss_anonymous": 1024 * kilobytes["Pss_Anon"],
        "pss_shared_memory": 1024 * kilobytes["Pss_Shmem"],
        "handles": len(os.listdir(folder / "fd")),
        "threads": len(os.listdir(folder / "task")),
    }


def sample(root: int) -> dict[str, int]:
    """Of the root process, and summed over its tree."""
    own = measure(root)
    others = []
    for pid in tree(root)[1:]:
        try:
            others.append(measure(pid))
        except (OSError, KeyError, IndexError):  # ended meanwhile
            continue
    every = [own, *others]
    sums = {
        f"tree_{key}": sum(m[key] for m in every)
        for key in ("anonymous", "pss_anonymous", "pss_shared_memory", "pss", "handles")
    }
    return {**own, **sums, "tree_processes": len(every)}


def logged_step(path: pathlib.Path) -> int:
    """Steps done according to the last whole line of a run's log, 0 before the first."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            return json.loads(file.read().rpartition(b"\n")[0].rpartition(b"\n")[2])["global_step"] + 1
    except (OSError, ValueError):
        return 0


def watch(command: list[str], run: pathlib.Path, interval: float) -> list[dict[str, float]]:
    """Samples of a training command from its start to its end; its output goes to <run>/output.txt."""
    samples = []
    start = time.monotonic()
    environment = {**os.environ, **THREADS}
    with (
        open(run / "output.txt", "w") as output,
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            while process.poll() is None:
                try:
                    samples.append(
                        {
                            "seconds": time.monotonic() - start,
                            "step": logged_step(run / "logs.json.txt"),
                            **sample(process.pid),
                        }
                    )
                except (OSError, KeyError):  # it ended meanwhile
                    continue
                time.sleep(interval)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        sys.exit(f"the training ended with code {process.returncode}:\n{(run / 'output.txt').read_text()[-3000:]}")
    return samples


# ---------------------------------------------------------------------- the judgement
def by_epoch(samples: list[dict[str, float]], epoch: int) -> list[dict[str, float]]:
    """One row an epoch: medians over the samples of its middle. Epochs too short to be sampled there are missing."""
    groups: dict[int, list[dict[str, float]]] = {}
    for s in samples:
        number, position = divmod(s["step"], epoch)
        if MIDDLE[0] * epoch <= position <= MIDDLE[1] * epoch:
            groups.setdefault(number, []).append(s)
    return [
        {
            "epoch": number,
            "samples": len(group),
            **{key: statistics.median_low(s[key] for s in group) for key in group[0]},
        }
        for number, group in sorted(groups.items())
    ]


def slope(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Least squares: slope of y over x and its standard error."""
    x = x - x.mean()
    value = float(x @ y / (x @ x))
    residual = y - y.mean() - value * x
    return value, math.sqrt(float(residual @ residual) / max(1, len(x) - 2) / float(x @ x))


def judge(epochs: list[dict[str, float]]) -> dict[str, Any]:
    """Growth of memory over the second half of the run; whether the counts are constant after the first evaluation."""
    late = [row for row in epochs if row["epoch"] >= (epochs[-1]["epoch"] + 1) / 2]
    x = np.array([row["step"] for row in late])
    memory = {}
    for key, what in MEMORY.items():
        value, error = slope(x, np.array([row[key] for row in late]))
        level = statistics.mean(row[key] for row in late)
        memory[key] = {
            "what": what,
            "bytes": round(level),
            "bytes_per_step": value,
            "standard_error": error,
            "points": len(late),
            "growth_per_300k_steps": value * FULL_RUN / level,
            "flat": value * FULL_RUN < LIMIT * level or value < 2 * error,
        }
    counts = {}
    for key, what in COUNTS.items():
        # The first evaluation starts the environments' processes.
        values = [row[key] for row in epochs if row["epoch"] >= 1]
        third = max(1, len(values) // 3)
        # The minimum: a handle that is being passed between processes is not a leak.
        first, last = min(values[:third]), min(values[-third:])
        counts[key] = {
            "what": what,
            "min": min(values),
            "max": max(values),
            "first_third": first,
            "last_third": last,
            "constant": last <= first,
        }
    return {
        "memory": memory,
        "counts": counts,
        "ok": all(m["flat"] for m in memory.values()) and all(c["constant"] for c in counts.values()),
        "limits": f"memory: least squares over the second half, one point per epoch, is flat if a run of {FULL_RUN} "
        f"steps would gain less than {LIMIT:.0%} or the slope is below twice its standard error; counts: the smallest "
        "of the last third of the epochs is not above that of the first",
    }


def draw(samples: list[dict[str, float]], epochs: list[dict[str, float]], path: pathlib.Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    steps = [s["step"] for s in samples]
    for key, what in MEMORY.items():
        (dots,) = left.plot(steps, [s[key] / 2**20 for s in samples], ".", markersize=1, alpha=0.3)
        left.plot(
            [row["step"] for row in epochs],
            [row[key] / 2**20 for row in epochs],
            color=dots.get_color(),
            linewidth=1,
            label=what,
        )
    for key, what in COUNTS.items():
        right.plot([row["step"] for row in epochs], [row[key] for row in epochs], linewidth=1, label=what)
    left.set(xlabel="step", ylabel="MiB", ylim=(0, None), title="memory")
    right.set(xlabel="step", ylim=(0, None), title="in the middle of each epoch")
    for axis in (left, right):
        axis.legend(fontsize=6)
    figure.savefig(path, dpi=90)


def soak(steps: int, epoch: int, folder: pathlib.Path, interval: float = 1.0) -> tuple[dict[str, Any], list, list]:
    """Run, watch and judge; return the report, every sample, and one row per epoch."""
    write_pusht(folder / "data.zarr", episodes=12, length=40)
    run = folder / "run"
    run.mkdir()
    settings = overrides(steps, epoch)
    command = [sys.executable, "train.py", "--config-name=train_idp_mlp_lowdim", *settings]
    samples = watch([*command, f"task.dataset.zarr_path={folder / 'data.zarr'}", f"hydra.run.dir={run}"], run, interval)
    epochs = by_epoch(samples, epoch)
    if len(epochs) < 4 or epochs[-1]["epoch"] + 1 < steps // epoch - 1:
        sys.exit(f"only {len(epochs)} of {steps // epoch} epochs could be sampled: make them longer")
    report = {
        "training": " ".join([*(f"{key}={value}" for key, value in THREADS.items()), "python", *command[1:]]),
        "steps": steps,
        "steps_per_epoch": epoch,
        "seconds": round(samples[-1]["seconds"]),
        "samples": len(samples),
        **judge(epochs),
    }
    return report, samples, epochs


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument(
        "--epoch", type=int, default=1000, help="steps from evaluation to evaluation (default: %(default)s)"
    )
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between samples (default: %(default)s)")
    parser.add_argument(
        "--output",
        default="results/reliability/soak.json",
        help="the JSON; a figure goes beside it (default: %(default)s)",
    )
    arguments = parser.parse_args(argv)
    output = pathlib.Path(arguments.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="soak_") as folder:
        report, samples, epochs = soak(arguments.steps, arguments.epoch, pathlib.Path(folder), arguments.interval)
    draw(samples, epochs, output.with_suffix(".png"))
    command = "python -m benchmarks.soak " + " ".join(sys.argv[1:] if argv is None else argv)
    text = json.dumps({"command": command.strip(), **machine(), **report, "epochs": epochs}, indent=1)
    write_atomically(output, lambda file: file.write(text.encode()))
    for m in report["memory"].values():
        print(
            f"{m['what']}: {m['bytes'] / 2**20:.0f} MiB, {m['bytes_per_step']:+.1f} +- {m['standard_error']:.1f} bytes "
            f"per step, {m['growth_per_300k_steps']:+.1%} in {FULL_RUN} steps: {'flat' if m['flat'] else 'GROWS'}"
        )
    for c in report["counts"].values():
        print(
            f"{c['what']}: {c['first_third']:g} at first, {c['last_third']:g} at the end "
            f"({c['min']:g} to {c['max']:g}): {'constant' if c['constant'] else 'GROWS'}"
        )
    print(f"written to {output}")
    sys.exit(0 if report["ok"] else 1)


if __name__ == "__main__":
    main()
