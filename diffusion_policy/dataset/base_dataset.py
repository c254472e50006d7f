"""What a dataset is to a workspace, and the part that datasets over a replay buffer share."""

import copy
import math

import numpy as np
import torch
from torch.utils.data import Dataset

from diffusion_policy.common.errors import ConfigError, DataError
from diffusion_policy.common.normalize_util import get_image_range_normalizer
from diffusion_policy.common.pytorch_util import dict_apply
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.common.sampler import SequenceSampler, downsample_mask, get_val_mask
from diffusion_policy.model.common.normalizer import LinearNormalizer
from diffusion_policy.storage.frame_cache import FileFrames, MemoryFrames


class _BaseDataset(Dataset):
    """Without data of its own it is empty."""

    def get_normalizer(self, mode="limits", **kwargs) -> LinearNormalizer:
        raise NotImplementedError

    def get_all_actions(self) -> torch.Tensor:
        """(steps, Da)"""
        raise NotImplementedError

    def __len__(self) -> int:
        return 0

    def __getitem__(self, idx: int) -> dict:
        raise NotImplementedError


class BaseLowdimDataset(_BaseDataset):
    """Samples {'obs': (T, Do), 'action': (T, Da)}."""

    def get_validation_dataset(self) -> "BaseLowdimDataset":
        return BaseLowdimDataset()


class BaseImageDataset(_BaseDataset):
    """Samples {'obs': {key: (T, ...)}, 'action': (T, Da)}."""

    def get_validation_dataset(self) -> "BaseImageDataset":
        return BaseImageDataset()


class WindowedDataset(Dataset):
    """Windows over the episodes of a replay buffer, held in memory as one tensor a field; a batch is one gather a field.

    A subclass gives `steps`, {field: (steps, ...) tensor}, by `_make_steps`, and may shape a batch of them in `_to_sample`.
    """

    def __init__(
        self,
        replay_buffer: ReplayBuffer,
        horizon=1,
        pad_before=0,
        pad_after=0,
        seed=42,
        val_ratio=0.0,
        max_train_episodes=None,
    ):
        if horizon < 1 or pad_before < 0 or pad_after < 0:
            raise ConfigError(
                f"horizon must be at least 1 and the pads at least 0: "
                f"horizon={horizon}, pad_before={pad_before}, pad_after={pad_after}."
            )
        if not 0 <= val_ratio < 1:
            raise ConfigError(f"val_ratio is a share of the episodes in [0, 1), not {val_ratio}.")
        if max_train_episodes is not None and max_train_episodes < 1:
            raise ConfigError(f"max_train_episodes is at least 1, or null for all, not {max_train_episodes}.")
        self.replay_buffer = replay_buffer
        self.horizon, self.pad_before, self.pad_after = horizon, pad_before, pad_after
        self.steps = self._make_steps(replay_buffer)
        self.val_mask = get_val_mask(replay_buffer.n_episodes, val_ratio, seed)
        self.train_mask = downsample_mask(~self.val_mask, max_train_episodes, seed)
        self._set_episodes(self.train_mask)

    def _make_steps(self, replay_buffer: ReplayBuffer) -> dict:
        """{field: (steps, ...) tensor}"""
        raise NotImplementedError

    def _to_sample(self, batch: dict) -> dict:
        """batch: {field: (B, T, ...)} -> the batch as the policy wants it."""
        return batch

    def _set_episodes(self, mask: np.ndarray):
        self.sampler = SequenceSampler(
            self.replay_buffer, self.horizon, self.pad_before, self.pad_after, episode_mask=mask
        )
        self.index_table = torch.from_numpy(self.sampler.index_table)  # (N, T)
        if mask.any() and not len(self.sampler):
            longest = self.replay_buffer.episode_lengths[mask].max()
            raise DataError(
                f"No window fits: horizon is {self.horizon} (pad_before {self.pad_before}, pad_after "
                f"{self.pad_after}), but the longest of {mask.sum()} episodes has {longest} steps."
            )

    def get_validation_dataset(self):
        """The episodes held out by `val_ratio`, and only those.

        Upstream takes all episodes that are not trained on, so that lowering max_train_episodes moves the dropped ones into
        the validation set and its loss can no longer be compared between such runs.
        """
        dataset = copy.copy(self)
        dataset._set_episodes(self.val_mask)
        return dataset

    def get_normalizer(self, mode="limits", **kwargs) -> LinearNormalizer:
        """Fitted on every step of every episode, as upstream's is; keyword arguments as in `LinearNormalizer.fit`."""
        normalizer = LinearNormalizer()
        normalizer.fit(self.steps, last_n_dims=1, mode=mode, **kwargs)
        return normalizer

    def get_all_actions(self) -> torch.Tensor:
        """(steps, Da)"""
        return self.steps["action"]

    def __len__(self) -> int:
        return len(self.index_table)

    def get_batch(self, indices) -> dict:
        """indices: (B,) integers -> the samples, each field (B, T, ...)."""
        rows = self.index_table[torch.as_tensor(indices, dtype=torch.long)]  # (B, T)
        return self._to_sample({field: values[rows] for field, values in self.steps.items()})

    def __getitem__(self, idx: int) -> dict:
        return dict_apply(self.get_batch([idx]), lambda value: value[0])

    def __getitems__(self, indices) -> list[dict]:
        """What a DataLoader asks for a batch: samples that are views of one gathered batch."""
        batch = self.get_batch(indices)
        return [dict_apply(batch, lambda value: value[i]) for i in range(len(indices))]


