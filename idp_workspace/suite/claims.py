"""Claims of a suite: sentences with a number, its interval, and the command that made it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from idp_workspace.suite import statistics, tables
from idp_workspace.suite.grid import Suite

Row = dict[str, Any]


def of_suite(suite: Suite, rows: Sequence[Row], command: str) -> list[dict[str, Any]]:
    """The claims that the suite states, or else the score of each method and its difference to the reference."""
    stated = suite.claims or [
        claim
        for method in suite.axis("method")
        for claim in (
            {"text": f"{method}: score", "method": method},
            {"text": f"{method} minus {tables.reference_of(suite, method)}", "method": method}
            | {"minus": tables.reference_of(suite, method)},
        )
        if claim.get("minus", "") is not None
    ]
    found = [claim_of(claim, rows, command, bool(suite.claims)) for claim in stated]
    return [claim for claim in found if claim is not None]


def claim_of(claim: dict[str, Any], rows: Sequence[Row], command: str, stated: bool) -> dict[str, Any] | None:
    """A claim with its number; None if its runs are not there."""
    chosen = [row for row in rows if all(row[key] == claim[key] for key in ("task", "backbone") if key in claim)]
    mine = [row for row in chosen if row["method"] == claim.get("method") and row["score"] is not None]
    if not mine:
        return None
    out: dict[str, Any] = {"claim": claim["text"], "command": command, "runs": len(mine), "stated": stated}
    if "minus" in claim:
        pair = statistics.paired(mine, [row for row in chosen if row["method"] == claim["minus"]])
        if pair is None:
            return None
        return out | {"number": pair["difference"], "interval_95": pair["interval_95"], "p": pair["p"]}
    return out | {"number": tables.mean_or_none(mine, "score"), "interval_95": statistics.pooled_interval(mine)}
