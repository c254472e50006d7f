"""One finding about a recording."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

PROBLEM, WARNING, NOTE = "problem", "warning", "note"


@dataclasses.dataclass(frozen=True)
class Finding:
    """level: a problem stops or spoils training, a warning may, a note is good to know."""

    level: str
    title: str
    advice: str


def listed(items: Sequence[object], limit: int = 6) -> str:
    """'a, b and 3 more'."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(map(str, items[:limit])) + more
