"""Confidence intervals of mean scores."""

from __future__ import annotations

import numpy as np


def mean_interval(scores: np.ndarray, draws: int = 10_000) -> list[float]:
    """95 % interval [low, high] of the mean of scores (N,).

    Wilson's interval for successes and failures, which is valid at 0 % and 100 %; else a bootstrap over episodes.
    """
    scores = np.asarray(scores, dtype=float)
    n, mean = len(scores), float(np.mean(scores))
    if np.isin(scores, (0.0, 1.0)).all():
        z = 1.959964
        centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * np.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
        low, high = float(centre - half), float(centre + half)
        return [max(0.0, min(low, mean)), min(1.0, max(high, mean))]  # rounding must not exclude the mean itself
    means = np.random.default_rng(0).choice(scores, size=(draws, n)).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return [float(low), float(high)]
