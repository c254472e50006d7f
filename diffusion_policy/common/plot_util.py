"""Pictures of a run."""
from __future__ import annotations

import json
import pathlib


def plot_learning_curve(log_path: str | pathlib.Path, image_path: str | pathlib.Path) -> pathlib.Path:
    """Draw loss and scores over steps from a run's logs.json.txt into a png; returns its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = [json.loads(line) for line in pathlib.Path(log_path).read_text().splitlines()]
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    loss_axis, score_axis = figure.subplots(1, 2)
    for key in ("train_loss", "val_loss"):
        points = [(r["global_step"], r[key]) for r in records if key in r]
        if points:
            loss_axis.plot(*zip(*points), label=key)
    if loss_axis.lines:
        loss_axis.set_yscale("log")
        loss_axis.legend()
    loss_axis.set(xlabel="step", ylabel="loss", title="loss")
    for split in ("test", "train"):
        points = [(r["global_step"] + 1, r[f"{split}/mean_score"]) for r in records if f"{split}/mean_score" in r]
        if points:
            score_axis.plot(*zip(*points), marker="o", label=f"{split} starts")
    if score_axis.lines:
        score_axis.legend()
    score_axis.set(xlabel="step", ylabel="mean score", ylim=(0, 1), title="rollouts")
    figure.savefig(image_path, dpi=120)
    return pathlib.Path(image_path)
