"""Stop requests: Ctrl-C, SIGTERM, and the signal with which a cluster preempts a job."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from types import FrameType
from typing import Any

from diffusion_policy.common.command_line import STOPPED
from diffusion_policy.workspace.console import say

NUMBERS = (signal.SIGINT, signal.SIGTERM)
#: Seconds between the second signal and the end of the process, if it does not end by itself.
GRACE = 0.5
#: Signals with which a job may be told that it loses its machine, if the program that started it handles them.
PREEMPTION = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
#: Seconds to write a checkpoint after such a signal; an evaluation can take longer than the job has.
PATIENCE = 30.0


class StopRequest:
    """Turns Ctrl-C and SIGTERM into a request to stop after the current step; a second signal stops at once.

    A context manager. `requested` is True once a signal arrived. The training loop then writes a checkpoint and ends.

    A signal of PREEMPTION that has a handler is such a request, too. Its handler, which queues the job again, is called
    when the checkpoint is written, or after PATIENCE seconds.

    Python calls the handler of a signal between two of its own instructions, which a long step inside torch delays.
    Therefore a thread answers: Python writes the number of a signal to the wake-up socket at once.
    """

    active: StopRequest | None = None

    def __init__(self) -> None:
        self.requested = False
        self.arrived = self.handled = 0  # signals, as the thread and as the main thread count them
        self.process = os.getpid()
        self.before: dict[int, Any] = {}
        self.preempted: int | None = None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():  # signals are handled in the main thread only
            return self
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        threading.Thread(target=self._answer, args=(theirs,), daemon=True).start()
        self.wakeup = signal.set_wakeup_fd(self.socket.fileno(), warn_on_full_buffer=False)
        self.before = {number: signal.signal(number, self._handle) for number in NUMBERS}
        for number in PREEMPTION:
            if callable(signal.getsignal(number)):
                self.before[number] = signal.signal(number, self._preempt)
        StopRequest.active = self
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if not self.before:
            return
        StopRequest.active = None
        if self.preempted is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self.before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.wakeup)
        self.socket.close()  # ends the thread
        if self.preempted is not None and kind is None:
            self.before[self.preempted](self.preempted, None)

    def _preempt(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.process or self.preempted is not None:
            return
        self.requested, self.preempted = True, number
        say("preempted: the job is queued again after this step, when a checkpoint is written")
        self.before[signal.SIGALRM] = signal.signal(signal.SIGALRM, lambda *_: self.before[number](number, None))
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)

    def _answer(self, wakeups: socket.socket) -> None:
        """In a thread: tell what a signal does; end the process if the main thread does not after the second one."""
        with wakeups:
            while number := wakeups.recv(1):
                if number[0] not in NUMBERS:
                    continue
                self.arrived += 1
                if self.arrived == 1:
                    self.requested = True
                    say("stopping after this step; a checkpoint is being written (repeat to stop at once)")
                else:
                    say("stopping at once")
                    time.sleep(GRACE)
                    os._exit(STOPPED)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.process:
            # Worker processes inherit this handler. They leave Ctrl-C to the main process; SIGTERM ends them.
            if number == signal.SIGTERM:
                os._exit(1)
            return
        self.requested = True
        self.handled += 1
        if max(self.handled, self.arrived) > 1:
            raise KeyboardInterrupt


def _in_child() -> None:
    """Keep a forked worker process from writing its signals to the socket of the main process."""
    if StopRequest.active is not None:
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_in_child)
