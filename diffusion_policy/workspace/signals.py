"""Stop requests: Ctrl-C and SIGTERM."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType
from typing import Any

from diffusion_policy.workspace.console import say


class StopRequest:
    """Turns Ctrl-C and SIGTERM into a request to stop after the current step; a second signal stops at once.

    A context manager. `requested` is True once a signal arrived. The training loop then writes a checkpoint and ends.
    """

    def __init__(self) -> None:
        self.requested = False
        self.process = os.getpid()
        self.before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        with contextlib.suppress(ValueError):  # signals can only be handled in the main thread
            self.before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.process:
            # Worker processes inherit this handler. They leave Ctrl-C to the main process; SIGTERM ends them.
            if number == signal.SIGTERM:
                os._exit(1)
            return
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        say("stopping after this step; a checkpoint is being written (repeat to stop at once)")
