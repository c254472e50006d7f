"""Confidence intervals of mean scores, and comparisons of two methods on the same starts."""

from __future__ import annotations

from typing import Any

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


def paired_interval(differences: np.ndarray, draws: int = 10_000) -> list[float]:
    """95 % interval [low, high] of the mean of differences (N,): a bootstrap over the pairs."""
    differences = np.asarray(differences, dtype=float)
    means = np.random.default_rng(0).choice(differences, size=(draws, len(differences))).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return [float(low), float(high)]


def paired_test(first: np.ndarray, second: np.ndarray, resamples: int = 9999) -> tuple[str, float]:
    """The name and the two-sided p value of a paired test that two methods score equally on the same starts (N,).

    McNemar's exact test for successes and failures; else a permutation test that exchanges the two of a pair,
    exact if there are few pairs, else with random exchanges.
    """
    from scipy import stats

    first, second = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if np.isin([first, second], (0.0, 1.0)).all():
        wins, losses = int((first > second).sum()), int((first < second).sum())
        return "McNemar", float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    if np.allclose(first, second, rtol=0, atol=1e-12):
        return "permutation", 1.0
    found = stats.permutation_test(
        (first, second),
        lambda x, y, axis: np.mean(x - y, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples,
        rng=np.random.default_rng(0),
    )
    return "permutation", float(found.pvalue)


def compare(first: np.ndarray, second: np.ndarray) -> dict[str, Any]:
    """Compare the scores (N,) of two methods on the same starts; the difference is first - second."""
    first, second = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    test, p = paired_test(first, second)
    return {
        "starts": len(first),
        "difference": float(np.mean(first - second)),
        "interval_95": paired_interval(first - second),
        "test": test,
        "p": p,
        "wins": int((first > second + 1e-9).sum()),
        "losses": int((first < second - 1e-9).sum()),
        "ties": int((np.abs(first - second) <= 1e-9).sum()),
    }
