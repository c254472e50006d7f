"""Random damage to bytes and JSON, and payloads that would create a file."""

from __future__ import annotations

import copy
import json
import os
import pickle
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed

INTERESTING = (0, 1, 0x7F, 0x80, 0xFE, 0xFF)
SIZES = (
    0,
    1,
    -1,
    2,
    3,
    7,
    255,
    256,
    65535,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**40,
    2**62,
    2**63 - 1,
    2**64,
    -(2**63),
    10**30,
)
ODD = (
    None,
    True,
    False,
    "",
    "0",
    "NaN",
    "-1",
    "é\u202e\x00",
    "a" * 5000,
    [],
    {},
    [0],
    [[]],
    {"id": "pickle"},
    {"a": {}},
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    *SIZES,
)


class FileTarget:
    """A target whose cases are each made by a separate random generator."""

    def inputs(self, seed: int, start: int, stop: int, use: Callable[[int, Any], None]) -> None:
        for number in range(start, stop):
            use(number, (seed, number))

    def rng(self, value: tuple[int, int]) -> np.random.Generator:
        return np.random.default_rng([*value, zlib.crc32(type(self).__name__.encode())])

    def describe(self, value: tuple[int, int]) -> str:
        return f"seed {value[0]}, number {value[1]}"


class StrategyTarget:
    """A target whose cases are drawn from the hypothesis strategy `self.strategy`, in independent runs of `batch`."""

    batch = 50

    def inputs(self, seed: int, start: int, stop: int, use: Callable[[int, Any], None]) -> None:
        for batch in range(start // self.batch, (stop - 1) // self.batch + 1):
            numbers = iter(range(batch * self.batch, (batch + 1) * self.batch))

            @hypothesis_seed(seed * 1_000_003 + batch)
            @settings(
                max_examples=self.batch,
                database=None,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(self.strategy)
            def run(value: Any) -> None:
                number = next(numbers, None)  # noqa: B023  called in this iteration only
                if number is not None:
                    use(number, value)

            run()
            for number in numbers:  # hypothesis may exhaust a small strategy
                use(number, None)

    def describe(self, value: Any) -> str:
        return repr(value)


def pick(rng: np.random.Generator, values) -> Any:
    values = list(values)
    return values[rng.integers(len(values))]


# ---------------------------------------------------------------------- bytes
def mutate_bytes(rng: np.random.Generator, data: bytes, other: bytes = b"") -> bytes:
    """Make one or a few changes; splices come from `other`."""
    for _ in range(int(rng.choice([1, 1, 1, 2, 4]))):
        data = pick(rng, BYTE_MUTATIONS)(rng, data, other or data)
    return data


def _place(rng, data) -> int:
    """A random position, often near the beginning or the end, where headers are."""
    n = max(1, len(data))
    return int(
        pick(rng, [rng.integers(n), rng.integers(n), rng.integers(min(n, 64)), n - 1 - rng.integers(min(n, 64))])
    )


def _flip(rng, data, other):
    out = bytearray(data)
    for _ in range(int(rng.choice([1, 1, 2, 8]))):
        if out:
            out[_place(rng, out)] ^= 1 << int(rng.integers(8))
    return bytes(out)


def _set(rng, data, other):
    out = bytearray(data)
    if out:
        out[_place(rng, out)] = pick(rng, [*INTERESTING, int(rng.integers(256))])
    return bytes(out)


def _number(rng, data, other):
    """Replace an integer field by an unusual value."""
    width = int(rng.choice([2, 4, 8]))
    at = _place(rng, data)
    return (
        data[:at] + (int(pick(rng, SIZES)) % (1 << 8 * width)).to_bytes(width, "little") + data[at + width :]
        if len(data) > at + width
        else data
    )


def _cut(rng, data, other):
    return data[: _place(rng, data)]


def _remove(rng, data, other):
    at = _place(rng, data)
    return data[:at] + data[at + int(rng.integers(1, 64)) :]


def _insert(rng, data, other):
    at = _place(rng, data)
    return data[:at] + rng.bytes(int(rng.integers(1, 64))) + data[at:]


def _splice(rng, data, other):
    length = int(rng.integers(1, 256))
    at, source = _place(rng, data), _place(rng, other)
    return data[:at] + other[source : source + length] + data[at + length :]


def _fill(rng, data, other):
    at, length = _place(rng, data), int(rng.choice([4, 16, 256, 4096]))
    return data[:at] + bytes([pick(rng, (0, 255))]) * len(data[at : at + length]) + data[at + length :]


def _append(rng, data, other):
    return data + (rng.bytes(int(rng.integers(1, 4096))) if rng.random() < 0.5 else data)


BYTE_MUTATIONS = (_flip, _flip, _flip, _set, _set, _number, _number, _cut, _remove, _insert, _splice, _fill, _append)


# ---------------------------------------------------------------------- structures
def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Paths to all values of nested dicts and lists."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, child in children for place in places(child, (*path, key)))]


def mutate_structure(rng: np.random.Generator, value: Any, odd=ODD) -> Any:
    """Copy nested dicts and lists with a value replaced, removed, renamed or duplicated."""
    value = copy.deepcopy(value)
    for _ in range(int(rng.choice([1, 1, 2]))):
        path = pick(rng, places(value))
        if not path:
            if rng.random() < 0.1:
                return copy.deepcopy(pick(rng, odd))
            continue
        holder = value
        for key in path[:-1]:
            holder = holder[key]
        kind = rng.integers(6)
        if kind <= 3:
            holder[path[-1]] = copy.deepcopy(pick(rng, odd))
        elif kind == 4:
            del holder[path[-1]]
        elif isinstance(holder, list):
            holder.append(copy.deepcopy(holder[path[-1]]))
        else:
            holder[pick(rng, ["", "x", "zarr_format", "extra", str(path[-1])[:-1]])] = holder.pop(path[-1])
    return value


def mutate_json(rng: np.random.Generator, data: bytes) -> bytes:
    if rng.random() < 0.05:
        return b"[" * 100_000 if rng.random() < 0.5 else b'{"a":' * 20_000 + b"1" + b"}" * 20_000
    return json.dumps(mutate_structure(rng, json.loads(data))).encode()


# ---------------------------------------------------------------------- payloads
class Creates:
    """An object whose unpickling creates the file at `path`."""

    def __init__(self, path, function=open):
        self.path, self.function = str(path), function

    def __reduce__(self):
        if self.function is os.system:
            return os.system, (f"touch '{self.path}'",)
        if self.function is eval:
            return eval, (f"open({self.path!r}, 'w')",)
        return open, (self.path, "w")


def pickled_payload(rng: np.random.Generator, canary) -> bytes:
    return pickle.dumps(Creates(canary, pick(rng, [open, os.system, eval])), protocol=int(rng.integers(0, 6)))
