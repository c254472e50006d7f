"""Demonstrations of robomimic's tasks as low-dimensional observations."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from diffusion_policy.common.arm_actions import ARM_DIM, encode_rotations
from diffusion_policy.common.errors import ConfigError, DataError
from diffusion_policy.common.normalize_util import (
    array_to_stats,
    get_identity_normalizer_from_stat,
    get_max_abs_normalizer_from_stat,
    robomimic_abs_action_only_dual_arm_normalizer_from_stat,
    robomimic_abs_action_only_normalizer_from_stat,
)
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.dataset.base_dataset import BaseLowdimDataset, WindowedDataset, check_normalization, check_steps
from diffusion_policy.model.common.normalizer import LinearNormalizer, SingleFieldLinearNormalizer
from diffusion_policy.model.common.rotation_transformer import RotationTransformer
from diffusion_policy.storage.hdf5_reader import Demos, read_demos


class RobomimicReplayLowdimDataset(WindowedDataset, BaseLowdimDataset):
    """obs (T, Do): the arrays `obs_keys`, concatenated; action (T, Da).

    Args:
        abs_action: actions are absolute poses, of one arm (7) or two (14); their rotation is converted to
            `rotation_rep` (with rotation_6d: 10 or 20 numbers).
        normalization: 'upstream' divides obs by its largest magnitude and does not scale rotations, grippers and
            relative actions; 'min_max', as in MIP, maps every dimension of obs and action to [-1, 1], a
            constant one to -1.
        use_legacy_normalizer: divide absolute actions by their largest magnitude, too.
    """

    def __init__(
        self,
        dataset_path: str | os.PathLike,
        horizon: int = 1,
        pad_before: int = 0,
        pad_after: int = 0,
        obs_keys: Sequence[str] = ("object", "robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos"),
        abs_action: bool = False,
        rotation_rep: str = "rotation_6d",
        use_legacy_normalizer: bool = False,
        seed: int = 42,
        val_ratio: float = 0.0,
        max_train_episodes: int | None = None,
        normalization: str = "upstream",
    ):
        self.obs_keys, self.abs_action = list(obs_keys), abs_action
        self.normalization = check_normalization(normalization)
        self.source = dataset_path
        self.use_legacy_normalizer = use_legacy_normalizer
        if not self.obs_keys or not all(isinstance(key, str) for key in self.obs_keys):
            raise ConfigError(f"obs_keys must be the names of at least one array, not {self.obs_keys}.")
        self.rotation_transformer = RotationTransformer("axis_angle", rotation_rep) if abs_action else None
        demos = read_demos(dataset_path, ["actions", *(f"obs/{key}" for key in self.obs_keys)])
        check_vectors(demos, dataset_path)
        obs = np.concatenate([demos.arrays[f"obs/{key}"] for key in self.obs_keys], axis=1)
        actions = convert_actions(demos.arrays["actions"], self.rotation_transformer, dataset_path)
        buffer = ReplayBuffer(
            {
                "data": {"obs": obs.astype(np.float32), "action": actions.astype(np.float32)},
                "meta": {"episode_ends": demos.episode_ends},
            }
        )
        super().__init__(buffer, horizon, pad_before, pad_after, seed, val_ratio, max_train_episodes)

    def _make_steps(self, replay_buffer: ReplayBuffer) -> dict[str, torch.Tensor]:
        # The reader checked the file's numbers, but a float64 can be too large for a float32.
        check_steps(replay_buffer, {key: replay_buffer[key].shape[1:] for key in replay_buffer.keys()})
        return {key: torch.from_numpy(replay_buffer[key]) for key in ("obs", "action")}

    def get_normalizer(self, mode: str | None = None, **kwargs: Any) -> LinearNormalizer:
        """Fit as `normalization` selects; mode and keyword arguments apply to 'min_max' only."""
        if self.normalization == "min_max":
            return super().get_normalizer(mode, **kwargs)
        normalizer = LinearNormalizer()
        normalizer["action"] = action_normalizer(
            self.replay_buffer["action"], self.abs_action, self.use_legacy_normalizer
        )
        normalizer["obs"] = get_max_abs_normalizer_from_stat(array_to_stats(self.replay_buffer["obs"]))
        return normalizer


def check_vectors(demos: Demos, path: str | os.PathLike) -> None:
    """Raise DataError unless every array holds one vector per step."""
    for key, values in demos.arrays.items():
        if values.ndim != 2:
            raise DataError(f"{path}: {key} has shape {values.shape[1:]} per step, but must have one dimension.")


def convert_actions(
    actions: np.ndarray, rotation_transformer: RotationTransformer | None, path: str | os.PathLike
) -> np.ndarray:
    """Convert the rotations of absolute actions (steps, 7 or 14) -> (steps, Da), if a transformer is given."""
    if rotation_transformer is None:
        return actions
    if actions.shape[1] not in (ARM_DIM, 2 * ARM_DIM):
        raise DataError(
            f"{path}: absolute actions have {ARM_DIM} numbers per arm, these have {actions.shape[1]}. "
            f"(abs_action is for the files named *_abs.hdf5.)"
        )
    return encode_rotations(actions, rotation_transformer)


def action_normalizer(
    actions: np.ndarray, abs_action: bool, use_legacy_normalizer: bool
) -> SingleFieldLinearNormalizer:
    """Upstream's normaliser of actions (steps, Da)."""
    stat = array_to_stats(actions)
    if not abs_action:
        return get_identity_normalizer_from_stat(stat)
    if use_legacy_normalizer:
        return get_max_abs_normalizer_from_stat(stat)
    if actions.shape[1] > 2 * ARM_DIM:
        return robomimic_abs_action_only_dual_arm_normalizer_from_stat(stat)
    return robomimic_abs_action_only_normalizer_from_stat(stat)
