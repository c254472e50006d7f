"""Real-time priority of the control loop and its worker."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

LOOP, WORKER = 20, 10  # of 1 to 99; any is above all ordinary threads
LOCK_ALL = 1 | 2 | 4  # pages of now and later, each from its first use on


@contextlib.contextmanager
def real_time_priority(wanted: bool, worker: int | None = None) -> Iterator[bool]:
    """Let this thread run before all ordinary ones, if the system permits it (Linux; root, or an rtprio limit).

    The worker, given by its native id, comes next: the loop waits while the worker holds the interpreter, so another
    program that takes the worker's core would delay the loop. Pages stay in memory meanwhile, because one that has to
    be read from a disk again delays it, too. Yields whether the threads have this priority. Threads and processes that
    they start are ordinary.
    """
    if not wanted or not hasattr(os, "SCHED_FIFO"):
        yield False
        return
    levels = {0: LOOP} if worker is None else {0: LOOP, worker: WORKER}
    before = {thread: (os.sched_getscheduler(thread), os.sched_getparam(thread)) for thread in levels}
    try:
        for thread, level in levels.items():
            os.sched_setscheduler(thread, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(level))
    except PermissionError:
        yield False
        return
    libc = ctypes.CDLL(None)
    libc.mlockall(LOCK_ALL)  # fails without the permission to lock so much, which is no reason to stop
    try:
        yield True
    finally:
        libc.munlockall()
        for thread, ordinary in before.items():
            with contextlib.suppress(ProcessLookupError):  # a worker that died
                os.sched_setscheduler(thread, *ordinary)
