"""The front page of results/."""
from __future__ import annotations
import pathlib
def write_index(results: pathlib.Path) -> None:
    raise NotImplementedError
