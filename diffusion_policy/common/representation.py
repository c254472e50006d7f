"""Representation of a recording's numbers for a network: rotations as rotation_6d, actions relative to the state.

Datasets and the outside of a policy keep the units of the recording. Both sides use one `Representation`: the dataset
to fit its normaliser, the policy to convert what it sees and what it returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.model.common.rotation_transformer import RotationTransformer

#: Representations of a recording: their size, the transformer's name, its convention, and the order of its numbers.
SOURCES: dict[str, tuple[int, str, str | None, list[int]]] = {
    "quaternion": (4, "quaternion", None, [3, 0, 1, 2]),  # x, y, z, w, as in ROS, scipy and robosuite
    "quaternion_wxyz": (4, "quaternion", None, [0, 1, 2, 3]),  # as in MuJoCo
    "axis_angle": (3, "axis_angle", None, [0, 1, 2]),
    "euler": (3, "euler_angles", "ZYX", [2, 1, 0]),  # roll, pitch, yaw about fixed axes, as in ROS
}
WIDTH = 6  # of rotation_6d


@dataclasses.dataclass(frozen=True)
class Rotation:
    """A rotation among the numbers of a step: `source` is a key of SOURCES, `start` its first number."""

    start: int
    source: str

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ConfigError(f"task.rotations: from={self.source!r} is not one of {', '.join(SOURCES)}")

    @property
    def stop(self) -> int:
        return self.start + SOURCES[self.source][0]

    def encode(self, x: Tensor) -> Tensor:
        return self._transformer().forward(x[..., SOURCES[self.source][3]])

    def decode(self, x: Tensor) -> Tensor:
        order = SOURCES[self.source][3]
        return self._transformer().inverse(x)[..., [order.index(i) for i in range(len(order))]]

    def _transformer(self) -> RotationTransformer:
        _, name, convention, _ = SOURCES[self.source]
        return RotationTransformer(name, "rotation_6d", from_convention=convention)


@dataclasses.dataclass(frozen=True)
class Field:
    """A vector of `width` recorded numbers with rotations in it, sorted by where they start."""

    width: int
    rotations: tuple[Rotation, ...] = ()

    @property
    def encoded_width(self) -> int:
        return self.width + sum(WIDTH - (rotation.stop - rotation.start) for rotation in self.rotations)

    def encode(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., encoded_width)."""
        parts, end = [], 0
        for rotation in self.rotations:
            parts += [x[..., end : rotation.start], rotation.encode(x[..., rotation.start : rotation.stop])]
            end = rotation.stop
        return torch.cat([*parts, x[..., end:]], dim=-1) if parts else x

    def decode(self, x: Tensor) -> Tensor:
        """The inverse of `encode`; a quaternion has a positive real part."""
        parts, end, behind = [], 0, 0  # of the recorded numbers, and of the encoded ones
        for rotation in self.rotations:
            start = behind + rotation.start - end
            parts += [x[..., behind:start], rotation.decode(x[..., start : start + WIDTH])]
            end, behind = rotation.stop, start + WIDTH
        return torch.cat([*parts, x[..., behind:]], dim=-1) if parts else x


@dataclasses.dataclass(frozen=True)
class Representation:
    """The fields of an observation ('obs' for a vector), the action, and what actions are relative to.

    relative: (field, first, last number) of the encoded observation whose last observed step is subtracted from the
    encoded actions; None for absolute actions.
    """

    obs: Mapping[str, Field]
    action: Field
    relative: tuple[str, int, int] | None = None

    @classmethod
    def from_config(cls, section: Mapping[str, Any]) -> Representation:
        """Read what `to_config` wrote."""

        def field(values: Mapping[str, Any]) -> Field:
            return Field(int(values["width"]), tuple(Rotation(int(s), str(f)) for s, f in values["rotations"]))

        try:
            relative = section["relative"]
            return cls(
                {str(key): field(values) for key, values in section["obs"].items()},
                field(section["action"]),
                None if relative is None else (str(relative[0]), int(relative[1]), int(relative[2])),
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise ConfigError(f"task.representation cannot be read: {type(error).__name__}: {error}") from error

    def to_config(self) -> dict[str, Any]:
        """Plain data for a config."""

        def plain(field: Field) -> dict[str, Any]:
            return {"width": field.width, "rotations": [[r.start, r.source] for r in field.rotations]}

        return {
            "obs": {key: plain(field) for key, field in self.obs.items()},
            "action": plain(self.action),
            "relative": None if self.relative is None else list(self.relative),
        }

    def encode_obs(self, obs: Mapping[str, Any]) -> dict[str, Any]:
        """{key: (..., width)} -> {key: (..., encoded width)}; other entries, such as images, stay as they are."""
        return {key: self.obs[key].encode(value) if key in self.obs else value for key, value in obs.items()}

    def reference(self, encoded: Mapping[str, Tensor], step: int) -> Tensor | float:
        """What is subtracted from actions: (B, 1, D) of the encoded observations' `step`; 0 for absolute actions."""
        if self.relative is None:
            return 0.0
        key, first, last = self.relative
        return encoded[key][:, step : step + 1, first:last]

    def encode_action(self, action: Tensor, reference: Tensor | float) -> Tensor:
        return self.action.encode(action) - reference

    def decode_action(self, action: Tensor, reference: Tensor | float) -> Tensor:
        return self.action.decode(action + reference)
