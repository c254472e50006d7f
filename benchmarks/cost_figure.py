"""A figure of a study with seeds: the score of each run against the processor time of its training."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from benchmarks.comparison import groups_of
from diffusion_policy.storage.atomic import write_atomically
from idp_workspace.suite.statistics import interval, scores_of

NAME = "cost.png"


def draw(study: dict[str, Any], rows: list[dict[str, Any]], folder: pathlib.Path) -> bool:
    """Draw cost.png into a folder; returns whether the rows have costs."""
    costs: dict[str, tuple[float, np.ndarray]] = {}
    for name, group in groups_of(study, rows).items():
        minutes, scores = [row["cpu_minutes"] for row in group if row.get("cpu_minutes")], scores_of(group)
        if minutes and scores is not None:
            costs[name] = (float(np.mean(minutes)), scores)
    if len(costs) < 3:
        return False
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    colours = plt.get_cmap("tab20").colors  # type: ignore[attr-defined]
    ranked = sorted(costs.items(), key=lambda item: -item[1][1].mean())
    for number, (name, (minutes, scores)) in enumerate(ranked):
        mean, (low, high) = scores.mean(), interval(scores)
        axes.errorbar(
            minutes,
            mean,
            yerr=[[mean - low], [high - mean]],
            fmt="os^Dvp*"[number % 7],
            color=colours[number % 20],
            capsize=3,
            label=f"{name} ({mean:.2f})",
        )
    axes.set(xlabel="processor time of a training, minutes of one core", ylabel="mean score, with its 95 % interval")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize="small")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / NAME, lambda file: figure.savefig(file, format="png", dpi=110))
    plt.close(figure)
    return True
