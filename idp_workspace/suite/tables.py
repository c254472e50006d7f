"""The tables of a report, as lists of cells, and these as Markdown and LaTeX."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from diffusion_policy.common.errors import ConfigError
from idp_workspace.suite import statistics
from idp_workspace.suite.grid import FORMS, Suite, read

Row = dict[str, Any]
#: Keys of a row that the two numbers of a cell are means of, by the form of the table.
NUMBERS = {FORMS[0]: ("best_evaluation", "mean_of_last"), FORMS[1]: ("mean_of_best", "last")}
AVERAGE = "average"


@dataclasses.dataclass
class Table:
    """A table of text; `runs` names the runs behind a cell, by (line, column)."""

    title: str
    head: list[str]
    lines: list[list[str]]
    note: str = ""
    runs: dict[tuple[int, int], list[str]] = dataclasses.field(default_factory=dict)
    rules: list[int] = dataclasses.field(default_factory=list)  # lines of LaTeX before which a rule is

    def add(self, cells: Sequence[str | tuple[str, Sequence[Row]]]) -> None:
        """Add a line of cells, each a text, or a text and the rows that it is made of."""
        for column, cell in enumerate(cells):
            if not isinstance(cell, str):
                self.runs[len(self.lines), column] = [row["folder"] for row in cell[1] if "folder" in row]
        self.lines.append([cell if isinstance(cell, str) else cell[0] for cell in cells])

    def markdown(self) -> str:
        rows = [self.head, *self.lines]
        text = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        return "\n".join([text[0], "|---" * len(self.head) + "|", *text[1:]])

    def latex(self) -> str:
        lines = [f"% {self.title}", rf"\begin{{tabular}}{{l{'c' * (len(self.head) - 1)}}}", r"\toprule"]
        lines += [" & ".join(map(escape, self.head)) + r" \\", r"\midrule"]
        for number, row in enumerate(self.lines):
            if number in self.rules:
                lines.append(r"\midrule")
            lines.append(" & ".join(map(escape, row)) + r" \\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def escape(text: str) -> str:
    """Text for LaTeX, in which ** makes bold."""
    plain = re.sub(r"([&%$#_{}])", r"\\\1", text).replace("~", r"\textasciitilde{}")
    return re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", plain)


# ---------------------------------------------------------------------- published numbers
@dataclasses.dataclass(frozen=True)
class Published:
    """Numbers of a paper: pairs by backbone (or average), method and task, in the unit of the scores."""

    source: str
    names: dict[str, str]
    values: dict[str, dict[str, dict[str, tuple[float, ...]]]]
    notes: list[str]
    form: str

    def cell(self, backbone: str, method: str, task: str) -> tuple[float, ...] | None:
        return self.values.get(backbone, {}).get(method, {}).get(task)


def published(path: str | None) -> Published | None:
    """The numbers in a data file of suites/published; None without a file."""
    if path is None:
        return None
    data = read(pathlib.Path(path))
    values: dict[str, dict[str, dict[str, tuple[float, ...]]]] = {}
    try:
        for backbone, methods in data["values"].items():
            for method, cells in methods.items():
                pairs = [tuple(cell) if isinstance(cell, list) else (cell,) for cell in cells]
                if len(pairs) != len(data["tasks"]):
                    raise ConfigError(
                        f"{path}: {backbone} {method} has {len(pairs)} cells for {len(data['tasks'])} tasks"
                    )
                scaled = [tuple(value / data["unit"] for value in pair) for pair in pairs]
                values.setdefault(backbone, {})[method] = dict(zip(data["tasks"], scaled))
        return Published(data["source"], data["methods"], values, data.get("notes", []), data["form"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a file of published numbers: {error!r}") from error


# ---------------------------------------------------------------------- the paper's form
def paper_tables(suite: Suite, rows: Sequence[Row]) -> list[Table]:
    """One table for each backbone, and one averaged over them if there are several, published numbers beside."""
    beside = published(suite.published)
    backbones = suite.axis("backbone")
    tables = [paper_table(suite, rows, [backbone], beside) for backbone in backbones]
    return tables if len(backbones) == 1 else [*tables, paper_table(suite, rows, backbones, beside)]


def paper_table(suite: Suite, rows: Sequence[Row], backbones: list[str], beside: Published | None) -> Table:
    """Methods by tasks, cells `best / mean of last 5` in the paper's form, means over seeds, then over backbones."""
    tasks, methods = suite.axis("task"), suite.axis("method")
    where = backbones[0] if len(backbones) == 1 else f"averaged over {', '.join(backbones)}"
    nfe = {row["method"]: f"{row['nfe']:g}" for row in rows if row.get("nfe") is not None}
    out = Table(
        f"{suite.form}, {where}",
        ["method", "calls", *tasks, "mean"],
        [],
        f"Cells are {suite.form} of the evaluations during training, means over training seeds.",
    )
    counts = set()
    for method in methods:
        cells: list[tuple[str, list[Row]]] = []
        pairs = []
        for task in tasks:
            parts = [
                [row for row in rows if (row["method"], row["task"], row["backbone"]) == (method, task, backbone)]
                for backbone in backbones
            ]
            found = [part for part in parts if part and all(row[NUMBERS[suite.form][0]] is not None for row in part)]
            here = [row for part in found for row in part]
            counts |= {len(part) for part in found}
            pair = (
                [float(np.mean([_mean(part, key) for part in found])) for key in NUMBERS[suite.form]] if found else []
            )
            if len(found) < sum(
                any(run.method == method and run.backbone == b for run in suite.runs) for b in backbones
            ):
                pair = []  # a mean over other backbones would not compare
            cells.append((_pair(pair), here))
            pairs.append(pair)
        if not any(pairs):
            continue
        mean = [float(np.mean([pair[side] for pair in pairs])) for side in (0, 1)] if all(pairs) else []
        out.add([method, nfe.get(method, "-"), *cells, _pair(mean)])
        if beside is not None:
            line = _published_line(beside, method, tasks, backbones)
            if line:
                out.add(line)
    if counts and counts != {1}:
        out.note += f" {min(counts)}{f' to {max(counts)}' if len(counts) > 1 else ''} seeds."
    fewest = min((row["evaluations"] for row in rows), default=0)
    if fewest < 5:
        out.note += f" A run has only {fewest} evaluations."
    if beside is not None:
        out.note += f" *Published* are {beside.form} of {beside.source}: another scale of networks, steps and data."
    return out


