"""Options as validated dataclasses.

An objective declares its options once, as a dataclass derived from `Options`. The declaration is the type, the default,
the validator, the accepted keyword argument and the documentation of each option:

    @dataclass(frozen=True, kw_only=True)
    class MyOptions(Options):
        kernel: Literal["laplace", "gaussian"] = "laplace"     # one of these words
        tau: Annotated[float, Above(0)] = 1.0                  # a number above 0
        topk: Annotated[int | None, AtLeast(1)] = None         # null, or at least 1
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, Literal, TypeVar


@dataclasses.dataclass(frozen=True)
class Above:
    """A number greater than `bound`."""

    bound: float

    def accepts(self, value: float) -> bool:
        return value > self.bound

    def __str__(self) -> str:
        return f"above {self.bound:g}"


@dataclasses.dataclass(frozen=True)
class AtLeast:
    """A number that is not less than `bound`."""

    bound: float

    def accepts(self, value: float) -> bool:
        return value >= self.bound

    def __str__(self) -> str:
        return f"at least {self.bound:g}"


@dataclasses.dataclass(frozen=True)
class Between:
    """A number in [low, high), or in (low, high) if `open`."""

    low: float
    high: float
    open: bool = False

    def accepts(self, value: float) -> bool:
        return self.low <= value < self.high and not (self.open and value == self.low)

    def __str__(self) -> str:
        return f"in {'(' if self.open else '['}{self.low:g}, {self.high:g})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Base of all options. Construction checks every field against its type; ValueError names the field."""

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(type(self), include_extras=True).items():
            check_value(name, getattr(self, name), hint)

    def subset(self, kind: type[Options]) -> dict[str, Any]:
        """Return the values of the fields that `kind` declares."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(kind)}


def check_value(name: str, value: Any, hint: Any) -> None:
    """Raise ValueError unless `value` fits its hint: Literal, bool, a number with bounds (Annotated), or one | None."""
    bounds = getattr(hint, "__metadata__", ())
    hint = typing.get_args(hint)[0] if bounds else hint
    if isinstance(hint, types.UnionType):
        if value is None and types.NoneType in typing.get_args(hint):
            return
        hint = next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    if typing.get_origin(hint) is Literal:
        if value not in typing.get_args(hint):
            raise ValueError(f"{name}={value!r} is not one of {', '.join(typing.get_args(hint))}")
    elif hint is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be true or false")
    elif hint in (int, float):
        if isinstance(value, bool) or not isinstance(value, Integral if hint is int else Real):
            raise ValueError(f"{name}={value!r} must be a {'whole number' if hint is int else 'number'}")
        for bound in bounds:
            if not bound.accepts(value):
                raise ValueError(f"{name}={value!r} must be {bound}")


def numbers(values: Iterable[float]) -> tuple[float, ...]:
    """Return a sequence from a config (a list) as the tuple of floats that a frozen dataclass holds."""
    return tuple(float(value) for value in values)


Kind = TypeVar("Kind")


def split_options(kind: type[Kind], arguments: Mapping[str, Any]) -> tuple[Kind, dict[str, Any]]:
    """Build the dataclass `kind` from the arguments that it declares; return it with the other arguments."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    own = {name: value for name, value in arguments.items() if name in names}
    rest = {name: value for name, value in arguments.items() if name not in names}
    return kind(**own), rest


def unknown_argument(name: str, known: Iterable[str], owner: str) -> TypeError:
    """Return the error for an unknown argument, with the nearest known name if there is one."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it takes: {', '.join(known)}"
    return TypeError(f"{owner} has no argument {name!r}; {hint}")
