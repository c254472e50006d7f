"""The dataset interface of a workspace, and the base classes of datasets over a replay buffer."""

import copy
import math
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch.utils.data import Dataset

from diffusion_policy.common.errors import ConfigError, DataError
from diffusion_policy.common.normalize_util import get_image_range_normalizer
from diffusion_policy.common.pytorch_util import dict_apply
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.common.sampler import SequenceSampler, downsample_mask, get_val_mask
from diffusion_policy.model.common.normalizer import LinearNormalizer
from diffusion_policy.storage.frame_cache import FileFrames, MemoryFrames

#: Values of a dataset's option `normalization`, with the mode of `LinearNormalizer.fit` each stands for.
NORMALIZATIONS = {"upstream": "limits", "min_max": "min_max"}


def check_normalization(name: str) -> str:
    """Return `name`, which must be a value of the option `normalization`."""
    if name not in NORMALIZATIONS:
        raise ConfigError(f"normalization must be 'upstream' or 'min_max', not {name!r}.")
    return name


class _BaseDataset(Dataset):
    """The dataset interface; an instance of this class is empty."""

    def get_normalizer(self, mode: str = "limits", **kwargs: Any) -> LinearNormalizer:
        raise NotImplementedError

    def get_all_actions(self) -> torch.Tensor:
        """(steps, Da)."""
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
    """Windows over the episodes of a replay buffer, in memory as one tensor per field; a batch is one gather per field.

    A subclass implements `_make_steps`, which returns {field: (steps, ...) tensor}, and may override `_to_sample`,
    which arranges a batch of them.
    """

    normalization = "upstream"  # or MIP's 'min_max', see LinearNormalizer.fit
    source: str | os.PathLike | None = None  # where the data came from
    source_warning: str | None = None  # what every result trained on it must say
    symmetries: tuple[str, ...] = ()  # values of `augment`, which adds transformed copies of the training episodes

    def __init__(
        self,
        replay_buffer: ReplayBuffer,
        horizon: int = 1,
        pad_before: int = 0,
        pad_after: int = 0,
        seed: int = 42,
        val_ratio: float = 0.0,
        max_train_episodes: int | None = None,
        augment: str | None = None,
    ):
        if augment not in (None, *self.symmetries):
            names = " or ".join(map(repr, self.symmetries)) or "none"
            raise ConfigError(f"augment={augment!r}: the symmetries of {type(self).__name__} are: {names}; or null.")
        if horizon < 1 or pad_before < 0 or pad_after < 0:
            raise ConfigError(
                f"horizon must be at least 1 and the pads at least 0: "
                f"horizon={horizon}, pad_before={pad_before}, pad_after={pad_after}."
            )
        if not 0 <= val_ratio < 1:
            raise ConfigError(f"val_ratio must be in [0, 1), not {val_ratio}.")
        if max_train_episodes is not None and max_train_episodes < 1:
            raise ConfigError(f"max_train_episodes must be at least 1, or null for all, not {max_train_episodes}.")
        self.replay_buffer = replay_buffer
        self.horizon, self.pad_before, self.pad_after = horizon, pad_before, pad_after
        self.augment = augment
        self.steps = self._make_steps(replay_buffer)
        if augment is not None:
            mirrored = self._mirror_steps(self.steps, replay_buffer)
            self.steps = {field: torch.cat([values, mirrored[field]]) for field, values in self.steps.items()}
        self.val_mask = get_val_mask(replay_buffer.n_episodes, val_ratio, seed)
        self.train_mask = downsample_mask(~self.val_mask, max_train_episodes, seed)
        self._set_episodes(self.train_mask)

    def _make_steps(self, replay_buffer: ReplayBuffer) -> dict[str, torch.Tensor]:
        """{field: (steps, ...) tensor}."""
        raise NotImplementedError

    def _mirror_steps(self, steps: dict[str, torch.Tensor], replay_buffer: ReplayBuffer) -> dict[str, torch.Tensor]:
        """The mirror image of every step, for a dataset whose `symmetries` name 'mirror'."""
        raise NotImplementedError

    def _to_sample(self, batch: dict[str, torch.Tensor]) -> dict:
        """Arrange a batch {field: (B, T, ...)} for the policy."""
        return batch

    def _set_episodes(self, mask: np.ndarray) -> None:
        self.sampler = SequenceSampler(
            self.replay_buffer, self.horizon, self.pad_before, self.pad_after, episode_mask=mask
        )
        self.index_table = torch.from_numpy(self.sampler.index_table)  # (N, T)
        if self.augment is not None and mask is self.train_mask:  # the mirrored steps follow the recorded ones
            self.index_table = torch.cat([self.index_table, self.index_table + self.replay_buffer.n_steps])
        if mask.any() and not len(self.sampler):
            longest = self.replay_buffer.episode_lengths[mask].max()
            raise DataError(
                f"No window fits: horizon is {self.horizon} (pad_before {self.pad_before}, pad_after "
                f"{self.pad_after}), but the longest of {mask.sum()} episodes has {longest} steps."
            )

    def get_validation_dataset(self) -> Any:
        """The episodes held out by `val_ratio`, and only those.

        Upstream validates on all episodes that are not trained on. A lower max_train_episodes then changes the
        validation set, and its loss is not comparable between such runs.
        """
        dataset = copy.copy(self)
        dataset._set_episodes(self.val_mask)
        return dataset

    def get_normalizer(self, mode: str | None = None, **kwargs: Any) -> LinearNormalizer:
        """Fit on every step of every episode, as upstream does.

        mode: by default that of `normalization`; it and the keyword arguments are those of `LinearNormalizer.fit`.
        """
        normalizer = LinearNormalizer()
        mode = NORMALIZATIONS[self.normalization] if mode is None else mode
        normalizer.fit(self._fitted_fields(), last_n_dims=1, mode=mode, **kwargs)
        return normalizer

    def _fitted_fields(self) -> dict[str, torch.Tensor]:
        """{field: (steps, ...)} that the normaliser is fitted on."""
        return self.steps

    def get_all_actions(self) -> torch.Tensor:
        """(steps, Da)."""
        return self.steps["action"]

    def __len__(self) -> int:
        return len(self.index_table)

    def get_batch(self, indices: Sequence[int] | torch.Tensor) -> dict:
        """Samples at `indices` (B,), each field (B, T, ...)."""
        rows = self.index_table[torch.as_tensor(indices, dtype=torch.long)]  # (B, T)
        return self._to_sample({field: values[rows] for field, values in self.steps.items()})

    def __getitem__(self, idx: int) -> dict:
        return self.__getitems__([idx])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict]:
        """Samples for a DataLoader's batch, as views of one gathered batch."""
        return _split(self.get_batch(indices), len(indices))


