"""Checked arguments: an objective declares its own as a dataclass, everything it does not know goes to the generator."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any


def check_choices(values: Mapping[str, Any], choices: Mapping[str, tuple[str, ...]]) -> None:
    """Raise ValueError for a named value that is not among its choices."""
    for name, value in values.items():
        if name in choices and value not in choices[name]:
            raise ValueError(f"{name}={value!r} is not one of {', '.join(choices[name])}")


def split_options(kind: type, arguments: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Build the dataclass `kind` from the arguments it declares; return it with the arguments that are left."""
    names = {field.name for field in dataclasses.fields(kind)}
    own = {name: value for name, value in arguments.items() if name in names}
    rest = {name: value for name, value in arguments.items() if name not in names}
    return kind(**own), rest


def unknown_argument(name: str, known: Iterable[str], owner: str) -> TypeError:
    """The error for an argument nobody knows, with the nearest name if there is one."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it takes: {', '.join(known)}"
    return TypeError(f"{owner} has no argument {name!r}; {hint}")
