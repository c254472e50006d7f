"""Clocks of a control loop: real time, and simulated time that passes only in sleep."""

from __future__ import annotations

import time


class WallClock:
    """Real time, in seconds."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep_until(self, moment: float) -> None:
        """Sleep until `moment`; return at once if it has passed."""
        rest = moment - time.perf_counter()
        if rest > 0:
            time.sleep(rest)


class SimulatedClock:
    """Time for simulations: every step takes exactly its period, whatever it costs to compute."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def sleep_until(self, moment: float) -> None:
        self._now = max(self._now, moment)
