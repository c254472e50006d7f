"""Plots of a run."""

from __future__ import annotations

import json
import pathlib
from typing import Any


def plot_learning_curve(log_path: str | pathlib.Path, image_path: str | pathlib.Path) -> pathlib.Path:
    """Plot loss, action error and scores over steps from a run's logs.json.txt into a png; returns its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = [json.loads(line) for line in pathlib.Path(log_path).read_text().splitlines()]
    figure = Figure(figsize=(14, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3)

    def draw(axis: Any, key: str, label: str, **style: Any) -> None:
        points = [(record["global_step"] + 1, record[key]) for record in records if key in record]
        if points:
            axis.plot(*zip(*points, strict=True), label=label, **style)

    draw(axes[0], "train_loss", "training")
    draw(axes[0], "val_loss", "validation")
    draw(axes[1], "train_action_mse_error", "first training batch", marker=".")
    draw(axes[2], "test/mean_score", "test starts", marker="o")
    draw(axes[2], "train/mean_score", "train starts", marker="o")
    axes[0].set(title="loss", yscale="log")
    axes[1].set(title="squared error of predicted actions", yscale="log")
    axes[2].set(title="mean score of rollouts", ylim=(0, 1))
    for axis in axes:
        axis.set_xlabel("step")
        if axis.lines:
            axis.legend()
    figure.savefig(image_path, dpi=120)
    return pathlib.Path(image_path)
