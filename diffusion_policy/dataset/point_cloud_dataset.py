"""Demonstrations observed through point clouds, in DP3's layout."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import torch

from diffusion_policy.common.errors import ConfigError, DataError, DataNotFoundError
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.dataset.base_dataset import BaseImageDataset, WindowedDataset, check_steps

#: Arrays of a file that an entry of the observation may come from; its own name where none is listed.
STORED_AS = {"agent_pos": ("state", "agent_pos"), "imagin_robot": ("imagin_robot", "imagined_robot")}


class PointCloudDataset(WindowedDataset, BaseImageDataset):
    """obs: {key: (T, *shape)} for the keys of shape_meta, clouds (T, P, 3) and numbers (T, D); action (T, Da).

    A file may hold more points than shape_meta asks for, and more numbers a point: the first are taken. Points in the order of
    farthest-point sampling, as `generate_demos` writes them, are then such a sample themselves.

    Args:
        zarr_path: a replay buffer with point_cloud, state and action; imagin_robot if shape_meta has it.
        n_obs_steps: observe only the first steps of a window, all that a policy looks at.
        action_limit: clip actions to [-limit, limit]. MetaWorld's experts ask for up to twenty times what the simulator then does.
        how: what to type to get the demonstrations, for the error if they are not there.
    """

    def __init__(
        self,
        zarr_path,
        shape_meta: Mapping,
        horizon=1,
        pad_before=0,
        pad_after=0,
        n_obs_steps=None,
        action_limit=None,
        seed=42,
        val_ratio=0.0,
        max_train_episodes=None,
        how=None,
    ):
        path = os.path.expanduser(zarr_path)
        if not os.path.exists(path):
            raise DataNotFoundError(
                f"There are no demonstrations at {path} (from {os.getcwd()})." + (f" {how}" if how else "")
            )
        if action_limit is not None and not action_limit > 0:
            raise ConfigError(f"action_limit must be a positive number, or null for none, not {action_limit}")
        self.n_obs_steps, self.action_limit = n_obs_steps, action_limit
        self.shapes = {key: tuple(entry["shape"]) for key, entry in shape_meta["obs"].items()}
        self.action_shape = tuple(shape_meta["action"]["shape"])
        stored = ReplayBuffer.create_from_path(path).keys()
        self.arrays = {key: self._find(key, stored, path) for key in self.shapes}
        buffer = ReplayBuffer.copy_from_path(path, keys=[*dict.fromkeys(self.arrays.values()), "action"])
        super().__init__(buffer, horizon, pad_before, pad_after, seed, val_ratio, max_train_episodes)

    @staticmethod
    def _find(key, stored, path) -> str:
        names = STORED_AS.get(key, (key,))
        for name in names:
            if name in stored:
                return name
        raise DataError(
            f"{path} has no array {' or '.join(map(repr, names))}, needed for {key!r}; it has: {', '.join(stored)}."
        )

    def _make_steps(self, replay_buffer):
        steps = {}
        for key, shape in self.shapes.items():
            name = self.arrays[key]
            have = replay_buffer[name].shape[1:]
            if (
                len(have) != len(shape)
                or (len(shape) == 1 and have != shape)
                or any(h < s for h, s in zip(have, shape))
            ):
                raise DataError(
                    f"{name!r} holds {'points' if len(shape) == 2 else 'steps'} of shape {have} a step, {shape} are asked for: change shape_meta "
                    "(task.num_points, task.state_dim) or take other demonstrations."
                )
            check_steps(replay_buffer, {name: have})
            first = tuple(slice(size) for size in shape)
            steps[key] = torch.from_numpy(np.ascontiguousarray(replay_buffer[name][(slice(None), *first)])).float()
        check_steps(replay_buffer, {"action": self.action_shape})
        action = torch.from_numpy(replay_buffer["action"]).float()
        steps["action"] = action if self.action_limit is None else action.clamp(-self.action_limit, self.action_limit)
        return steps

    def get_batch(self, indices) -> dict:
        """indices: (B,) integers -> obs {key: (B, To, *shape)}; action (B, T, Da)."""
        rows = self.index_table[torch.as_tensor(indices, dtype=torch.long)]  # (B, T)
        seen = rows[:, : self.n_obs_steps]
        return {"obs": {key: self.steps[key][seen] for key in self.shapes}, "action": self.steps["action"][rows]}
