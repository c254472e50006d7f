"""Normalisers from statistics {min, max, mean, std: (D,)} instead of from the data.

Internally, a part of an action is a triple (scale (D,), offset (D,), statistics), and a normaliser concatenates parts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from diffusion_policy.model.common.normalizer import SingleFieldLinearNormalizer


def array_to_stats(arr: np.ndarray) -> dict:
    """arr: (N, ...) -> statistics over the first axis; std is numpy's (population) one."""
    return {
        "min": np.min(arr, axis=0),
        "max": np.max(arr, axis=0),
        "mean": np.mean(arr, axis=0),
        "std": np.std(arr, axis=0),
    }


def get_range_normalizer_from_stat(
    stat: dict, output_max: float = 1, output_min: float = -1, range_eps: float = 1e-7
) -> SingleFieldLinearNormalizer:
    """Map [min, max] of each dimension to [output_min, output_max]; constant dimensions to the middle, with scale 1."""
    return SingleFieldLinearNormalizer.create_manual(*_range_part(stat, output_max, output_min, range_eps))


def get_image_range_normalizer() -> SingleFieldLinearNormalizer:
    """Map [0, 1] to [-1, 1], for images of any size, with the statistics of uniformly distributed pixels."""
    stat = {"min": 0, "max": 1, "mean": 0.5, "std": np.sqrt(1 / 12)}
    return SingleFieldLinearNormalizer.create_manual(
        np.array([2], dtype=np.float32),
        np.array([-1], dtype=np.float32),
        {key: np.array([value], dtype=np.float32) for key, value in stat.items()},
    )


def get_identity_normalizer_from_stat(stat: dict) -> SingleFieldLinearNormalizer:
    """Leave every dimension unchanged."""
    return SingleFieldLinearNormalizer.create_manual(np.ones_like(stat["min"]), np.zeros_like(stat["min"]), stat)


def get_max_abs_normalizer_from_stat(stat: dict) -> SingleFieldLinearNormalizer:
    """Divide all dimensions by their largest magnitude."""
    largest = max(np.max(stat["max"]), -np.min(stat["min"]))
    scale = np.full_like(stat["max"], 1 / largest if largest > 0 else 1)
    return SingleFieldLinearNormalizer.create_manual(scale, np.zeros_like(scale), stat)


def robomimic_abs_action_normalizer_from_stat(stat: dict, rotation_transformer: Any) -> SingleFieldLinearNormalizer:
    """For absolute actions (position 3, rotation 3, gripper) whose rotation `rotation_transformer` makes 6D.

    `stat` describes the actions before that. The result is for (position 3, rotation 6, gripper) and leaves the
    rotation unchanged.
    """
    rotation = rotation_transformer.forward(stat["mean"][3:6])
    return _join(
        _range_part(_take(stat, slice(0, 3))), _identity_part(rotation), _range_part(_take(stat, slice(6, None)))
    )


def robomimic_abs_action_only_normalizer_from_stat(stat: dict) -> SingleFieldLinearNormalizer:
    """For actions (position 3, rest): the position by range, the rest unchanged."""
    return _join(*_arm_parts(stat))


def robomimic_abs_action_only_dual_arm_normalizer_from_stat(stat: dict) -> SingleFieldLinearNormalizer:
    """As robomimic_abs_action_only_normalizer_from_stat, for two arms, each one half of the action."""
    half = len(stat["max"]) // 2
    return _join(*_arm_parts(_take(stat, slice(0, half))), *_arm_parts(_take(stat, slice(half, None))))


def _take(stat: dict, dims: slice) -> dict:
    return {key: value[dims] for key, value in stat.items()}


def _range_part(stat: dict, output_max: float = 1, output_min: float = -1, range_eps: float = 1e-7) -> tuple:
    input_range = stat["max"] - stat["min"]
    flat = input_range < range_eps
    scale = np.where(flat, 1, (output_max - output_min) / np.where(flat, 1, input_range))
    offset = np.where(flat, (output_max + output_min) / 2 - stat["min"], output_min - scale * stat["min"])
    return scale.astype(input_range.dtype), offset.astype(input_range.dtype), stat


def _identity_part(like: np.ndarray) -> tuple:
    """No change: the entries of a rotation matrix lie in [-1, 1] already, which is recorded as their range."""
    one, zero = np.ones_like(like), np.zeros_like(like)
    return one, zero, {"min": -one, "max": one, "mean": zero, "std": one}


def _arm_parts(stat: dict) -> tuple:
    return _range_part(_take(stat, slice(0, 3))), _identity_part(stat["max"][3:])


def _join(*parts: tuple) -> SingleFieldLinearNormalizer:
    scales, offsets, stats = zip(*parts, strict=True)
    return SingleFieldLinearNormalizer.create_manual(
        np.concatenate(scales),
        np.concatenate(offsets),
        {key: np.concatenate([stat[key] for stat in stats]) for key in stats[0]},
    )
