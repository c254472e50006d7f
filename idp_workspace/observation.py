"""Observations at the boundary: what a policy expects, and clear errors for what does not fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

KINDS = ("rgb", "low_dim", "point_cloud")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of an observation at each step: numbers of this shape, points (P, C), or an image (C, H, W)."""

    shape: tuple[int, ...]
    rgb: bool = False


def read_shape_meta(shape_meta: Mapping[str, Any]) -> tuple[dict[str, Entry], int]:
    """Return the entries of the observation and the size of the action from upstream's shape_meta.

    shape_meta is {'obs': {key: {shape, type: rgb | low_dim | point_cloud}}, 'action': {shape}}.
    """
    entries = {}
    for key, entry in shape_meta["obs"].items():
        kind = entry.get("type", "low_dim")
        if kind not in KINDS:
            raise ValueError(f"shape_meta.obs.{key}.type={kind!r} is not one of {', '.join(KINDS)}")
        entries[key] = Entry(tuple(entry["shape"]), kind == "rgb")
    shape = tuple(shape_meta["action"]["shape"])
    if len(shape) != 1 or not entries:
        raise ValueError(
            f"shape_meta needs at least one observation and a one-dimensional action, it has {len(entries)} and {shape}"
        )
    return entries, shape[0]


def check_keys(obs: Any, entries: Mapping[str, Entry]) -> None:
    """Raise ValueError unless obs is a dictionary with all entries."""
    if not isinstance(obs, Mapping):
        raise ValueError(
            f"the observation must be a dictionary with the entries {', '.join(entries)}, got {type(obs).__name__}"
        )
    for key in entries:
        if key not in obs:
            raise ValueError(f"the observation has no entry {key!r} (it has: {', '.join(map(str, obs)) or 'none'})")


def check_observation(obs: Mapping[str, Any], entries: Mapping[str, Entry], steps: int, finite: bool = True) -> None:
    """Raise ValueError, naming the key, unless every entry is a tensor (B, >=steps, *shape) of one batch size.

    `finite` also looks at the numbers of the first `steps` steps, which waits for the device: NaN, infinity, and images
    outside [0, 1].
    """
    check_keys(obs, entries)
    for key, entry in entries.items():
        check_entry(key, entry, obs[key], steps, finite)
    sizes = {key: obs[key].shape[0] for key in entries}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the entries of an observation must have one batch size, got {sizes}")


def check_entry(key: str, entry: Entry, value: Any, steps: int, finite: bool) -> None:
    """Raise ValueError unless `value` is a dense tensor (B, >=steps, *shape) of numbers that fit the entry."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{key} must be a tensor {expected(entry, steps)}, got {type(value).__name__}")
    if value.layout is not torch.strided or value.is_meta:
        found = f"one in {value.layout} on {value.device}"
        raise ValueError(f"{key} must be a dense tensor with values {expected(entry, steps)}, got {found}")
    shape = value.shape
    if len(shape) != 2 + len(entry.shape) or shape[1] < steps or shape[2:] != entry.shape:
        raise ValueError(f"{key} must have shape {expected(entry, steps)}, got {tuple(shape)}")
    if shape[0] == 0:
        found = f"an empty batch {tuple(shape)}"
        raise ValueError(f"{key} must hold at least one sample {expected(entry, steps)}, got {found}")
    if not value.is_floating_point():
        if value.dtype == torch.bool or value.is_complex() or (entry.rgb and value.dtype != torch.uint8):
            kinds = "uint8 (0 to 255) or floats (0 to 1)" if entry.rgb else "real numbers"
            raise ValueError(f"{key} must be {kinds}, got {value.dtype}")
    elif finite and not all_finite(value[:, :steps]):
        bad, seen = int((~value[:, :steps].isfinite()).sum()), value[:, :steps].numel()
        raise ValueError(
            f"{key} must be finite, got {bad} NaN or infinite of {seen} numbers in the first {steps} steps"
        )
    elif finite and entry.rgb and not in_unit_range(value[:, :steps]):
        raise ValueError(
            f"{key} must have floats from 0 to 1, got {value.min():g} to {value.max():g}: divide by 255, or give bytes "
            "(uint8)"
        )


def expected(entry: Entry, steps: int) -> str:
    """Describe the shape of an entry, for messages."""
    size = f"{entry.shape[0]} numbers" if len(entry.shape) == 1 else ", ".join(map(str, entry.shape))
    return f"(batch, at least {steps} steps, {size})"


def all_finite(x: Tensor) -> bool:
    """Return whether all numbers are finite. A sum is finite only if its terms are; sums that overflow need a look."""
    return math.isfinite(x.sum()) or bool(x.isfinite().all())


def in_unit_range(image: Tensor, slack: float = 1e-3) -> bool:
    """Return whether all numbers are in [0, 1]; resizing and half precision may exceed it by a little."""
    low, high = torch.aminmax(image)
    return bool((low >= -slack) & (high <= 1 + slack))


def as_floats(obs: Mapping[str, Tensor], entries: Mapping[str, Entry], steps: int) -> dict[str, Tensor]:
    """Return the first `steps` steps of each entry, images in bytes as floats in [0, 1]."""
    seen = {key: obs[key][:, :steps] for key in entries}
    return {
        key: value.float().div_(255) if entries[key].rgb and value.dtype == torch.uint8 else value
        for key, value in seen.items()
    }


def check_chunks(batch: Mapping[str, Any], steps: int, window: int, action_dim: int) -> None:
    """Raise ValueError unless a training batch has observations and action chunks of at least `steps` steps."""
    for name in ("obs", "action"):
        if name not in batch:
            raise ValueError(f"the batch has no entry {name!r} (it has: {', '.join(map(str, batch)) or 'none'})")
    shape = tuple(batch["action"].shape[1:])
    if len(shape) != 2 or shape[0] < steps or shape[1] != action_dim:
        raise ValueError(
            f"the batch has action chunks of shape {shape}, the policy is built for ({window}, {action_dim})"
        )


def check_sample(policy: str, chunk: Any, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless what an objective's `sample` returned is a tensor of this shape."""
    if not isinstance(chunk, Tensor) or tuple(chunk.shape) != shape:
        got = tuple(chunk.shape) if isinstance(chunk, Tensor) else type(chunk).__name__
        raise ValueError(f"{policy}.sample must return a tensor of shape {shape}, got {got}")
