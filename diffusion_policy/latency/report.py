"""The result of a latency measurement: rows, a table, a plot."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import platform
from typing import Any

import torch

from diffusion_policy.latency.timing import Timing
from diffusion_policy.storage import atomic, checkpoint_io

COLORS = {"eager": "#4c72b0", "compiled": "#dd8452", "ONNX Runtime": "#55a868", "ONNX Runtime, int8": "#8172b3"}


@dataclasses.dataclass
class Row:
    """A method on a backend: its timing, or the reason why there is none."""

    method: str
    backend: str
    nfe: int
    timing: Timing | None
    note: str = ""

    def described(self) -> dict[str, Any]:
        """The row as JSON."""
        head = {"method": self.method, "backend": self.backend, "nfe": self.nfe, "note": self.note}
        return head | (self.timing.described() if self.timing is not None else {})


def machine() -> dict[str, Any]:
    """The machine and the versions of a measurement."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    load = list(os.getloadavg()) if hasattr(os, "getloadavg") else None
    return {"cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "load_average": load}


def table(rows: list[dict[str, Any]]) -> str:
    """Format described rows as a Markdown table, in milliseconds. The last column compares processor times."""
    lines = [
        "| method | calls | backend | p50 | p90 | p99 | max | p99 / p50 | p50, processor | beside the first row |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    first = next((row["cpu"]["p50"] for row in rows if "cpu" in row), 1.0)
    for row in rows:
        head = f"| {row['method']} | {row['nfe']} | {row['backend']} |"
        if "cpu" not in row:
            lines.append(f"{head} | | | | | | {row['note']} |")
            continue
        numbers = " | ".join(f"{row[name]:.3g}" for name in ("p50", "p90", "p99", "max"))
        cpu = row["cpu"]["p50"]
        lines.append(f"{head} {numbers} | {row['p99_over_p50']:.2f} | {cpu:.3g} | {cpu / first:.3g}x |")
    return "\n".join(lines)


def write(rows: list[dict[str, Any]], folder: pathlib.Path, title: str, about: dict[str, Any]) -> None:
    """Write latency.json and latency.png."""
    content = {**about, **machine(), "versions": checkpoint_io.versions(), "rows": rows}
    atomic.write_text(folder / "latency.json", json.dumps(content, indent=2) + "\n")
    plot(rows, folder / "latency.png", title)


def plot(rows: list[dict[str, Any]], path: pathlib.Path, title: str) -> None:
    """Draw p50 as bars, with lines up to p99, on a logarithmic axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed = [row for row in rows if "cpu" in row]
    figure = Figure(figsize=(7, 0.6 + 0.35 * len(timed)), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for place, row in enumerate(timed):
        p50, p99 = row["p50"], row["p99"]
        axis.barh(place, p50, color=COLORS[row["backend"]], label=row["backend"])
        axis.plot([p50, max(p50, p99)], [place, place], color="black", linewidth=1)
        axis.text(1.1 * max(p50, p99), place, f"{p50:.3g}", va="center", fontsize=8)
    axis.set_yticks(range(len(timed)), [f"{row['method']} ({row['nfe']})" for row in timed])
    axis.invert_yaxis()
    axis.set(xscale="log", xlabel="milliseconds per action chunk at batch 1: p50, line to p99", title=title)
    axis.margins(x=0.15)
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(*zip(*dict(zip(labels, zip(handles, labels, strict=True), strict=True)).values(), strict=True))
    figure.savefig(path, dpi=120)
