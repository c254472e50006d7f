"""The entries of meta/info.json, checked."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from diffusion_policy.common.errors import DataError

MAX_NUMBERS = 100_000_000  # of a step


def positive_number(value: Any, name: str, where: Path) -> float:
    """A rate: a number above zero."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e5:
        raise DataError(f"{where}: {name} is {str(value)[:20]!r}, not a number of frames per second.")
    return float(value)


def whole_number(value: Any, name: str, where: Path) -> int:
    """A count or an index."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise DataError(f"{where}: {name} is {str(value)[:20]!r}, not a whole number.")
    return value


def feature_layout(key: str, feature: Any, where: Path) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape) of a feature."""
    if not isinstance(feature, dict) or not isinstance(feature.get("dtype"), str):
        raise DataError(f"{where}: feature {key[:100]!r} has no dtype.")
    shape = feature.get("shape")
    if not isinstance(shape, list) or len(shape) > 8:
        raise DataError(f"{where}: feature {key[:100]!r} has no shape.")
    lengths = tuple(whole_number(length, f"a length of feature {key[:100]!r}", where) for length in shape)
    if not 0 < math.prod(lengths) <= MAX_NUMBERS:
        raise DataError(f"{where}: feature {key[:100]!r} has the shape {lengths}: empty, or larger than any real one.")
    return feature["dtype"], lengths


def image_size(shape: tuple[int, ...], names: Any) -> tuple[int, int] | None:
    """(height, width) of a colour image (H, W, 3) or (3, H, W); None for any other."""
    first = names[0] if isinstance(names, list) and names else None
    if len(shape) == 3 and shape[0] == 3 and (first in ("channel", "channels") or shape[2] != 3):
        return shape[1], shape[2]
    return (shape[0], shape[1]) if len(shape) == 3 and shape[2] == 3 else None


def dimension_names(names: Any, shape: tuple[int, ...]) -> list[str] | None:
    """The names of a vector's dimensions, from the forms that exist: a list, a list in a list, a dict of either."""
    if isinstance(names, dict):
        values = list(names.values())
        names = values[0] if len(values) == 1 and isinstance(values[0], list) else list(names)
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], list):
        names = names[0]
    if not isinstance(names, list) or len(shape) != 1 or len(names) != shape[0]:
        return None
    return [str(name)[:100] for name in names]
