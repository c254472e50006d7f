"""Features that a network learns from more easily than from a raw state vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diffusion_policy.common.errors import ConfigError


class StateFeatures(nn.Module):
    """Appends sine and cosine of angles, and points of a planar body, to a normalised state (..., obs_dim).

    An angle jumps by 2 pi at the end of its range; its sine and cosine do not. Points show where the body's edges are.

    Args:
        obs_dim: size of the state.
        angles: entries of the state that are angles in radians.
        pose: entries x, y and angle of the body's pose, if there is a body.
        points: (K, 2) in the frame of the body.
    """

    points: Tensor
    scale: Tensor
    offset: Tensor

    def __init__(
        self,
        obs_dim: int,
        angles: Sequence[int] = (),
        pose: Sequence[int] | None = None,
        points: Sequence[Sequence[float]] = (),
    ):
        super().__init__()
        self.angles, self.pose = list(angles), list(pose or ())
        if bad := [i for i in (*self.angles, *self.pose) if not 0 <= i < obs_dim]:
            raise ConfigError(f"state features: the state has entries 0 to {obs_dim - 1}, not {bad[0]}")
        if points and len(self.pose) != 3:
            raise ConfigError("state features: points of a body need its pose, the entries x, y and angle")
        self.register_buffer("points", torch.tensor(points, dtype=torch.float32).reshape(-1, 2), persistent=False)
        # The normaliser's: the network is given normalised states, and an angle has a sine in radians only.
        self.register_buffer("scale", torch.ones(obs_dim))
        self.register_buffer("offset", torch.zeros(obs_dim))
        self.output_dim = obs_dim + 2 * len(self.angles) + self.points.numel()

    def set_normalizer(self, field: Any) -> None:
        """Take scale and offset of the observation's normaliser."""
        self.scale.copy_(field.params_dict["scale"].detach())
        self.offset.copy_(field.params_dict["offset"].detach())

    def forward(self, x: Tensor) -> Tensor:
        """x: normalised (..., obs_dim) -> (..., output_dim)."""
        state = (x - self.offset) / self.scale
        angles = state[..., self.angles]
        features = [x, angles.sin(), angles.cos()]
        if len(self.points):
            px, py, angle = (state[..., i, None] for i in self.pose)
            cos, sin, (u, v) = angle.cos(), angle.sin(), self.points.T
            world = torch.stack([px + cos * u - sin * v, py + sin * u + cos * v], dim=-1)  # (..., K, 2)
            position = self.pose[:2]
            features.append((world * self.scale[position] + self.offset[position]).flatten(-2))
        return torch.cat(features, dim=-1)


class PushTFeatures(StateFeatures):
    """Of PushT's state: sine and cosine of the block's angle, and nine points of the block."""

    def __init__(self, obs_dim: int = 5):
        from diffusion_policy.env.pusht.keypoints import BLOCK_KEYPOINTS

        super().__init__(obs_dim, angles=[4], pose=[2, 3, 4], points=BLOCK_KEYPOINTS.tolist())
