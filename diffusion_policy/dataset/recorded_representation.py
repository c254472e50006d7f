"""The representation that `task.rotations` and `task.relative_actions` ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.common.representation import Field, Representation, Rotation
from diffusion_policy.dataset.recorded_keys import find_keys


def representation_of(
    widths: Mapping[str, int], action: int, rotations: Mapping[str, Any], relative: bool, joined: bool
) -> Representation:
    """How observed arrays and actions reach the network.

    Args:
        widths: {name of an observed array: its numbers}.
        action: numbers of an action.
        rotations: {name or 'action': {start, from} or a list of them}.
        relative: whether actions are relative to the first observed array of their size.
        joined: whether the arrays are joined to one vector, 'obs'.
    """
    names = find_keys("task.rotations", list(rotations), [*widths, "action"])
    asked = dict(zip(names, rotations.values(), strict=True))
    arrays = {name: Field(width, read_rotations(name, asked.get(name, []), width)) for name, width in widths.items()}
    acted = Field(action, read_rotations("action", asked.get("action", []), action))
    place = _relative_to(arrays, acted, joined) if relative else None
    return Representation({"obs": _join(arrays)} if joined else arrays, acted, place)


def read_rotations(name: str, entries: Any, width: int) -> tuple[Rotation, ...]:
    """The rotations of one entry of task.rotations, sorted."""
    listed = [entries] if isinstance(entries, Mapping) else entries
    form = isinstance(listed, Sequence) and all(
        isinstance(entry, Mapping) and entry.keys() == {"start", "from"} and isinstance(entry["start"], int)
        for entry in listed
    )
    if not form:
        raise ConfigError(f"task.rotations.{name} must be {{start: 3, from: quaternion}}, or a list of such entries")
    out = sorted((Rotation(entry["start"], str(entry["from"])) for entry in listed), key=lambda each: each.start)
    ends = [0, *(rotation.stop for rotation in out)]
    if any(rotation.start < end for rotation, end in zip(out, ends, strict=False)) or ends[-1] > width:
        raise ConfigError(f"task.rotations.{name}: the rotations overlap, or leave its {width} numbers")
    return tuple(out)


def _join(arrays: Mapping[str, Field]) -> Field:
    rotations: list[Rotation] = []
    width = 0
    for field in arrays.values():
        rotations += [Rotation(rotation.start + width, rotation.source) for rotation in field.rotations]
        width += field.width
    return Field(width, tuple(rotations))


def _relative_to(arrays: Mapping[str, Field], action: Field, joined: bool) -> tuple[str, int, int]:
    """(entry of the observation, first, last number) of the encoded numbers that actions are relative to."""
    first, size = 0, action.encoded_width
    for name, field in arrays.items():
        if field.encoded_width == size:
            return ("obs", first, first + size) if joined else (name, 0, size)
        first += field.encoded_width
    raise ConfigError(
        f"task.relative_actions=true needs an observed array like the action, which has {size} numbers; observed are "
        f"{', '.join(f'{name} ({field.encoded_width})' for name, field in arrays.items())}"
    )
