"""Rows and tables of a study without a simulator: `eval: [--open-loop]`."""

from __future__ import annotations

import statistics
from typing import Any


def row(log: dict[str, Any]) -> dict[str, Any]:
    """What a row of the study keeps of eval_log.json."""
    found = log["open_loop"]
    kept = {key: found[key] for key in ("names", "rmse", "variance_explained", "jerk", "jerk_per", "episodes", "steps")}
    kept["hold"] = found["hold"]["variance_explained"]
    kept["by_chunk_step"] = found["by_chunk_step"]["rmse"]
    means = {key.removeprefix("val/"): value for key, value in log.items() if key.startswith("val/")}
    return {**means, "open_loop": kept, "nfe": log["nfe"], "latency_ms": log["latency_ms"]["p50"]}


def methods(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows by method: the name of a run is 'method seed'."""
    out: dict[str, list[dict[str, Any]]] = {}
    for entry in rows:
        out.setdefault(entry["name"].rpartition(" ")[0], []).append(entry)
    return out


def spread(values: list[float], places: int) -> str:
    """'mean (lowest to highest)', or the only value."""
    low, high = min(values), max(values)
    mean = f"{statistics.mean(values):.{places}f}"
    return mean if len(values) == 1 else f"{mean} ({low:.{places}f} to {high:.{places}f})"


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: the mean numbers of each method, then the error of each dimension."""
    groups = dict(sorted(methods(rows).items(), key=lambda item: -_mean(item[1], "variance_explained")))
    lines = [
        "| method | variance explained | RMSE | step size / expert's | jerk / expert's | network calls | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, entries in groups.items():
        cells = [spread([entry[key] for entry in entries], 3) for key in ("variance_explained", "open_loop_rmse")]
        cells += [spread([entry[key] for entry in entries], 2) for key in ("step_size_ratio", "jerk_ratio")]
        lines.append(f"| {name} | {' | '.join(cells)} | {entries[0]['nfe']:g} | {len(entries)} |")
    hold = rows[0]["hold_variance_explained"]
    lines.append(f"| holding the last action before a chunk | {hold:.3f} | | | | 0 | |")
    return "\n".join([*lines, "", "RMSE of each dimension, mean over seeds:", "", dimensions(groups)])


def dimensions(groups: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: RMSE and the share of the variance explained, dimensions by methods."""
    lines = [f"| dimension | {' | '.join(groups)} |", "|---" * (1 + len(groups)) + "|"]
    names = next(iter(groups.values()))[0]["open_loop"]["names"]
    for dim, name in enumerate(names):
        cells = []
        for entries in groups.values():
            rmse = statistics.mean(entry["open_loop"]["rmse"][dim] for entry in entries)
            shares = [entry["open_loop"]["variance_explained"][dim] for entry in entries]
            share = "still" if None in shares else f"{statistics.mean(shares):.2f}"
            cells.append(f"{rmse:.4f} ({share})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(rows: list[dict[str, Any]], key: str) -> float:
    return statistics.mean(entry[key] for entry in rows)
