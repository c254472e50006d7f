"""Metrics of a server, in Prometheus' text format."""

from __future__ import annotations

import collections

BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
PREFIX = "policy_server_"
HELP = {
    "connections": ("gauge", "open connections"),
    "connections_total": ("counter", "connections that were opened"),
    "requests_total": ("counter", "observations that were answered"),
    "errors_total": ("counter", "connections that ended with an error, by its kind"),
    "refused_total": ("counter", "requests that were refused before a connection, by the reason"),
    "batches_total": ("counter", "calls of the policy"),
    "inference_seconds": ("histogram", "time of a call of the policy"),
    "request_seconds": ("histogram", "time from an observation's arrival to its answer"),
}


class Metrics:
    """Counters {(name, label)}, and histograms by name."""

    def __init__(self) -> None:
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self.sums: collections.Counter[str] = collections.Counter()
        self.buckets = {name: [0] * (len(BOUNDS) + 1) for name, (kind, _) in HELP.items() if kind == "histogram"}

    def add(self, name: str, amount: int = 1, label: str = "") -> None:
        """Count; `label` is like 'kind="request"'."""
        self.counts[name, label] += amount

    def observe(self, name: str, seconds: float) -> None:
        index = next((i for i, bound in enumerate(BOUNDS) if seconds <= bound), len(BOUNDS))
        self.buckets[name][index] += 1
        self.sums[name] += seconds  # type: ignore[assignment]  # a Counter adds floats, too

    def text(self) -> str:
        lines = []
        for name, (kind, text) in HELP.items():
            lines += [f"# HELP {PREFIX}{name} {text}", f"# TYPE {PREFIX}{name} {kind}"]
            lines += self._histogram(name) if kind == "histogram" else self._counts(name)
        return "\n".join(lines) + "\n"

    def _counts(self, name: str) -> list[str]:
        labels = [label for known, label in self.counts if known == name] or [""]
        return [
            f"{PREFIX}{name}{f'{{{label}}}' if label else ''} {self.counts[name, label]}" for label in sorted(labels)
        ]

    def _histogram(self, name: str) -> list[str]:
        total, lines = 0, []
        for bound, count in zip((*BOUNDS, "+Inf"), self.buckets[name], strict=True):
            total += count
            lines.append(f'{PREFIX}{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{PREFIX}{name}_sum {self.sums[name]:.6f}", f"{PREFIX}{name}_count {total}"]
