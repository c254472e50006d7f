"""Actions of robot arms: per arm a position (3), a rotation, and the gripper (1).

The rotation is an axis-angle vector (3) in datasets, and another representation for learning.
"""

from __future__ import annotations

import numpy as np

from diffusion_policy.model.common.rotation_transformer import RotationTransformer

ARM_DIM = 7  # with an axis-angle rotation


def encode_rotations(actions: np.ndarray, transformer: RotationTransformer) -> np.ndarray:
    """(..., arms * 7) -> (..., arms * (4 + width of the transformer's rotations)); rotation_6d gives 10 per arm."""
    arms = actions.reshape(*actions.shape[:-1], -1, ARM_DIM)
    rotation = transformer.forward(arms[..., 3:6]).reshape(*arms.shape[:-1], -1)
    return np.concatenate([arms[..., :3], rotation, arms[..., 6:]], axis=-1).reshape(*actions.shape[:-1], -1)


def decode_rotations(actions: np.ndarray, transformer: RotationTransformer, n_arms: int) -> np.ndarray:
    """(..., Da) -> (..., arms * 7), the inverse of `encode_rotations`."""
    arms = actions.reshape(*actions.shape[:-1], n_arms, -1)
    rotation = transformer.inverse(arms[..., 3:-1])
    return np.concatenate([arms[..., :3], rotation, arms[..., -1:]], axis=-1).reshape(*actions.shape[:-1], -1)
