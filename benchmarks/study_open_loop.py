"""Rows and tables of a study without a simulator: `eval: [--open-loop]`."""

from __future__ import annotations

import pathlib
import shutil
import statistics
from typing import Any


def methods(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows by method: the name of a run is 'method seed'."""
    out: dict[str, list[dict[str, Any]]] = {}
    for entry in rows:
        out.setdefault(entry["name"].rpartition(" ")[0], []).append(entry)
    return out


def spread(values: list[float], places: int, sign: str = "") -> str:
    """'mean (lowest to highest)', or the only value; '-' without any."""
    if not values:
        return "-"
    mean, low, high = (f"{value:{sign}.{places}f}" for value in (statistics.mean(values), min(values), max(values)))
    return mean if len(values) == 1 else f"{mean} ({low} to {high})"


def table(rows: list[dict[str, Any]], reference: str | None = None) -> str:
    """Markdown: the mean numbers of each method, then the error of each dimension."""
    groups = dict(sorted(methods(rows).items(), key=lambda item: -_mean(item[1], "variance_explained")))
    minus = f"minus {reference}" if reference in groups else ""
    lines = [
        f"| method | variance explained | {minus} | RMSE | step size / expert's: within chunks "
        "| between chunks | jerk / expert's | latency, ms | network calls | steps | episodes | seeds |",
        "|---" * 12 + "|",
    ]
    for name, entries in groups.items():
        cells = [spread(_values(entries, "variance_explained"), 3)]
        cells += [difference(entries, groups.get(reference or "", [])), spread(_values(entries, "open_loop_rmse"), 3)]
        cells += [spread(_values(entries, key), 2) for key in ("inside_ratio", "seams_ratio", "jerk_ratio")]
        cells += [f"{_mean(entries, 'latency_ms'):.2f}", f"{entries[0]['nfe']:g}", str(entries[0]["steps"])]
        lines.append(f"| {name} | {' | '.join(cells)} | {len(entries[0]['open_loop']['episodes'])} | {len(entries)} |")
    for count, hold in {len(row["open_loop"]["episodes"]): row["hold_variance_explained"] for row in rows}.items():
        lines.append(f"| holding the last recorded action | {hold:.3f} | | | | | | | 0 | | {count} | |")
    return "\n".join(
        [*lines, "", "RMSE (variance explained) of each dimension, mean over seeds:", "", dimensions(groups)]
    )


def difference(entries: list[dict[str, Any]], reference: list[dict[str, Any]]) -> str:
    """Variance explained minus the reference's on the same held-out episodes, paired by seed."""
    pairs = {_seed(entry): entry for entry in reference}
    if entries is reference or not all(_seed(entry) in pairs for entry in entries):
        return "-"
    paired = [(entry, pairs[_seed(entry)]) for entry in entries]
    if any(mine["open_loop"]["episodes"] != theirs["open_loop"]["episodes"] for mine, theirs in paired):
        return "-"
    return spread([mine["variance_explained"] - theirs["variance_explained"] for mine, theirs in paired], 3, "+")


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


def copy_pictures(runs: pathlib.Path, rows: list[dict[str, Any]], reference: str | None, folder: pathlib.Path) -> None:
    """Copy the pictures of the reference's first run to errors.png and episode.png, unless its row is reused."""
    made = [entry["name"] for entry in rows if entry["name"].rpartition(" ")[0] == reference]
    for name in made[:1]:
        media = runs / name / "eval/media"
        for picture, pattern in (("errors.png", "errors.png"), ("episode.png", "episode_*.png")):
            for found in sorted(media.glob(pattern))[:1]:
                shutil.copyfile(found, folder / picture)


def _values(rows: list[dict[str, Any]], key: str) -> list[float]:
    return [entry[key] for entry in rows if key in entry]  # reused rows may be older than a number


def _mean(rows: list[dict[str, Any]], key: str) -> float:
    return statistics.mean(_values(rows, key))


def _seed(row: dict[str, Any]) -> str:
    return row["name"].rpartition(" ")[2]