class ImageWindowedDataset(WindowedDataset, BaseImageDataset):
    """Windows observed through images and low-dim values: obs {key: (T, 3, H, W) or (T, D)}, action (T, Da).

    A batch from `get_batch` holds images as uint8, a quarter of the size of floats, for the policy to convert on its
    device. Single samples hold floats in [0, 1], as upstream's do. With `n_obs_steps`, only the first steps of a window
    are observed: the policy uses no others.

    A subclass sets `lowdim_keys`, the observed fields of `steps`; `frame_shapes`, {key: (H, W, 3)} of the images of a
    step; `frames`, which holds these images concatenated; and `frame_of` (steps,), the row of `frames` for a step.
    """

    n_obs_steps: int | None = None
    lowdim_keys: list[str]
    frame_shapes: dict[str, tuple[int, ...]]
    frames: MemoryFrames | FileFrames
    frame_of: torch.Tensor

    def get_batch(self, indices: Sequence[int] | torch.Tensor) -> dict:
        """obs: images (B, To, 3, H, W) uint8 and low-dim values (B, To, D); action (B, T, Da)."""
        rows = self.index_table[torch.as_tensor(indices, dtype=torch.long)]  # (B, T)
        seen = rows[:, : self.n_obs_steps]  # (B, To)
        recorded = seen % len(self.frame_of)  # mirrored steps follow the recorded ones
        frames = self.frames.take(self.frame_of[recorded].flatten())  # (B * To, bytes)
        parts = frames.split([math.prod(shape) for shape in self.frame_shapes.values()], dim=1)
        obs = {}
        for (key, (height, width, _)), part in zip(self.frame_shapes.items(), parts, strict=True):
            image = rearrange(part, "(b to) (h w c) -> b to c h w", to=seen.shape[1], h=height, w=width)
            if self.augment is not None:
                image = torch.where((seen != recorded)[..., None, None, None], self._mirror_images(image), image)
            obs[key] = image.contiguous()
        for key in self.lowdim_keys:
            obs[key] = self.steps[key][seen]
        return {"obs": obs, "action": self.steps["action"][rows]}

    def _mirror_images(self, images: torch.Tensor) -> torch.Tensor:
        """The mirror image of every image (..., H, W)."""
        raise NotImplementedError

    def __getitems__(self, indices: Sequence[int]) -> list[dict]:
        batch = self.get_batch(indices)
        for key in self.frame_shapes:
            batch["obs"][key] = batch["obs"][key].float().div_(255)
        return _split(batch, len(indices))

    def _fitted_fields(self) -> dict[str, torch.Tensor]:
        return {key: self.steps[key] for key in ("action", *self.lowdim_keys)}

    def get_normalizer(self, mode: str | None = None, **kwargs: Any) -> LinearNormalizer:
        """Fit actions and low-dim values on the data; map pixels from [0, 1] to [-1, 1]."""
        normalizer = super().get_normalizer(mode, **kwargs)
        for key in self.frame_shapes:
            normalizer[key] = get_image_range_normalizer()
        return normalizer


def _split(batch: dict, count: int) -> list[dict]:
    """Split a batch of `count` samples into views of them."""
    return [dict_apply(batch, operator.itemgetter(i)) for i in range(count)]


def check_steps(replay_buffer: ReplayBuffer, shapes: Mapping[str, Sequence[int]]) -> None:
    """Check that the arrays in `shapes`, {key: shape of a step}, exist, have these shapes and are finite."""
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
