"""Start-up: the time until the help is printed, and until the first training step is in the log.

Both are wall-clock times of a new process and mean something on an idle machine only; the processor time beside them
hardly depends on the load. Importing torch is measured, too, because it is the part that no choice of this project
changes.
"""

from __future__ import annotations

import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from benchmarks.common import row

ROOT = pathlib.Path(__file__).resolve().parents[1]
TRAIN = ["train.py", "--config-name=train_idp_mlp_lowdim", "preset=cpu", "training.device=cpu"]


def run_to_end(*arguments: str) -> float:
    """Return the seconds that a command takes."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - start


def run_to_first_step() -> float:
    """Return the seconds until train.py has logged its first step."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "logs.json.txt")
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *TRAIN, "training.log_every=1", f"hydra.run.dir={folder}"],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while not (log.is_file() and log.stat().st_size):
                if process.poll() is not None:
                    raise RuntimeError(f"train.py ended with exit code {process.returncode} before its first step")
                time.sleep(0.005)
            return time.perf_counter() - start
        finally:
            process.kill()
            process.wait()


def measure(command: Callable[..., float], *arguments: str) -> tuple[float, float]:
    """Return the seconds of a command, and its processor time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = command(*arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run(quick: bool = False) -> list[dict]:
    rounds = 1 if quick else 3
    commands = [(run_to_end, "-c", "import torch"), (run_to_end, "train.py", "--help"), (run_to_first_step,)]
    for command in commands:  # fills the caches of the operating system
        measure(*command)
    times = [[measure(*command) for command in commands] for _ in range(rounds)]
    (torch, torch_cpu), (usage, usage_cpu), (step, step_cpu) = (
        map(statistics.median, zip(*column, strict=True)) for column in zip(*times, strict=True)
    )
    alone = f"{step_cpu:.2f} s of processor time; import torch alone: {torch:.2f} s, {torch_cpu:.2f} s"
    return [
        row("train.py --help", usage, "s", "< 2", f"{usage_cpu:.2f} s of processor time"),
        row("train.py, until the first step, make train", step, "s", "< 6", alone),
    ]
