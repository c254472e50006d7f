"""Demonstrations of block pushing."""

import os
from typing import Any

import numpy as np
import torch

from diffusion_policy.common.errors import DataNotFoundError
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.dataset.base_dataset import BaseLowdimDataset, WindowedDataset, check_steps
from diffusion_policy.model.common.normalizer import LinearNormalizer, SingleFieldLinearNormalizer

OBS_DIM, ACTION_DIM = 16, 2
DATA_URL = "https://diffusion-policy.cs.columbia.edu/data/training/block_pushing.zip"
#: Columns of obs: two blocks (x, y, angle), effector (x, y), its target (x, y), two squares (x, y, angle).
X, Y = [0, 3, 6, 8, 10, 13], [1, 4, 7, 9, 11, 14]
EEF_TARGET = slice(8, 10)


class BlockPushLowdimDataset(WindowedDataset, BaseLowdimDataset):
    """obs (T, 16): poses of two blocks, of the end effector, of its target, and of two squares; action (T, 2).

    Args:
        obs_eef_target: false sets the target of the end effector to zero.
        use_manual_normalizer: one scale for all x, one for all y and one for all angles, instead of one per column.
    """

    def __init__(
        self,
        zarr_path: str | os.PathLike,
        horizon: int = 1,
        pad_before: int = 0,
        pad_after: int = 0,
        obs_key: str = "obs",
        action_key: str = "action",
        obs_eef_target: bool = True,
        use_manual_normalizer: bool = False,
        seed: int = 42,
        val_ratio: float = 0.0,
        max_train_episodes: int | None = None,
    ):
        path = os.path.expanduser(zarr_path)
        if not os.path.exists(path):
            raise DataNotFoundError(
                f"There is no dataset at {path} (from {os.getcwd()}). Unpack {DATA_URL} into data/."
            )
        self.obs_key, self.action_key = obs_key, action_key
        self.obs_eef_target, self.use_manual_normalizer = obs_eef_target, use_manual_normalizer
        replay_buffer = ReplayBuffer.copy_from_path(path, keys=[obs_key, action_key])
        super().__init__(replay_buffer, horizon, pad_before, pad_after, seed, val_ratio, max_train_episodes)

    def _make_steps(self, replay_buffer: ReplayBuffer) -> dict[str, torch.Tensor]:
        check_steps(replay_buffer, {self.obs_key: (OBS_DIM,), self.action_key: (ACTION_DIM,)})
        obs, action = (torch.from_numpy(replay_buffer[key]).float() for key in (self.obs_key, self.action_key))
        if not self.obs_eef_target:
            obs = obs.clone()
            obs[:, EEF_TARGET] = 0
        return {"obs": obs, "action": action}

    def get_normalizer(self, mode: str | None = None, **kwargs: Any) -> LinearNormalizer:
        normalizer = super().get_normalizer(mode, **kwargs)
        if self.use_manual_normalizer:
            normalizer["obs"] = grouped_normalizer(self.steps["obs"].numpy())
        return normalizer


def grouped_normalizer(obs: np.ndarray) -> SingleFieldLinearNormalizer:
    """Map the range of all x, of all y and of all angles to [-1, 1] each."""
    stats = {"max": obs.max(0), "min": obs.min(0), "mean": obs.mean(0), "std": obs.std(0)}
    scale, offset = np.ones_like(stats["max"]), np.zeros_like(stats["max"])
    angles = [column for column in range(OBS_DIM) if column not in (*X, *Y)]
    for columns in (X, Y, angles):
        low, high = stats["min"][columns].min(), stats["max"][columns].max()
        scale[columns] = 2 / (high - low)
        offset[columns] = -1 - scale[columns] * low
    return SingleFieldLinearNormalizer.create_manual(scale=scale, offset=offset, input_stats_dict=stats)
