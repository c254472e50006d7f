"""Figures of an open-loop evaluation."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from diffusion_policy.workspace.open_loop import Episode

COLUMNS, MOST = 4, 32  # panels in a row, and dimensions that are drawn


def plot_episode(episode: Episode, names: Sequence[str], fps: float | None, path: pathlib.Path) -> pathlib.Path:
    """Draw the recorded actions of an episode and the predicted chunks, one panel per dimension."""
    figure, axes = _figure(min(len(names), MOST), f"episode {episode.number}: recorded actions and predicted chunks")
    time = np.arange(len(episode.recorded)) / (fps or 1.0)
    number = np.cumsum(episode.chunk_step == 0)
    chunks = [np.where((number % 2 == odd)[:, None], episode.predicted, np.nan) for odd in (1, 0)]  # drawn with gaps
    for dim, axis in enumerate(axes):
        axis.plot(time, episode.recorded[:, dim], color="0.6", linewidth=2, label="recorded")
        for values, color, label in zip(chunks, ("C0", "C1"), ("predicted", None), strict=True):
            axis.plot(time, values[:, dim], color=color, linewidth=1, label=label)
        axis.set_title(names[dim], fontsize=8)
        axis.tick_params(labelsize=7)
    axes[0].legend(fontsize=7)
    figure.supxlabel("step" if fps is None else "seconds", fontsize=8)
    figure.savefig(path, dpi=90)
    return path


def plot_errors(found: dict[str, Any], names: Sequence[str], path: pathlib.Path) -> pathlib.Path:
    """Draw the variance explained of each dimension, and the error over the steps of a chunk."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    place = np.arange(len(names))
    for offset, (label, values) in zip((-0.2, 0.2), (("policy", found), ("hold", found["hold"])), strict=True):
        explained = [0.0 if value is None else value for value in values["variance_explained"]]
        left.bar(place + offset, np.clip(explained, -1, 1), width=0.4, label=label)
    left.set_xticks(place, names, rotation=90, fontsize=7)
    left.set(ylabel="variance explained (cut at -1)")
    left.legend(loc="lower left")
    steps = np.array(found["by_chunk_step"]["rmse"])  # (Ta, D)
    relative = steps / np.maximum(1e-12, np.array(found["rmse"]))
    right.plot(np.arange(1, len(steps) + 1), relative[:, found["moves"]], color="0.8", linewidth=0.8)
    right.plot(np.arange(1, len(steps) + 1), relative[:, found["moves"]].mean(axis=1), color="C0", linewidth=2)
    right.set(xlabel="executed step of a chunk", ylabel="RMSE / RMSE of all steps")
    figure.savefig(path, dpi=110)
    return path


def _figure(panels: int, title: str) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = -(-panels // COLUMNS)
    figure = Figure(figsize=(3 * COLUMNS, 1.6 * rows + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(rows, COLUMNS, squeeze=False).ravel().tolist()
    for axis in axes[panels:]:
        axis.set_axis_off()
    return figure, axes[:panels]
