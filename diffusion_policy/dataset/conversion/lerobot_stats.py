"""The statistics that LeRobot keeps of every feature, per episode and of the whole dataset."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
Stats = dict[str, np.ndarray]


def episode_stats(values: np.ndarray) -> Stats:
    """Statistics of the steps (T, ...) of an episode; a number per step gives arrays of one number."""
    values = values.astype(np.float64)
    values = values[:, None] if values.ndim == 1 else values
    stats = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
    stats |= dict(zip(QUANTILES, np.quantile(values, list(QUANTILES.values()), axis=0)))
    return {**stats, "count": np.array([len(values)])}


def image_stats(frames: Sequence[np.ndarray]) -> Stats:
    """Statistics of images (H, W, 3), per channel and in [0, 1], in LeRobot's shape (3, 1, 1)."""
    pixels = np.stack(frames).reshape(-1, 3) / 255
    stats = {key: value.reshape(3, 1, 1) for key, value in episode_stats(pixels).items() if key != "count"}
    return {**stats, "count": np.array([len(frames)])}


def total_stats(episodes: Sequence[Stats]) -> Stats:
    """Statistics of all episodes together. Quantiles are averages over the episodes, as LeRobot has them."""
    counts = np.concatenate([stats["count"] for stats in episodes])
    share = counts / counts.sum()

    def average(values: Sequence[np.ndarray]) -> np.ndarray:
        return np.tensordot(share, np.stack(values), axes=1)

    mean = average([stats["mean"] for stats in episodes])
    variance = average([stats["std"] ** 2 + (stats["mean"] - mean) ** 2 for stats in episodes])
    out = {
        "min": np.min([stats["min"] for stats in episodes], axis=0),
        "max": np.max([stats["max"] for stats in episodes], axis=0),
        "mean": mean,
        "std": np.sqrt(variance),
    }
    out |= {key: average([stats[key] for stats in episodes]) for key in QUANTILES}
    return {**out, "count": np.array([counts.sum()])}
