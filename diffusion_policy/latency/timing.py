"""How long a call takes: percentiles over windows that alternate between the things compared."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)
WARMUP_SECONDS = 0.5


@dataclasses.dataclass
class Timing:
    """Milliseconds of calls at batch 1. The warm-up, which is not part of them, is the first call and some more.

    `windows` is wall-clock time, what a robot waits. `cpu` is the processor's time, which other programs disturb less.
    """

    first_ms: float = 0.0
    warmup_calls: int = 0
    warmup_seconds: float = 0.0
    windows: list[list[float]] = dataclasses.field(default_factory=list)
    cpu: list[list[float]] = dataclasses.field(default_factory=list)

    def percentile(self, percent: float) -> float:
        """Return the median over windows: what happens beside the measurement disturbs some of them."""
        return statistics.median(float(np.percentile(window, percent)) for window in self.windows)

    @property
    def cpu_p50(self) -> float:
        return statistics.median(float(np.median(window)) for window in self.cpu)

    @property
    def calls(self) -> int:
        return sum(map(len, self.windows))

    @property
    def tail(self) -> float:
        """p99 / p50, the median over windows."""
        return _tail(self.windows)

    @property
    def cpu_tail(self) -> float:
        return _tail(self.cpu)

    def described(self) -> dict[str, Any]:
        """The result as JSON."""
        return {
            **{f"p{percent}": self.percentile(percent) for percent in PERCENTILES},
            "max": max(map(max, self.windows)),
            "p99_over_p50": self.tail,
            "cpu": {"p50": self.cpu_p50, "p99_over_p50": self.cpu_tail},
            "calls": self.calls,
            "windows": len(self.windows),
            "warmup": {"first_ms": self.first_ms, "calls": self.warmup_calls, "seconds": self.warmup_seconds},
        }


def _tail(windows: list[list[float]]) -> float:
    return statistics.median(float(np.divide(*np.percentile(window, [99, 50]))) for window in windows)


def milliseconds(call: Callable[[], Any]) -> tuple[float, float]:
    """Return the wall-clock time and the processor's time of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return 1000 * (time.perf_counter() - wall), 1000 * (time.process_time() - cpu)


def warm_up(call: Callable[[], Any]) -> Timing:
    """Call for WARMUP_SECONDS, and at least three times; the first call may compile or load something."""
    begun = time.perf_counter()
    out = Timing(first_ms=milliseconds(call)[0], warmup_calls=1)
    while out.warmup_calls < 3 or time.perf_counter() - begun < WARMUP_SECONDS:
        call()
        out.warmup_calls += 1
    out.warmup_seconds = time.perf_counter() - begun
    return out


def window(call: Callable[[], Any], calls: int, seconds: float) -> list[tuple[float, float]]:
    """Time `calls` calls after one that is not counted; fewer, but at least three, if they take over `seconds`.

    The first call finds the caches full of what ran before it, which is no part of an otherwise idle process.
    """
    call()
    out: list[tuple[float, float]] = []
    deadline = time.perf_counter() + seconds
    while len(out) < calls and (len(out) < 3 or time.perf_counter() < deadline):
        out.append(milliseconds(call))
    return out


def measure(
    tasks: dict[Any, Callable[[], Any]], windows: int = 5, calls: int = 200, seconds: float = 2.0
) -> dict[Any, Timing]:
    """Time the tasks in turn, A, B, A, B, ..., so that other load affects all of them."""
    timings = {name: warm_up(task) for name, task in tasks.items()}
    gc.collect()
    gc.freeze()  # as the executor and the server do: a collection over torch's modules takes longer than a call
    try:
        for _ in range(windows):
            for name, task in tasks.items():
                wall, cpu = zip(*window(task, calls, seconds), strict=True)
                timings[name].windows.append([*wall])
                timings[name].cpu.append([*cpu])
    finally:
        gc.unfreeze()
    return timings
