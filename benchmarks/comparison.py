"""Runs with several training seeds: means, and differences that are paired by training seed and start."""

from __future__ import annotations

from typing import Any

import numpy as np

from idp_workspace.suite.statistics import interval, scores_of


def seed_table(study: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Markdown, one line per run of the study, best first.

    Intervals (95 %) are over training seeds and starts, which are both drawn again with replacement.
    """
    groups = groups_of(study, rows)
    reference = groups.get(study.get("reference", ""))
    minus = f"minus {study['reference']}" if reference else ""
    also = list(study.get("also", {}))
    lines = [
        f"| run | score | 95 % interval | seed by seed | {minus} {''.join(f'| {name} ' for name in also)}"
        "| end still | network calls | steps | core-minutes | training step, ms | inference, ms |",
        "|---" * (11 + len(also)) + "|",
    ]
    for name, group in sorted(groups.items(), key=lambda item: -score_of(item[1])):
        low, high = interval(np.array(scores_of(group)))
        each = " ".join(f"{row['score']:.3f}" for row in group)
        lines.append(
            f"| {name} | {score_of(group):.3f} | {low:.3f} to {high:.3f} "
            f"| {each} | {difference(group, reference)} "
            f"{''.join(f'| {also_of(group, name):.3f} ' for name in also)}"
            f"| {mean_of(group, 'ends_still', '{:.0%}')} | {group[0]['nfe']:g} | {group[0]['steps']} "
            f"| {mean_of(group, 'cpu_minutes', '{:.1f}')} | {mean_of(group, 'step_ms', '{:.0f}')} "
            f"| {mean_of(group, 'inference_ms', '{:.2f}')} |"
        )
    return "\n".join(lines)


def groups_of(study: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each run that was made, one for each seed."""
    found = {row["name"]: row for row in rows}
    return {
        run["name"]: made
        for run in study["runs"]
        if (made := [found[name] for seed in study["seeds"] if (name := f"{run['name']} {seed}") in found])
    }


def score_of(group: list[dict[str, Any]]) -> float:
    return float(np.mean([row["score"] for row in group]))


def also_of(group: list[dict[str, Any]], name: str) -> float:
    """The mean score of another evaluation of the same policies."""
    return float(np.mean([row["also"][name] for row in group]))


def mean_of(group: list[dict[str, Any]], key: str, form: str) -> str:
    known = [row[key] for row in group if row.get(key) is not None]
    return form.format(np.mean(known)) if known else "-"


def difference(group: list[dict[str, Any]], reference: list[dict[str, Any]] | None) -> str:
    """The paired difference to the reference, with its interval."""
    if reference is None or group is reference or len(group) != len(reference):
        return "-"
    mine, theirs = scores_of(group), scores_of(reference)
    if mine is None or theirs is None:
        return "-"
    low, high = interval(mine - theirs)
    return f"{(mine - theirs).mean():+.3f} ({low:+.3f} to {high:+.3f})"
