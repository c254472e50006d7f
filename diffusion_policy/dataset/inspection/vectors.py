"""Ranges, histograms and oddities of the numbers of a feature, dimension by dimension."""

from __future__ import annotations

import numpy as np

from diffusion_policy.dataset.recordings import Feature

MAX_DIMENSIONS = 128  # features with more, such as point clouds, are treated as one
SAMPLE_ROWS = 20_000
BINS = 30
AT_END = 0.02  # of the range
UNIT_NORM = 1e-3  # how far the norm of a quaternion is from 1


class Vector:
    """The numbers of one feature over all episodes. `add` every episode, then call `finish`.

    Per dimension: low, high, mean, std; inner: the range without the outermost percent on each side; at_low, at_high:
    the share of steps at exactly the lowest and highest value; near_ends: within 2 % of either; noise: 0 for a smooth
    signal, 1 for one whose steps are independent; step: mean change per step; histogram: counts (D, BINS);
    quaternions: first dimensions of four that are a unit quaternion.
    """

    def __init__(self, key: str, feature: Feature, steps: int):
        self.key, self.feature = key, feature
        self.detailed = feature.size <= MAX_DIMENSIONS
        self.size = feature.size if self.detailed else 1
        self.stride = max(1, steps // SAMPLE_ROWS)
        self.labels = feature.names or [str(number) for number in range(self.size)]
        self.low, self.high = np.full(self.size, np.inf), np.full(self.size, -np.inf)
        self.sums = np.zeros((4, self.size))  # of values, squares, changes, squared changes
        self.count = self.changes = 0
        self.not_finite: list[tuple[int, int]] = []  # (episode, first step)
        self.rows: list[np.ndarray] = []
        self.off_norm = np.zeros(max(0, self.size - 3))  # of four dimensions in a row

    def add(self, episode: int, values: np.ndarray) -> np.ndarray:
        """Take the numbers of an episode, and return them as (T, D) float64, without those that are not finite."""
        flat = values.reshape(len(values), -1).astype(np.float64)
        bad = ~np.isfinite(flat).all(axis=1)
        if bad.any():
            self.not_finite.append((episode, int(bad.argmax())))
            flat = flat[~bad]
        if not len(flat):
            return flat
        if not self.detailed:
            flat = np.concatenate([flat.min(axis=1, keepdims=True), flat.max(axis=1, keepdims=True)])
        steps = np.diff(flat, axis=0)
        self.low, self.high = np.minimum(self.low, flat.min(axis=0)), np.maximum(self.high, flat.max(axis=0))
        self.sums += [flat.sum(axis=0), (flat**2).sum(axis=0), np.abs(steps).sum(axis=0), (steps**2).sum(axis=0)]
        norms = np.sqrt(sum(flat[:, i : self.size - 3 + i] ** 2 for i in range(4))) if self.size > 3 else flat[:, :0]
        self.off_norm = np.maximum(self.off_norm, np.abs(norms - 1).max(axis=0))
        self.count += len(flat)
        self.changes += len(steps)
        self.rows.append(flat[:: self.stride].copy())  # a view would keep the whole episode
        return flat

    def finish(self) -> None:
        """Compute what needs all episodes."""
        sample = np.concatenate(self.rows) if self.count else np.zeros((1, self.size))
        self.rows = []
        self.low, self.high = np.where(np.isfinite([self.low, self.high]), [self.low, self.high], 0)
        values, squares, changes, squared_changes = self.sums
        self.mean = values / max(self.count, 1)
        variance = np.maximum(squares / max(self.count, 1) - self.mean**2, 0)
        self.std = np.sqrt(variance)
        self.step = changes / max(self.changes, 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            self.noise = np.nan_to_num(squared_changes / max(self.changes, 1) / (2 * variance))
        self.inner = np.subtract(*np.percentile(sample, [99, 1], axis=0))
        self.range = self.high - self.low
        self.constant = self.range <= 1e-6 * np.maximum(np.abs(self.high), np.abs(self.low))
        width = np.where(self.constant, 1.0, self.range)
        self.at_low = ((sample - self.low) <= 1e-6 * width).mean(axis=0)
        self.at_high = ((self.high - sample) <= 1e-6 * width).mean(axis=0)
        place = (sample - self.low) / width
        near_low, near_high = (place <= AT_END).mean(axis=0), (place >= 1 - AT_END).mean(axis=0)
        self.near_ends = near_low + near_high
        self.binary = (
            ~self.constant & self.detailed & (self.near_ends > 0.95) & (np.minimum(near_low, near_high) > 0.02)
        )
        self.quaternions = self._quaternions()
        self.histogram = np.stack([np.histogram(column, BINS, (0, 1))[0] for column in place.T])

    def _quaternions(self) -> list[int]:
        found: list[int] = []
        for start in np.flatnonzero(self.off_norm < UNIT_NORM).tolist() if self.count else []:
            turns = (~self.constant[start : start + 4]).sum() > 1
            if turns and (not found or start >= found[-1] + 4):
                found.append(start)
        return found

    def label(self, dimension: int) -> str:
        """'action[3] elbow'."""
        if not self.detailed:
            return self.key
        name = f" {self.labels[dimension]}" if self.feature.names else ""
        return f"{self.key}[{dimension}]{name}"
