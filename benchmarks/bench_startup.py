"""Start-up: the time until the help is printed, and until the first training step is in the log.

Both are wall-clock times of a new process and mean something on an idle machine only. Importing torch is measured
beside them, because it is the part that no choice of this project changes.
"""

from __future__ import annotations

import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks.common import row

ROOT = pathlib.Path(__file__).resolve().parents[1]
TRAIN = ["train.py", "--config-name=train_idp_mlp_lowdim", "preset=cpu", "training.device=cpu"]


def seconds_to_end(*arguments: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - start


def seconds_to_first_step() -> float:
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


def run(quick: bool = False) -> list[dict]:
    rounds = 1 if quick else 3
    seconds_to_end("train.py", "--help")  # fills the caches of the operating system
    seconds_to_first_step()
    times = [
        (seconds_to_end("-c", "import torch"), seconds_to_end("train.py", "--help"), seconds_to_first_step())
        for _ in range(rounds)
    ]
    torch, usage, step = (statistics.median(column) for column in zip(*times, strict=True))
    return [
        row("train.py --help", usage, "s", "< 2"),
        row("train.py, until the first step, make train", step, "s", "< 6", f"import torch alone: {torch:.2f} s"),
    ]