class ImageWindowedDataset(WindowedDataset, BaseImageDataset):
    """Windows whose observation is pictures and numbers: obs {key: (T, 3, H, W) or (T, D)}, action (T, Da).

    A batch from `get_batch` holds pictures as bytes, a quarter of the floats, for the policy to convert on its device; single samples
    hold floats in [0, 1], as upstream's do. n_obs_steps: observe only the first steps of a window, all that a policy looks at.

    A subclass names the `steps` that are observed in `lowdim_keys` and the pictures of a step in `frame_shapes`, {key: (H, W, 3)}, and
    sets `frames`, which hold them side by side, and `frame_of`, (steps,), the row of `frames` that shows a step.
    """

    n_obs_steps: int | None = None
    lowdim_keys: list
    frame_shapes: dict
    frames: MemoryFrames | FileFrames
    frame_of: torch.Tensor

    def get_batch(self, indices) -> dict:
        """indices: (B,) integers -> obs: pictures (B, To, 3, H, W) uint8, numbers (B, To, D); action (B, T, Da)."""
        rows = self.index_table[torch.as_tensor(indices, dtype=torch.long)]  # (B, T)
        seen = rows[:, : self.n_obs_steps]
        parts = self.frames.take(self.frame_of[seen].flatten()).split(
            [math.prod(shape) for shape in self.frame_shapes.values()], dim=1
        )
        obs = {
            key: part.view(*seen.shape, *shape).movedim(-1, -3).contiguous()
            for (key, shape), part in zip(self.frame_shapes.items(), parts)
        }
        return {
            "obs": {**obs, **{key: self.steps[key][seen] for key in self.lowdim_keys}},
            "action": self.steps["action"][rows],
        }

    def __getitem__(self, idx: int) -> dict:
        return self.__getitems__([idx])[0]

    def __getitems__(self, indices) -> list[dict]:
        batch = self.get_batch(indices)
        for key in self.frame_shapes:
            batch["obs"][key] = batch["obs"][key].float().div_(255)
        return [dict_apply(batch, lambda value: value[i]) for i in range(len(indices))]

    def get_normalizer(self, mode="limits", **kwargs) -> LinearNormalizer:
        """Actions and numbers fitted on the data, pixels [0, 1] to [-1, 1]."""
        normalizer = LinearNormalizer()
        normalizer.fit(
            {key: self.steps[key] for key in ("action", *self.lowdim_keys)}, last_n_dims=1, mode=mode, **kwargs
        )
        for key in self.frame_shapes:
            normalizer[key] = get_image_range_normalizer()
        return normalizer


def check_steps(replay_buffer: ReplayBuffer, shapes: dict):
    """Check that the arrays named in `shapes`, {key: shape of a step}, are there, so shaped, and finite."""
    for key, shape in shapes.items():
        if key not in replay_buffer:
            raise DataError(f"The dataset has no array {key!r}; it has: {', '.join(replay_buffer.keys())}.")
        if replay_buffer[key].shape[1:] != tuple(shape):
            raise DataError(f"{key!r} holds steps of shape {replay_buffer[key].shape[1:]}, expected {tuple(shape)}.")
        values = replay_buffer[key]
        bad = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
        if bad.any():
            step = int(bad.argmax())
            episode = int(replay_buffer.get_episode_idxs()[step])
            inside = step - replay_buffer.get_episode_slice(episode).start
            raise DataError(
                f"{key!r} holds NaN or infinity in {bad.sum()} steps, first in episode {episode} at step {inside}."
            )
