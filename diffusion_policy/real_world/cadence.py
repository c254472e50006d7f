"""Timing of a control loop: its rate, its late steps, and the cost of each stage."""

from __future__ import annotations

import collections
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from diffusion_policy.storage import atomic

STAGES = ("read", "plan", "send")


def percentiles(seconds: Sequence[float] | np.ndarray) -> dict[str, float] | None:
    """p50, p90, p99 and the largest, in milliseconds; None of nothing."""
    if len(seconds) == 0:
        return None
    p50, p90, p99, worst = (1000 * np.percentile(seconds, [50, 90, 99, 100])).tolist()
    return {"p50": p50, "p90": p90, "p99": p99, "max": worst}


class CadenceReport:
    """Counts and times of one run of the executor.

    A step is late if its action was handed over after the next step was due, or not at all. `counts` has: plans
    accepted, failed (the policy raised), rejected (not finite, or of another shape) and too_late (no action left);
    steps held; actions limited.
    """

    def __init__(self, hz: float):
        self.hz = hz
        self.counts: collections.Counter[str] = collections.Counter()
        self.latencies: list[float] = []  # of plans, in seconds
        self.delays: list[int] = []  # of accepted plans, in control steps
        self.cold_start = 0.0  # seconds of the first call, before the loop
        self.real_time = False  # whether the loop had real-time priority
        self.fault: str | None = None
        self._due: list[float] = []
        self._times: list[tuple[float, ...]] = []

    def tick(self, due: float, *times: float) -> None:
        """Note a step: when it was due, when it began, and when each of its stages ended."""
        self._due.append(due)
        self._times.append(times)

    @property
    def due(self) -> np.ndarray:
        """When each step was due, in seconds of the clock."""
        return np.array(self._due)

    @property
    def lateness(self) -> np.ndarray:
        """Seconds between the due time of each step and the end of its work."""
        return self._table[:, -1] - self.due

    @property
    def _table(self) -> np.ndarray:
        return np.array(self._times).reshape(-1, 1 + len(STAGES))

    @property
    def achieved_hz(self) -> float | None:
        """Rate of the steps that were made; None of fewer than two."""
        began = self._table[:, 0]
        return float((len(began) - 1) / (began[-1] - began[0])) if len(began) > 1 else None

    @property
    def late_steps(self) -> int:
        return int((self.lateness > 1 / self.hz).sum()) + self.counts["missed"]

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data; times are in milliseconds."""
        stages = np.diff(self._table, axis=1)
        counts = ("accepted", "failed", "rejected", "too_late")
        done = len(self._due)
        return {
            "hz": self.hz,
            "real_time": self.real_time,
            "achieved_hz": self.achieved_hz,
            "steps": done + self.counts["missed"],
            "late_steps": self.late_steps,
            "missed_steps": self.counts["missed"],
            "worst_ms": 1000 * float(self.lateness.max()) if done else None,
            "lateness_ms": percentiles(self.lateness),
            "stages_ms": {name: percentiles(stages[:, i]) for i, name in enumerate(STAGES)},
            "plans": {name: self.counts[name] for name in counts}
            | {"latency_ms": percentiles(self.latencies), "cold_start_ms": 1000 * self.cold_start}
            | {"delay_steps": dict(sorted(collections.Counter(self.delays).items()))},
            "held_steps": self.counts["held"],
            "limited_steps": self.counts["limited"],
            "fault": self.fault,
        }

    def __str__(self) -> str:
        data = self.as_dict()
        plans, latency = data["plans"], data["plans"]["latency_ms"] or {"p50": 0.0, "max": 0.0}
        lines = [
            f"{data['steps']} steps at {data['achieved_hz'] or 0:.1f} of {self.hz:g} Hz; {data['late_steps']} late, "
            f"worst {data['worst_ms'] or 0:.1f} ms after it was due",
            f"{plans['accepted']} plans used, {plans['too_late']} too late, {plans['rejected']} rejected, "
            f"{plans['failed']} failed; {latency['p50']:.1f} ms at the median, {latency['max']:.1f} ms at most",
            f"{data['held_steps']} steps without an action, {data['limited_steps']} actions limited",
        ]
        return "\n".join([*lines, f"stopped: {self.fault}"] if self.fault else lines)

    def save(self, folder: str | pathlib.Path) -> pathlib.Path:
        """Write cadence.json and cadence.png; returns the folder."""
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write_text(folder / "cadence.json", json.dumps(self.as_dict(), indent=2) + "\n")
        self.plot(folder / "cadence.png")
        return folder

    def plot(self, path: str | pathlib.Path) -> None:
        """Draw the end of every step's work after its due time, and the latency of plans."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.5), layout="constrained")
        FigureCanvasAgg(figure)
        steps, plans = figure.subplots(1, 2)
        begin = self._due[0] if self._due else 0.0
        steps.plot(self.due - begin, 1000 * self.lateness, ".", markersize=2)
        steps.axhline(1000 / self.hz, color="tab:red", linewidth=1, label="late above")
        steps.set(xlabel="time, s", ylabel="action handed over after due time, ms", yscale="log")
        steps.legend(loc="upper right")
        plans.hist(1000 * np.array(self.latencies), bins=50)
        plans.axvline(1000 / self.hz, color="tab:red", linewidth=1)
        plans.set(xlabel="latency of a plan, ms", ylabel="plans")
        figure.savefig(path, dpi=120)