def _published_line(beside: Published, method: str, tasks: list[str], backbones: list[str]) -> list[str]:
    key = backbones[0] if len(backbones) == 1 and backbones[0] in beside.values else AVERAGE
    found = [beside.cell(key, method, task) for task in tasks]
    if not any(found):
        return []
    mean = [float(np.mean(side)) for side in zip(*found)] if all(found) else []
    averaged = key == AVERAGE and len(backbones) == 1 and len(beside.values) > 1
    name = f"*{beside.names.get(method, method)}, published{' (all backbones)' * averaged}*"
    return [name, "", *(_pair(pair) for pair in found), _pair(mean)]


def _pair(values: Sequence[float] | None) -> str:
    return " / ".join(f"{value:.2f}" for value in values) if values else "-"


def _mean(rows: Sequence[Row], key: str) -> float:
    return float(np.mean([row[key] for row in rows]))


# ---------------------------------------------------------------------- our numbers
def cells_of(suite: Suite, rows: Sequence[Row]) -> list[tuple[tuple[str, str, str], list[Row]]]:
    """Runs by (task, method, backbone), in the order of the suite; seeds together."""
    out: dict[tuple[str, str, str], list[Row]] = {(run.task, run.method, run.backbone): [] for run in suite.runs}
    for row in rows:
        out[row["task"], row["method"], row["backbone"]].append(row)
    return [(key, group) for key, group in out.items() if group]


def group_numbers(group: Sequence[Row]) -> dict[str, Any]:
    """Score, 95 % interval and the rest of runs that differ in their seeds only."""
    known = [row["score"] for row in group if row["score"] is not None]
    values = statistics.scores_of(group)
    low_high = list(statistics.interval(values)) if values is not None else None
    return {
        "score": float(np.mean(known)) if known else None,
        "interval_95": low_high,
        "each": known,
        "seeds": len(group),
        "starts": None if values is None else values.shape[1],
        **{key: mean_or_none(group, key) for key in MEANS},
    }


MEANS = (
    "nfe",
    "steps",
    "cpu_minutes",
    "step_ms",
    "inference_ms",
    "latency_ms",
    "ends_still",
    "best_evaluation",
    "last",
)


def mean_or_none(group: Sequence[Row], key: str) -> float | None:
    known = [row[key] for row in group if row.get(key) is not None]
    return float(np.mean(known)) if known else None


def reference_of(suite: Suite, method: str) -> str | None:
    """The method that a method is compared with."""
    name = suite.references.get(method, suite.reference)
    return None if name == method else name


