"""Real-time priority of the control loop."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

LEVEL = 10  # of 1 to 99; any is above all ordinary threads


@contextlib.contextmanager
def real_time_priority(wanted: bool) -> Iterator[bool]:
    """Let this thread run before all ordinary ones, if the system permits it (Linux; root, or an rtprio limit).

    Yields whether it does. Threads and processes that this one starts are ordinary.
    """
    if not wanted or not hasattr(os, "SCHED_FIFO"):
        yield False
        return
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(LEVEL))
    except PermissionError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, *before)
