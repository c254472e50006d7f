"""PushT demonstrations as low-dimensional observations."""

import os

import torch
from einops import rearrange

from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.dataset.base_dataset import BaseLowdimDataset, WindowedDataset, check_normalization, check_steps
from diffusion_policy.dataset.pusht_source import find_pusht
from diffusion_policy.env.pusht.symmetry import block_keypoints, mirror_positions, mirror_states

STATE_DIM = 5  # agent x y, block x y, block angle
ACTION_DIM = 2  # target x y of the agent
KEYPOINTS = 9


class PushTLowdimDataset(WindowedDataset, BaseLowdimDataset):
    """obs (T, 20): xy of nine keypoints of the block, then the agent's position; action (T, 2).

    Args:
        zarr_path: the demonstrations, or 'auto', see `find_pusht`.
        normalization: 'upstream' scales every number by itself; 'min_max', as MIP, has one scale for the x of all
            keypoints, one for their y, and two for the agent.
        augment: 'mirror' adds the mirror image of every training episode, see `symmetry`.
    """

    symmetries = ("mirror",)

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
        normalization: str = "upstream",
        augment: str | None = None,
    ):
        self.obs_key, self.state_key, self.action_key = obs_key, state_key, action_key
        self.normalization = check_normalization(normalization)
        self.source, self.source_warning = find_pusht(zarr_path)
        replay_buffer = ReplayBuffer.copy_from_path(self.source, keys=[obs_key, state_key, action_key])
        super().__init__(replay_buffer, horizon, pad_before, pad_after, seed, val_ratio, max_train_episodes, augment)

    def _make_steps(self, replay_buffer: ReplayBuffer) -> dict[str, torch.Tensor]:
        check_steps(
            replay_buffer,
            {self.obs_key: (KEYPOINTS, 2), self.state_key: (STATE_DIM,), self.action_key: (ACTION_DIM,)},
        )
        keypoints, state, action = (
            torch.from_numpy(replay_buffer[key]).float() for key in (self.obs_key, self.state_key, self.action_key)
        )
        obs = torch.cat([rearrange(keypoints, "n k xy -> n (k xy)"), state[:, :2]], dim=1)
        return {"obs": obs, "action": action}

    def _mirror_steps(self, steps: dict[str, torch.Tensor], replay_buffer: ReplayBuffer) -> dict[str, torch.Tensor]:
        state = mirror_states(torch.from_numpy(replay_buffer[self.state_key]).float())
        obs = torch.cat([block_keypoints(state).flatten(1), state[:, :2]], dim=1)
        return {"obs": obs, "action": mirror_positions(steps["action"])}

    def _fitted_fields(self) -> dict[str, torch.Tensor]:
        if self.normalization == "upstream":
            return self.steps
        keypoints, agent = self.steps["obs"].split([2 * KEYPOINTS, 2], dim=1)
        every = rearrange(keypoints, "n (k xy) -> (n k) xy", xy=2)  # each keypoint gets the range of all
        obs = torch.cat([every.repeat(1, KEYPOINTS), agent.repeat_interleave(KEYPOINTS, dim=0)], dim=1)
        return {"obs": obs, "action": self.steps["action"]}


class PushTStateDataset(WindowedDataset, BaseLowdimDataset):
    """obs (T, 5): the simulator's state, agent x y, block x y and angle; action (T, 2).

    Args:
        zarr_path: the demonstrations, or 'auto', see `find_pusht`.
        normalization: see `LinearNormalizer.fit`.
        augment: 'mirror' adds the mirror image of every training episode, see `symmetry`.
    """

    symmetries = ("mirror",)

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
        normalization: str = "upstream",
        augment: str | None = None,
    ):
        self.state_key, self.action_key = state_key, action_key
        self.normalization = check_normalization(normalization)
        self.source, self.source_warning = find_pusht(zarr_path)
        replay_buffer = ReplayBuffer.copy_from_path(self.source, keys=[state_key, action_key])
        super().__init__(replay_buffer, horizon, pad_before, pad_after, seed, val_ratio, max_train_episodes, augment)

    def _make_steps(self, replay_buffer: ReplayBuffer) -> dict[str, torch.Tensor]:
        check_steps(replay_buffer, {self.state_key: (STATE_DIM,), self.action_key: (ACTION_DIM,)})
        state, action = (torch.from_numpy(replay_buffer[key]).float() for key in (self.state_key, self.action_key))
        return {"obs": state, "action": action}

    def _mirror_steps(self, steps: dict[str, torch.Tensor], replay_buffer: ReplayBuffer) -> dict[str, torch.Tensor]:
        return {"obs": mirror_states(steps["obs"]), "action": mirror_positions(steps["action"])}
