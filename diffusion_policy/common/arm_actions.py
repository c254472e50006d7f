"""Actions of robot arms: for each arm position 3, rotation, gripper 1; the rotation as axis times angle (3) or in a form to learn."""

import numpy as np

from diffusion_policy.model.common.rotation_transformer import RotationTransformer

ARM_DIM = 7  # with the rotation as axis times angle


def encode_rotations(actions: np.ndarray, transformer: RotationTransformer) -> np.ndarray:
    """(..., 7 an arm) -> (..., 4 + width of the transformer's rotations an arm): rotation_6d gives 10"""
    arms = actions.reshape(*actions.shape[:-1], -1, ARM_DIM)
    rotation = transformer.forward(arms[..., 3:6]).reshape(*arms.shape[:-1], -1)
    return np.concatenate([arms[..., :3], rotation, arms[..., 6:]], axis=-1).reshape(*actions.shape[:-1], -1)


def decode_rotations(actions: np.ndarray, transformer: RotationTransformer, n_arms: int) -> np.ndarray:
    """(..., Da) -> (..., 7 an arm), the inverse of `encode_rotations`"""
    arms = actions.reshape(*actions.shape[:-1], n_arms, -1)
    rotation = transformer.inverse(arms[..., 3:-1])
    return np.concatenate([arms[..., :3], rotation, arms[..., -1:]], axis=-1).reshape(*actions.shape[:-1], -1)
