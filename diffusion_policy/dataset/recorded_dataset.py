"""Windows over the recordings of a robot, in any format that `open_recordings` reads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from diffusion_policy.common.errors import DataError, DataNotFoundError
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.common.representation import Representation
from diffusion_policy.dataset.base_dataset import (
    BaseLowdimDataset,
    ImageWindowedDataset,
    WindowedDataset,
    check_normalization,
)
from diffusion_policy.dataset.recorded_frames import camera_frames
from diffusion_policy.dataset.recorded_keys import short_names
from diffusion_policy.dataset.recorded_steps import action_steps, read_steps, represented_fields, with_frames
from diffusion_policy.dataset.recordings import Recordings, open_recordings


def _opened(path: str | os.PathLike, skip_broken: bool, how: str | None, cameras: Sequence[str] = ()) -> Recordings:
    """The recordings at `path`; `how` is said if they are missing, or have no image of a camera."""
    try:
        recordings = open_recordings(path, skip_broken)
    except DataNotFoundError as error:
        raise DataNotFoundError(f"{error} {how}" if how else str(error)) from None
    for camera in cameras:
        if camera not in recordings.cameras:
            known = f"it has {', '.join(recordings.cameras) or 'none'}."
            raise DataError(f"{path} has no camera {camera!r}: {known} {how or ''}".rstrip())
    return recordings


class RecordedDataset(WindowedDataset, BaseLowdimDataset):
    """obs (T, Do): the arrays `obs_keys`, joined; action (T, Da). Both are in the units of the recording.

    Args:
        path: the recording.
        obs_keys, action_key: its arrays.
        skip_broken: leave out episodes that cannot be read, instead of raising an error.
        drop_idle: drop steps that differ from the last kept one by at most this share of the range, in every number.
        representation: what a policy does with the numbers, see `Representation`; the normaliser is fitted to that.
        n_obs_steps: observed steps of a window.
        normalization: see `LinearNormalizer.fit`.
        how: how to get the recording, for the error message if it is missing.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        obs_keys: Sequence[str],
        action_key: str,
        horizon: int = 1,
        pad_before: int = 0,
        pad_after: int = 0,
        n_obs_steps: int = 1,
        skip_broken: bool = False,
        drop_idle: float | None = None,
        representation: Mapping[str, Any] | None = None,
        seed: int = 42,
        val_ratio: float = 0.0,
        max_train_episodes: int | None = None,
        normalization: str = "upstream",
        how: str | None = None,
    ):
        recordings = _opened(path, skip_broken, how)
        self.source, self.n_obs_steps = path, n_obs_steps
        self.names = short_names(list(obs_keys))
        self.representation = None if representation is None else Representation.from_config(representation)
        self.normalization = check_normalization(normalization)
        buffer, self.kept = read_steps(recordings, range(len(recordings)), self.names, action_key, drop_idle)
        super().__init__(buffer, horizon, pad_before, pad_after, seed, val_ratio, max_train_episodes)

    def _make_steps(self, replay_buffer: ReplayBuffer) -> dict[str, torch.Tensor]:
        obs = torch.cat([torch.from_numpy(replay_buffer[name]) for name in self.names.values()], dim=1)
        return {"obs": obs, "action": action_steps(replay_buffer, self.representation)}

    def _fitted_fields(self) -> dict[str, torch.Tensor]:
        return represented_fields(self, super()._fitted_fields())


class RecordedImageDataset(ImageWindowedDataset):
    """obs: the images of `cameras` (T, 3, H, W) and the arrays `obs_keys` (T, D), each by its short name.

    Frames are scaled and decoded once into a file, see `camera_frames`. The other arguments are those of
    RecordedDataset.

    Args:
        shape_meta: has the sizes of the frames.
        cameras: of the recording.
        cache_dir: folder of the decoded frames; by default the one that holds the recording.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        shape_meta: Mapping[str, Any],
        obs_keys: Sequence[str],
        cameras: Sequence[str],
        action_key: str,
        horizon: int = 1,
        pad_before: int = 0,
        pad_after: int = 0,
        n_obs_steps: int = 1,
        skip_broken: bool = False,
        drop_idle: float | None = None,
        representation: Mapping[str, Any] | None = None,
        seed: int = 42,
        val_ratio: float = 0.0,
        max_train_episodes: int | None = None,
        normalization: str = "upstream",
        cache_dir: str | os.PathLike | None = None,
        how: str | None = None,
    ):
        recordings = _opened(path, skip_broken, how, cameras)
        names = short_names([*obs_keys, *cameras])
        self.source, self.n_obs_steps = path, n_obs_steps
        self.representation = None if representation is None else Representation.from_config(representation)
        self.normalization = check_normalization(normalization)
        self.names = {key: names[key] for key in obs_keys}
        self.lowdim_keys = list(self.names.values())
        shapes = {camera: shape_meta["obs"][names[camera]]["shape"] for camera in cameras}
        sizes = {camera: (int(height), int(width)) for camera, (_, height, width) in shapes.items()}
        self.frame_shapes = {names[camera]: (*size, 3) for camera, size in sizes.items()}
        whole = with_frames(recordings, cameras, skip_broken)
        buffer, self.kept = read_steps(recordings, whole, self.names, action_key, drop_idle)
        super().__init__(buffer, horizon, pad_before, pad_after, seed, val_ratio, max_train_episodes)
        used = np.flatnonzero(self.train_mask | self.val_mask)
        self.frames = camera_frames(recordings, [whole[i] for i in used], sizes, cache_dir)
        self.frame_of = self._frame_rows([recordings.lengths[i] for i in whole], used)

    def _frame_rows(self, lengths: list[int], used: np.ndarray) -> torch.Tensor:
        """The row of the frames for every step; 0 for the steps of episodes that are not used."""
        firsts = dict(zip(used.tolist(), np.cumsum([0, *(lengths[i] for i in used)])[:-1].tolist(), strict=True))
        rows = [kept + firsts[i] if i in firsts else 0 * kept for i, kept in enumerate(self.kept)]
        return torch.from_numpy(np.concatenate(rows))

    def _make_steps(self, replay_buffer: ReplayBuffer) -> dict[str, torch.Tensor]:
        steps = {name: torch.from_numpy(replay_buffer[name]) for name in self.names.values()}
        return {**steps, "action": action_steps(replay_buffer, self.representation)}

    def _fitted_fields(self) -> dict[str, torch.Tensor]:
        return represented_fields(self, super()._fitted_fields())
