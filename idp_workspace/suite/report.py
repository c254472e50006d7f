"""The report of a suite: results.json, README.md, tables.tex and index.html."""

from __future__ import annotations

import pathlib
import sys
import time
from typing import Any

from diffusion_policy.common.command_line import shell_command
from diffusion_policy.common.errors import ConfigError
from diffusion_policy.storage import atomic
from idp_workspace.suite import claims, index, page, records, tables
from idp_workspace.suite.grid import ROOT, Suite
from idp_workspace.suite.jobs import write_json

#: What results.json leaves out: it is drawn on the page, or follows from the rest.
DRAWN = ("curves", "videos", "folder", "also_scores")


def write_report(suite: Suite, publish: bool = False) -> pathlib.Path:
    """Write the report of the runs that are done; returns the page."""
    started = time.perf_counter()
    rows = records.rows_of(suite, curves=True)
    if not rows:
        raise ConfigError(f"no run in {suite.output} is done; `suite run {suite.path}` makes them")
    made = [*tables.paper_tables(suite, rows)] if has_evaluations(rows) else []
    made += [tables.score_table(suite, rows), tables.summary_table(suite, rows)]
    folder = suite.output / "report"
    folder.mkdir(parents=True, exist_ok=True)
    command = shell_command("python", "-m", "idp_workspace.suite", "run", shown(suite.path), *preset_words(suite))
    found = claims.of_suite(suite, rows, command)
    write_text_report(folder, suite, rows, made, found, command)
    html = folder / "index.html"
    atomic.write_text(html, page.render(suite, rows, made, command))
    print((folder / "README.md").read_text())
    if publish:
        write_text_report(ROOT / "results" / suite.full_name, suite, rows, made, found, command)
        print(f"published  {ROOT / 'results' / suite.full_name}; {index.write_index(ROOT / 'results')} has its claims")
    print(f"page       {html} ({len(rows)} of {len(suite.runs)} runs, {time.perf_counter() - started:.1f} s)")
    sys.stdout.flush()
    return html


def write_text_report(
    folder: pathlib.Path,
    suite: Suite,
    rows: list[dict[str, Any]],
    made: list[tables.Table],
    found: list[dict[str, Any]],
    command: str,
) -> None:
    """Write results.json, README.md and tables.tex."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = [{key: value for key, value in row.items() if key not in DRAWN} for row in rows]
    about = {key: getattr(suite, key) for key in ("name", "title", "description", "preset", "reference", "form")}
    write_json(
        folder / "results.json",
        {"command": command, "suite": about, "runs_of_suite": len(suite.runs), "claims": found, "rows": kept},
    )
    missing = len(suite.runs) - len(rows)
    paragraphs = [
        f"# {suite.title}",
        suite.description,
        f"{len(rows)} of {len(suite.runs)} runs are done; the numbers are of those." if missing else "",
    ]
    for table in made:
        paragraphs += [f"## {table.title}", table.markdown(), table.note]
    beside = tables.published(suite.published)
    if beside and beside.notes:
        paragraphs += ["## Notes on the published numbers", "\n".join(f"- {note}" for note in beside.notes)]
    paragraphs += [
        suite.notes,
        f"Made with `{command}`; the command, commit, versions and dataset of every run are in results.json.",
    ]
    atomic.write_text(folder / "README.md", "\n\n".join(text.strip() for text in paragraphs if text) + "\n")
    atomic.write_text(folder / "tables.tex", "\n\n".join(table.latex() for table in made) + "\n")


def has_evaluations(rows: list[dict[str, Any]]) -> bool:
    return any(row["best_evaluation"] is not None for row in rows)


def preset_words(suite: Suite) -> list[str]:
    return ["--preset", suite.preset] if suite.preset else []


def shown(path: pathlib.Path) -> str:
    """Relative to the repository if it is inside."""
    path = path.resolve()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