def score_table(suite: Suite, rows: Sequence[Row]) -> Table:
    """The evaluations after training: a line for each task, method and backbone, best first in each task and group."""
    several, groups = len(suite.axis("task")) > 1, suite.axis("group")
    also = list(suite.also)
    out = Table(
        "Evaluation after training" if suite.evaluates else "Last evaluation of the training",
        [
            *(["task"] if several else []),
            *(["group"] if len(groups) > 1 else []),
            *(
                "method",
                "backbone",
                "score",
                "95 % interval",
                "seed by seed",
                "minus",
                "difference, 95 % interval",
                "p",
            ),
            *also,
            *("calls", "steps", "core-minutes", "step, ms", "latency, ms"),
        ],
        [],
        "Intervals draw training seeds and starts again; for successes of one seed they are Wilson's. Differences are "
        "paired by training seed and start. p is over starts, for these trained policies: McNemar's test for successes "
        "of one seed, else a permutation test.",
    )
    found = dict(cells_of(suite, rows))
    numbers = {key: group_numbers(group) for key, group in found.items()}
    tasks = suite.axis("task")

    def place(key: tuple[str, str, str]) -> tuple[int, int, float]:
        return tasks.index(key[0]), groups.index(found[key][0]["group"]), -(numbers[key]["score"] or 0)

    for key in sorted(found, key=place):
        task, method, backbone = key
        group, each = found[key], numbers[key]
        reference = reference_of(suite, method)
        pair = statistics.paired(group, found.get((task, reference, backbone), [])) if reference else None
        out.add(
            [
                *([task] if several else []),
                *([group[0]["group"] or "-"] if len(groups) > 1 else []),
                method,
                backbone,
                (number(each["score"], ".3f"), group),
                span(each["interval_95"], ".3f"),
                " ".join(f"{value:.3f}" for value in each["each"]),
                reference if pair and reference else "-",
                f"{pair['difference']:+.3f} ({span(pair['interval_95'], '+.3f')})" if pair else "-",
                f"{pair['p']:.3g}" if pair else "-",
                *(number(mean_of_also(group, name), ".3f") for name in also),
                number(each["nfe"], "g"),
                number(each["steps"], ".0f"),
                number(each["cpu_minutes"], ".1f"),
                number(each["step_ms"], ".1f"),
                number(each["inference_ms"] or each["latency_ms"], ".2f"),
            ]
        )
    return out


def summary_table(suite: Suite, rows: Sequence[Row]) -> Table:
    """Methods over all tasks and backbones: mean, interquartile mean, probability of improvement, paired difference."""
    out = Table(
        "Over all tasks and backbones",
        [
            *("method", "runs", "mean", "interquartile mean", "95 % interval", "compared with"),
            *("probability of improvement", "95 % interval", "paired difference", "95 % interval", "p"),
        ],
        [],
        "The interquartile mean is that of the middle half of all runs; its interval, and that of the probability that "
        "a run of the method scores higher than one of the other, are bootstraps stratified by task.",
    )
    methods = {
        name: [row for row in rows if row["method"] == name and row["score"] is not None]
        for name in suite.axis("method")
    }
    for name, group in sorted(methods.items(), key=lambda item: -(mean_or_none(item[1], "score") or 0)):
        if not group:
            continue
        middle, around = statistics.interquartile_mean(statistics.by_task(group))
        reference = reference_of(suite, name)
        other = methods.get(reference or "", [])
        cells: list[str] = ["-"] * 6
        tasks = {row["task"] for row in group} & {row["task"] for row in other}
        if tasks:
            mine, theirs = (
                statistics.by_task(sorted((row for row in part if row["task"] in tasks), key=lambda row: row["task"]))
                for part in (group, other)
            )
            chance, about = statistics.improvement(mine, theirs)
            pair = statistics.paired(group, other)
            cells = [str(reference), f"{chance:.2f}", span(about, ".2f"), "-", "-", "-"]
            if pair:
                cells[3:] = [f"{pair['difference']:+.3f}", span(pair["interval_95"], "+.3f"), f"{pair['p']:.3g}"]
        out.add(
            [
                name,
                str(len(group)),
                (number(mean_or_none(group, "score"), ".3f"), group),
                f"{middle:.3f}",
                span(around, ".3f"),
                *cells,
            ]
        )
    return out


def mean_of_also(group: Sequence[Row], name: str) -> float | None:
    known = [row["also"][name] for row in group if (row.get("also") or {}).get(name) is not None]
    return float(np.mean(known)) if known else None


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def span(values: Sequence[float] | None, form: str) -> str:
    return "-" if values is None else f"{values[0]:{form}} to {values[1]:{form}}"


BUILDERS: tuple[Callable[[Suite, Sequence[Row]], Table], ...] = (score_table, summary_table)
