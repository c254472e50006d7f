"""PushT demonstrations as low-dimensional observations."""

import os

import torch
from einops import rearrange

from diffusion_policy.common.errors import DataNotFoundError
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.dataset.base_dataset import BaseLowdimDataset, WindowedDataset, check_steps

DATA_URL = "https://diffusion-policy.cs.columbia.edu/data/training/pusht.zip"
STATE_DIM = 5  # agent x y, block x y, block angle
ACTION_DIM = 2  # target x y of the agent


def require_pusht(zarr_path: str | os.PathLike) -> str:
    """Return the path; if it does not exist, raise an error that tells how to get the data."""
    path = os.path.expanduser(zarr_path)
    if not os.path.exists(path):
        raise DataNotFoundError(
            f"There is no PushT dataset at {path} (from {os.getcwd()}). Get the public one, {DATA_URL}, with: "
            f"python -m diffusion_policy.scripts.download pusht"
        )
    return path


class PushTLowdimDataset(WindowedDataset, BaseLowdimDataset):
    """obs (T, 20): xy of nine keypoints of the block, then the agent's position; action (T, 2)."""

    def __init__(
        self,
        zarr_path: str | os.PathLike,
        horizon: int = 1,
        pad_before: int = 0,
        pad_after: int = 0,
        obs_key: str = "keypoint",
        state_key: str = "state",
        action_key: str = "action",
        seed: int = 42,
        val_ratio: float = 0.0,
        max_train_episodes: int | None = None,
    ):
        self.obs_key, self.state_key, self.action_key = obs_key, state_key, action_key
        replay_buffer = ReplayBuffer.copy_from_path(require_pusht(zarr_path), keys=[obs_key, state_key, action_key])
        super().__init__(replay_buffer, horizon, pad_before, pad_after, seed, val_ratio, max_train_episodes)

    def _make_steps(self, replay_buffer: ReplayBuffer) -> dict[str, torch.Tensor]:
        check_steps(replay_buffer, {self.obs_key: (9, 2), self.state_key: (STATE_DIM,), self.action_key: (ACTION_DIM,)})
        keypoints, state, action = (
            torch.from_numpy(replay_buffer[key]).float() for key in (self.obs_key, self.state_key, self.action_key)
        )
        obs = torch.cat([rearrange(keypoints, "n k xy -> n (k xy)"), state[:, :2]], dim=1)
        return {"obs": obs, "action": action}


class PushTStateDataset(WindowedDataset, BaseLowdimDataset):
    """obs (T, 5): the simulator's state, agent x y, block x y and angle; action (T, 2)."""

    def __init__(
        self,
        zarr_path: str | os.PathLike,
        horizon: int = 1,
        pad_before: int = 0,
        pad_after: int = 0,
        state_key: str = "state",
        action_key: str = "action",
        seed: int = 42,
        val_ratio: float = 0.0,
        max_train_episodes: int | None = None,
    ):
        self.state_key, self.action_key = state_key, action_key
        replay_buffer = ReplayBuffer.copy_from_path(require_pusht(zarr_path), keys=[state_key, action_key])
        super().__init__(replay_buffer, horizon, pad_before, pad_after, seed, val_ratio, max_train_episodes)

    def _make_steps(self, replay_buffer: ReplayBuffer) -> dict[str, torch.Tensor]:
        check_steps(replay_buffer, {self.state_key: (STATE_DIM,), self.action_key: (ACTION_DIM,)})
        state, action = (torch.from_numpy(replay_buffer[key]).float() for key in (self.state_key, self.action_key))
        return {"obs": state, "action": action}
