"""Demonstrations observed through point clouds, in DP3's layout."""

import os
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from diffusion_policy.common.errors import ConfigError, DataError, DataNotFoundError
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.dataset.base_dataset import BaseImageDataset, WindowedDataset, check_steps

#: Names that an observation key may have in a file, if it is not the key itself.
STORED_AS = {"agent_pos": ("state", "agent_pos"), "imagin_robot": ("imagin_robot", "imagined_robot")}


class PointCloudDataset(WindowedDataset, BaseImageDataset):
    """obs {key: (T, *shape)} for the keys of shape_meta: clouds (T, P, 3) and low-dim values (T, D); action (T, Da).

    A file may hold more points than shape_meta, and more numbers per point: the first ones are used. `generate_demos`
    writes points in the order of farthest-point sampling, so the first ones are such a sample, too.

    Args:
        zarr_path: a replay buffer with point_cloud, state and action; imagin_robot if shape_meta has it.
        n_obs_steps: observe only the first steps of a window; the policy uses no others.
        action_limit: clip actions to [-limit, limit]. MetaWorld's experts exceed what the simulator executes by up to a
            factor of twenty.
        how: how to get the demonstrations, for the error message if they are missing.
    """

    def __init__(
        self,
        zarr_path: str | os.PathLike,
        shape_meta: Mapping,
        horizon: int = 1,
        pad_before: int = 0,
        pad_after: int = 0,
        n_obs_steps: int | None = None,
        action_limit: float | None = None,
        seed: int = 42,
        val_ratio: float = 0.0,
        max_train_episodes: int | None = None,
        how: str | None = None,
    ):
        path = os.path.expanduser(zarr_path)
        if not os.path.exists(path):
            raise DataNotFoundError(
                f"There are no demonstrations at {path} (from {os.getcwd()})." + (f" {how}" if how else "")
            )
        if action_limit is not None and not action_limit > 0:
            raise ConfigError(f"action_limit must be a positive number, or null for none, not {action_limit}")
        self.n_obs_steps, self.action_limit, self.source = n_obs_steps, action_limit, path
        self.shapes = {key: tuple(entry["shape"]) for key, entry in shape_meta["obs"].items()}
        self.action_shape = tuple(shape_meta["action"]["shape"])
        stored = ReplayBuffer.create_from_path(path).keys()
        self.arrays = {key: self._find(key, stored, path) for key in self.shapes}
        buffer = ReplayBuffer.copy_from_path(path, keys=[*dict.fromkeys(self.arrays.values()), "action"])
        super().__init__(buffer, horizon, pad_before, pad_after, seed, val_ratio, max_train_episodes)

    @staticmethod
    def _find(key: str, stored: Collection[str], path: str) -> str:
        """Name of the array of `key` in the file."""
        names = STORED_AS.get(key, (key,))
        for name in names:
            if name in stored:
                return name
        raise DataError(
            f"{path} has no array {' or '.join(map(repr, names))}, needed for {key!r}; it has: {', '.join(stored)}."
        )

    def _make_steps(self, replay_buffer: ReplayBuffer) -> dict[str, torch.Tensor]:
        steps = {}
        for key, shape in self.shapes.items():
            name = self.arrays[key]
            have = replay_buffer[name].shape[1:]
            larger = len(have) == len(shape) and all(h >= s for h, s in zip(have, shape, strict=True))
            if not (larger if len(shape) > 1 else have == shape):  # only points may be left out
                raise DataError(
                    f"{name!r} has shape {have} per step, but shape_meta asks for {shape}: change shape_meta "
                    "(task.num_points, task.state_dim) or use other demonstrations."
                )
            check_steps(replay_buffer, {name: have})
            first = tuple(slice(size) for size in shape)
            steps[key] = torch.from_numpy(np.ascontiguousarray(replay_buffer[name][(slice(None), *first)])).float()
        check_steps(replay_buffer, {"action": self.action_shape})
        action = torch.from_numpy(replay_buffer["action"]).float()
        steps["action"] = action if self.action_limit is None else action.clamp(-self.action_limit, self.action_limit)
        return steps

    def get_batch(self, indices: Sequence[int] | torch.Tensor) -> dict:
        """obs {key: (B, To, *shape)}; action (B, T, Da)."""
        rows = self.index_table[torch.as_tensor(indices, dtype=torch.long)]  # (B, T)
        seen = rows[:, : self.n_obs_steps]
        return {"obs": {key: self.steps[key][seen] for key in self.shapes}, "action": self.steps["action"][rows]}
