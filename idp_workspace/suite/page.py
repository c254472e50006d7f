"""The page of a report: one HTML file with data, drawing and style inside, which opens from disk."""

from __future__ import annotations

import json
import pathlib
import urllib.parse
from collections.abc import Sequence
from typing import Any

import numpy as np

from diffusion_policy.common.errors import ConfigError
from idp_workspace.suite import records, statistics, tables
from idp_workspace.suite.grid import Suite

Row = dict[str, Any]
TEMPLATE = pathlib.Path(__file__).with_name("page.html.j2")
#: Columns of the table of runs: key of the row, title, decimals.
COLUMNS = (
    ("task", "task", None),
    ("method", "method", None),
    ("backbone", "backbone", None),
    ("seed", "seed", 0),
    ("score", "score", 3),
    ("low", "low", 2),
    ("high", "high", 2),
    ("best_evaluation", "best evaluation", 3),
    ("mean_of_last", "mean of last 5", 3),
    ("nfe", "calls", 0),
    ("latency", "latency, ms", 2),
    ("cpu_minutes", "core-minutes", 1),
    ("steps", "steps", 0),
)
#: Starts that the scatter of two methods shows for each task.
STARTS = 500


def render(suite: Suite, rows: Sequence[Row], made: Sequence[tables.Table], command: str) -> str:
    """The page as text."""
    try:
        import jinja2
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ConfigError(f'the page needs {error.name}, which is not installed: pip install -e ".[suite]"') from error
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    beside = tables.published(suite.published)
    return environment.from_string(TEMPLATE.read_text()).render(
        suite=suite,
        command=command,
        done=len(rows),
        tables=[marked_up(table) for table in made],
        columns=COLUMNS,
        runs=[run_line(row) for row in rows],
        choices={key: list(dict.fromkeys(str(row[key]) for row in rows)) for key in ("task", "method", "backbone")},
        notes=beside.notes if beside else [],
        data=embedded({"cells": cells(suite, rows), "runs": [videos(row) for row in rows if row["videos"]]}),
        plotly=get_plotlyjs().replace("</script", "<\\/script"),
    )


def link(folder: str, *path: str) -> str:
    """Of something in a run folder, from the folder of the report."""
    return urllib.parse.quote("/".join(("..", folder, *path)))


def marked_up(table: tables.Table) -> dict[str, Any]:
    """A table with the links of its cells."""
    lines = []
    for number, line in enumerate(table.lines):
        folders = [table.runs.get((number, column), []) for column in range(len(line))]
        lines.append(
            [
                {"text": text.strip("*"), "links": [(link(name) + "/", name) for name in names]}
                for text, names in zip(line, folders)
            ]
        )
    return {"title": table.title, "head": table.head, "lines": lines, "note": table.note.replace("*", "")}


def run_line(row: Row) -> dict[str, Any]:
    """A line of the table of runs."""
    low, high = row.get("interval_95") or (None, None)
    return {
        **row,
        "low": low,
        "high": high,
        "latency": row["inference_ms"] or row.get("latency_ms"),
        "href": link(row["folder"]) + "/",
    }


def cells(suite: Suite, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What the figures show of each task, method and backbone."""
    out = []
    for (task, method, backbone), group in tables.cells_of(suite, rows):
        numbers = tables.group_numbers(group)
        values = statistics.scores_of(group)
        out.append(
            {
                "task": task,
                "method": method,
                "backbone": backbone,
                "label": f"{method} {backbone}",
                "score": numbers["score"] if numbers["score"] is not None else numbers["last"],
                "interval": numbers["interval_95"],
                "nfe": numbers["nfe"],
                "latency": numbers["inference_ms"] or numbers["latency_ms"],
                "cost": numbers["cpu_minutes"],
                "step": numbers["step_ms"],
                "seeds": numbers["seeds"],
                "by_nfe": np.mean(calls, axis=0).tolist() if (calls := same_length(group)) else [],
                "curves": {
                    name: band(group, name) for name in records.CURVES if any(name in r["curves"] for r in group)
                },
                "starts": starts(group, values),
                "href": link(group[0]["folder"]) + "/",
            }
        )
    return out


def same_length(group: Sequence[Row]) -> list[list[list[float]]]:
    """Calls, latency and score of evaluations with several numbers of calls, of each run; empty if there are none."""
    found = [row.get("by_nfe") or [] for row in group]
    return found if found[0] and len({len(each) for each in found}) == 1 else []


def starts(group: Sequence[Row], values: np.ndarray | None) -> dict[str, float]:
    """Mean score over seeds by start."""
    if values is None:
        return {}
    common = sorted(set.intersection(*(set(row["scores"]) for row in group)))
    means = values.mean(axis=0)
    return {key.removeprefix(records.SCORE): round(float(mean), 4) for key, mean in list(zip(common, means))[:STARTS]}


def band(group: Sequence[Row], name: str) -> dict[str, list[float]]:
    """Mean, lowest and highest curve of the seeds, at the steps that the shortest has."""
    curves = [np.asarray(row["curves"][name], dtype=float) for row in group if name in row["curves"]]
    steps = min((curve[0] for curve in curves), key=len)
    values = np.array([np.interp(steps, curve[0], curve[1]) for curve in curves])
    digits = {"mean": values.mean(axis=0), "low": values.min(axis=0), "high": values.max(axis=0)}
    return {"steps": steps.tolist()} | {key: [float(f"{v:.4g}") for v in value] for key, value in digits.items()}


def videos(row: Row) -> dict[str, Any]:
    return {
        "name": row["name"],
        "videos": [[path.rpartition("/")[2], link(row["folder"], path)] for path in row["videos"]],
    }


def embedded(data: Any) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
