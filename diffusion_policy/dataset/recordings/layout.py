"""The arrays and cameras of a recording."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from diffusion_policy.common.errors import DataError


@dataclasses.dataclass(frozen=True)
class Feature:
    """Numbers of every step: their shape, dtype, and the names of the dimensions if the recording has them."""

    shape: tuple[int, ...]
    dtype: str
    names: list[str] | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Camera:
    """Images (height, width, 3) uint8."""

    height: int
    width: int

    @property
    def shape(self) -> list[int]:
        return [self.height, self.width, 3]


def is_camera(shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether steps of this shape look like RGB images."""
    return len(shape) == 3 and shape[2] == 3 and min(shape[:2]) >= 16 and np.dtype(dtype).kind in "uf"


def check_same_layout(first: dict[str, tuple], now: dict[str, tuple], name: str) -> None:
    """Raise if an episode has other features or cameras, {key: shape}, than the first one."""
    for key in first.keys() | now.keys():
        if first.get(key) != now.get(key):
            shapes = ["missing" if shape is None else str(shape) for shape in (now.get(key), first.get(key))]
            raise DataError(f"{name}: {key} is {shapes[0]}, but {shapes[1]} in the first episode.")
