"""The mirror symmetry of PushT.

Goal, T and walls are their own mirror images about the line x + y = 512. A mirrored sequence of actions from a mirrored
start gives the mirrored episode, with the same rewards.
"""

import math

import torch
from torch import Tensor

from diffusion_policy.env.pusht.keypoints import BLOCK_KEYPOINTS
from diffusion_policy.env.pusht.pusht_env import WINDOW


def mirror_positions(xy: Tensor) -> Tensor:
    """(x, y) -> (512 - y, 512 - x), for positions and actions (..., 2)."""
    return WINDOW - xy.flip(-1)


def mirror_states(state: Tensor) -> Tensor:
    """States (..., 5): agent x y, block x y, angle -> pi / 2 - angle, in [0, 2 pi)."""
    angle = (math.pi / 2 - state[..., 4:]) % (2 * math.pi)
    return torch.cat([mirror_positions(state[..., :2]), mirror_positions(state[..., 2:4]), angle], dim=-1)


def mirror_images(images: Tensor) -> Tensor:
    """Images (..., H, W) with H = W: the pixel at (x, y) moves to (W - 1 - y, W - 1 - x)."""
    return images.flip(-1, -2).mT


def block_keypoints(state: Tensor) -> Tensor:
    """Keypoints of the block (..., 9, 2) in a state (..., 5)."""
    x, y, angle = (state[..., i, None] for i in (2, 3, 4))
    u, v = torch.as_tensor(BLOCK_KEYPOINTS, dtype=state.dtype).T
    return torch.stack([x + angle.cos() * u - angle.sin() * v, y + angle.sin() * u + angle.cos() * v], dim=-1)
