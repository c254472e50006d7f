"""Plots of a run."""

from __future__ import annotations

import pathlib
from typing import Any

from diffusion_policy.common.json_logger import read_json_log

#: Terms of the loss that a policy logs have names with this prefix.
TERM = "loss/"


def plot_learning_curve(log_path: str | pathlib.Path, image_path: str | pathlib.Path, title: str = "") -> pathlib.Path:
    """Plot a run's logs.json.txt into a png; returns its path.

    Panels: the loss; its terms, if the policy logs them, because a weight that changes during training hides them in
    the sum; the error of predicted actions, on training and on held-out episodes; the share of the variance of
    held-out actions that is explained; the scores of rollouts.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    records = read_json_log(log_path)
    keys = {key for record in records for key in record}
    ends = {record.get("epoch"): record["global_step"] for record in records}  # where train_loss is the epoch's mean
    steps = [record for record in records if record["global_step"] != ends[record.get("epoch")]] or records
    terms = sorted(key for key in keys if key.startswith(TERM))
    scores = sorted(key for key in keys if key.endswith("/mean_score"))
    panels: list[tuple[str, dict[str, str], dict[str, Any]]] = [
        ("loss", {"train_loss": "training", "val_loss": "held-out episodes"}, {"yscale": "log"}),
        ("terms of the loss, unweighted", {key: key.removeprefix(TERM) for key in terms}, {"yscale": "log"}),
        (
            "action error (mean square, data units)",
            {"train_action_mse_error": "training batch", "val_action_mse_error": "held-out episodes"},
            {"yscale": "log"},
        ),
        (
            "variance explained, held-out episodes",
            {"val/variance_explained": "policy", "val/hold_variance_explained": "holding the last action"},
            {},
        ),
        ("mean score", {key: f"{key.split('/')[0]} starts" for key in scores}, {"ylim": (0, 1.02)}),
    ]
    panels = [panel for panel in panels if keys & panel[1].keys()] or panels[:1]
    width = 4.7 * len(panels)  # a fixed layout takes half of the time of one that matplotlib computes
    figure = Figure(figsize=(width, 4))
    figure.subplots_adjust(left=0.8 / width, right=1 - 0.15 / width, bottom=0.13, top=0.91, wspace=0.27)
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for axis, (label, curves, style) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for key, name in curves.items():
            points = [(r["global_step"] + 1, r[key]) for r in (steps if key == "train_loss" else records) if key in r]
            if points:
                axis.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 50 else None)
        axis.set(xlabel="training step", ylabel=label, **style)
        low, high = axis.dataLim.intervaly
        if axis.get_yscale() == "log" and low <= high < 2 * low:
            axis.set_yscale("linear")  # the labels of a logarithmic axis would be equal
            axis.ticklabel_format(axis="y", useOffset=False)
        elif axis.get_yscale() == "log":
            axis.yaxis.set_major_formatter(LogFormatter())
            axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    figure.savefig(image_path, dpi=120)
    return pathlib.Path(image_path)
