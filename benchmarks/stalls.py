"""When the machine itself stood still: what a program does not get done then is not the program's fault.

A probe for each core sleeps for a millisecond at a time with a higher real-time priority than anything that is
measured. If it wakes late, nothing on that core ran as asked: the hypervisor, the kernel or its interrupts had it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np

PERIOD = 0.001
SHORTEST = 0.002  # seconds late that count as a stall
PRIORITY = 90


def probe(core: int) -> None:
    """Print the stalls of a core as JSON on SIGTERM: [[begin, end], ...] in seconds of `time.perf_counter`."""
    stalls: list[tuple[float, float]] = []
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    print("ready", flush=True)
    now = time.perf_counter()
    while not stopped:
        due = now + PERIOD
        time.sleep(PERIOD)
        now = time.perf_counter()
        if now - due > SHORTEST:
            stalls.append((due, now))
    print(json.dumps(stalls))


@contextlib.contextmanager
def watched(stalls: list[tuple[float, float]]) -> Iterator[bool]:
    """Fill `stalls` with those of all cores, in order, when the block ends; yields whether they are watched.

    They are not where real-time priority is not permitted.
    """
    command = [sys.executable, "-c", f"from {__name__} import probe; import sys; probe(int(sys.argv[1]))"]
    probes = []
    if hasattr(os, "SCHED_FIFO"):
        probes = [
            subprocess.Popen([*command, str(core)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            for core in sorted(os.sched_getaffinity(0))
        ]
    running = bool(probes) and all(each.stdout is not None and each.stdout.readline() for each in probes)
    try:
        yield running
    finally:
        for each in probes:
            each.terminate()
            out, _ = each.communicate()
            stalls += map(tuple, json.loads(out or "[]"))
        stalls.sort()


def overlap(begin: np.ndarray, end: np.ndarray, stalls: list[tuple[float, float]]) -> np.ndarray:
    """Seconds of each interval in which a core stood still; a moment at which two did counts once."""
    total = np.zeros(len(begin))
    last = -np.inf
    for first, until in sorted(stalls):
        first = max(first, last)
        total += np.clip(np.minimum(end, until) - np.maximum(begin, first), 0, None)
        last = max(last, until)
    return total
