"""Statistics over runs: intervals over seeds and starts, interquartile means, improvements, paired comparisons."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from diffusion_policy.common.statistics import paired_test

Row = dict[str, Any]
DRAWS = 4000


def scores_of(group: Sequence[Row], key: str = "scores", name: str | None = None) -> np.ndarray | None:
    """Scores (training seeds, starts) of runs; None if they have no common starts."""
    found = [row.get(key) or {} for row in group]
    if name is not None:
        found = [scores.get(name) or {} for scores in found]
    starts = sorted(set.intersection(*(set(scores) for scores in found))) if found else []
    return np.array([[scores[start] for start in starts] for scores in found], dtype=float) if starts else None


def interval(values: np.ndarray) -> tuple[float, float]:
    """95 % interval of the mean of values (training seeds, starts): seeds and starts are drawn again with replacement.

    Wilson's, of all together, for successes and failures of one seed, or if there are only the ones or the others.
    """
    if np.isin(values, (0.0, 1.0)).all() and (len(values) == 1 or np.ptp(values) == 0):
        return wilson(int(values.sum()), values.size)
    low, high = np.percentile(means(values), [2.5, 97.5])
    return float(low), float(high)


def means(values: np.ndarray, seed: int = 0) -> np.ndarray:
    """DRAWS means of values (training seeds, starts), which are both drawn again; of one seed, the starts alone."""
    of_seeds, of_starts = _weights(*values.shape, seed)
    return np.asarray(((of_seeds @ values) * of_starts).sum(axis=1))


@functools.lru_cache(maxsize=64)
def _weights(seeds: int, starts: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each training seed and each start is in each of DRAWS draws, as shares."""
    random = np.random.default_rng(seed)
    counts = (random.multinomial(count, np.full(count, 1 / count), size=DRAWS) / count for count in (seeds, starts))
    of_seeds, of_starts = counts
    return of_seeds, of_starts.astype(np.float32)


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a success rate."""
    found = stats.binomtest(successes, trials).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


def paired(first: Sequence[Row], second: Sequence[Row]) -> dict[str, Any] | None:
    """Compare two groups of runs on the same tasks, backbones, training seeds and starts; first - second.

    The interval draws training seeds and starts again, within each task and backbone. The p value is over starts, whose
    scores are means over seeds: it is about these trained policies. None if nothing is in common.
    """
    cells = []
    mine, theirs = _by_cell(first), _by_cell(second)
    for cell in mine:
        seeds = [seed for seed in mine[cell] if seed in theirs.get(cell, {})]
        if seeds:
            rows = [mine[cell][seed] for seed in seeds] + [theirs[cell][seed] for seed in seeds]
            values = scores_of(rows)  # the starts that all of them have
            if values is not None:
                cells.append((values[: len(seeds)], values[len(seeds) :]))
    if not cells:
        return None
    differences = [x - y for x, y in cells]
    draws = np.mean([means(values, number) for number, values in enumerate(differences)], axis=0)
    low, high = np.percentile(draws, [2.5, 97.5])
    of_starts = [np.concatenate([pair[side].mean(axis=0) for pair in cells]) for side in (0, 1)]
    test, p = paired_test(of_starts[0], of_starts[1], resamples=1999)
    return {
        "difference": float(np.mean([values.mean() for values in differences])),
        "interval_95": [float(low), float(high)],
        "test": test,
        "p": p,
        "seeds": max(len(values) for values in differences),
        "starts": sum(values.shape[1] for values in differences),
        "cells": len(cells),
    }


def _by_cell(rows: Sequence[Row]) -> dict[tuple[Any, Any], dict[Any, Row]]:
    out: dict[tuple[Any, Any], dict[Any, Row]] = {}
    for row in rows:
        out.setdefault((row["task"], row["backbone"]), {})[row["seed"]] = row
    return out


def by_task(rows: Sequence[Row], key: str = "score") -> list[np.ndarray]:
    """The scores of runs, task by task."""
    tasks: dict[str, list[float]] = {}
    for row in rows:
        if row.get(key) is not None:
            tasks.setdefault(row["task"], []).append(row[key])
    return [np.asarray(values) for values in tasks.values()]


def interquartile_mean(samples: Sequence[np.ndarray]) -> tuple[float, list[float] | None]:
    """The mean of the middle half of all runs, and its 95 % interval: a bootstrap stratified by task.

    None in place of the interval if a task has fewer than two runs.
    """
    value = float(stats.trim_mean(np.concatenate(samples), 0.25))

    def statistic(*drawn: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.asarray(stats.trim_mean(np.concatenate(drawn, axis=axis), 0.25, axis=axis))

    return value, _stratified(samples, statistic)


def improvement(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> tuple[float, list[float] | None]:
    """Probability that a run of the first method scores higher than one of the second, mean over tasks; ties half.

    With its 95 % interval, a bootstrap stratified by task and method.
    """
    count = len(first)

    def statistic(*drawn: np.ndarray, axis: int = -1) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):  # p values, which are not used, of ties
            shares = [
                stats.mannwhitneyu(x, y, axis=axis, method="asymptotic").statistic / (x.shape[axis] * y.shape[axis])
                for x, y in zip(drawn[:count], drawn[count:])
            ]
        return np.asarray(np.mean(shares, axis=0))

    samples = [*first, *second]
    return float(statistic(*samples)), _stratified(samples, statistic)


def _stratified(samples: Sequence[np.ndarray], statistic: Any) -> list[float] | None:
    if any(len(sample) < 2 for sample in samples):
        return None
    if all(np.ptp(sample) == 0 for sample in samples):  # scipy warns: the interval is a point
        value = float(statistic(*samples))
        return [value, value]
    found = stats.bootstrap(
        tuple(samples),
        statistic,
        n_resamples=2000,
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return [float(found.low), float(found.high)]


def pooled_interval(rows: Sequence[Row]) -> list[float] | None:
    """95 % interval of the mean score of runs: within each task and backbone, seeds and starts are drawn again."""
    cells = [scores_of(list(cell.values())) for cell in _by_cell(rows).values()]
    known = [values for values in cells if values is not None]
    if len(known) < len(cells) or not cells:
        return None
    if len(known) == 1:
        return list(interval(known[0]))
    low, high = np.percentile(np.mean([means(values, n) for n, values in enumerate(known)], axis=0), [2.5, 97.5])
    return [float(low), float(high)]
