"""Demonstrations of robomimic's tasks as images and low-dimensional observations."""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from diffusion_policy.common.errors import ConfigError, DataError
from diffusion_policy.common.normalize_util import (
    array_to_stats,
    get_identity_normalizer_from_stat,
    get_image_range_normalizer,
    get_range_normalizer_from_stat,
)
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.dataset.base_dataset import ImageWindowedDataset, check_normalization, check_steps
from diffusion_policy.dataset.robomimic_replay_lowdim_dataset import action_normalizer, check_vectors, convert_actions
from diffusion_policy.model.common.normalizer import LinearNormalizer
from diffusion_policy.model.common.rotation_transformer import RotationTransformer
from diffusion_policy.storage.frame_cache import FileFrames, MemoryFrames, cached_frames
from diffusion_policy.storage.hdf5_reader import read_demos


class RobomimicReplayImageDataset(ImageWindowedDataset):
    """obs {key: images (T, 3, H, W) or low-dim values (T, D)} for the keys of shape_meta; action (T, Da).

    Args:
        shape_meta: {'obs': {key: {shape, type: rgb | low_dim}}, 'action': {shape}}; the default type is low_dim.
        abs_action, rotation_rep: as in RobomimicReplayLowdimDataset.
        normalization: 'upstream' scales positions (keys that end in pos) to [-1, 1] and does not scale quaternions,
            rotations, grippers and relative actions; 'min_max', as in MIP, maps every low-dim dimension to [-1, 1],
            a constant one to -1.
            Pixels are mapped to [-1, 1] in both.
        use_legacy_normalizer: divide absolute actions by their largest magnitude.
        use_cache: accepted for upstream's configs and ignored. Images are always converted once and kept next to the
            dataset, see `stored_frames`. Upstream's cache, <dataset_path>.zarr.zip, is lossy and is not read.
    """

    def __init__(
        self,
        shape_meta: Mapping,
        dataset_path: str | os.PathLike,
        horizon: int = 1,
        pad_before: int = 0,
        pad_after: int = 0,
        n_obs_steps: int | None = None,
        abs_action: bool = False,
        rotation_rep: str = "rotation_6d",
        use_legacy_normalizer: bool = False,
        use_cache: bool = False,
        seed: int = 42,
        val_ratio: float = 0.0,
        max_train_episodes: int | None = None,
        normalization: str = "upstream",
    ):
        if n_obs_steps is not None and n_obs_steps < 1:
            raise ConfigError(f"n_obs_steps must be at least 1, or null for the whole window, not {n_obs_steps}.")
        self.n_obs_steps, self.abs_action = n_obs_steps, abs_action
        self.normalization = check_normalization(normalization)
        self.source = dataset_path
        self.use_legacy_normalizer = use_legacy_normalizer
        self.frame_shapes, self.lowdim_shapes, action_shape = read_shape_meta(shape_meta)
        self.lowdim_keys = list(self.lowdim_shapes)
        if normalization == "upstream":
            for key in self.lowdim_keys:
                _check_suffix(key)
        self.rotation_transformer = RotationTransformer("axis_angle", rotation_rep) if abs_action else None
        demos = read_demos(dataset_path, ["actions", *(f"obs/{key}" for key in self.lowdim_keys)])
        check_vectors(demos, dataset_path)
        data = {key: demos.arrays[f"obs/{key}"].astype(np.float32) for key in self.lowdim_keys}
        actions = convert_actions(demos.arrays["actions"], self.rotation_transformer, dataset_path)
        data["action"] = actions.astype(np.float32)
        if data["action"].shape[1:] != action_shape:
            raise DataError(
                f"{dataset_path}: with abs_action={abs_action} its actions have {data['action'].shape[1]} numbers, but "
                f"shape_meta.action.shape is {list(action_shape)}."
            )
        buffer = ReplayBuffer({"data": data, "meta": {"episode_ends": demos.episode_ends}})
        super().__init__(buffer, horizon, pad_before, pad_after, seed, val_ratio, max_train_episodes)
        self.frames = stored_frames(dataset_path, self.frame_shapes, buffer.n_steps)
        self.frame_of = torch.arange(buffer.n_steps)

    def _make_steps(self, replay_buffer: ReplayBuffer) -> dict[str, torch.Tensor]:
        check_steps(replay_buffer, {**self.lowdim_shapes, "action": replay_buffer["action"].shape[1:]})
        return {key: torch.from_numpy(replay_buffer[key]) for key in (*self.lowdim_keys, "action")}

    def get_normalizer(self, mode: str | None = None, **kwargs: Any) -> LinearNormalizer:
        """Fit as `normalization` selects; mode and keyword arguments apply to 'min_max' only."""
        if self.normalization == "min_max":
            return super().get_normalizer(mode, **kwargs)
        normalizer = LinearNormalizer()
        normalizer["action"] = action_normalizer(
            self.replay_buffer["action"], self.abs_action, self.use_legacy_normalizer
        )
        for key in self.lowdim_keys:
            make = get_identity_normalizer_from_stat if key.endswith("quat") else get_range_normalizer_from_stat
            normalizer[key] = make(array_to_stats(self.replay_buffer[key]))
        for key in self.frame_shapes:
            normalizer[key] = get_image_range_normalizer()
        return normalizer


def read_shape_meta(
    shape_meta: Mapping,
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]], tuple[int, ...]]:
    """Split shape_meta into images {key: (H, W, 3)}, low-dim values {key: (D,)} and the shape of an action (Da,)."""
    images: dict[str, tuple[int, ...]] = {}
    lowdim: dict[str, tuple[int, ...]] = {}
    for key, entry in shape_meta["obs"].items():
        shape, kind = tuple(entry["shape"]), entry.get("type", "low_dim")
        if kind not in ("rgb", "low_dim"):
            raise ConfigError(f"shape_meta.obs.{key}.type must be rgb or low_dim, not {kind!r}.")
        if kind == "rgb" and (len(shape) != 3 or shape[0] != 3):
            raise ConfigError(f"shape_meta.obs.{key}.shape of an image must be [3, height, width], not {list(shape)}.")
        if kind == "low_dim" and len(shape) != 1:
            raise ConfigError(f"shape_meta.obs.{key}.shape must have one dimension (low_dim), not {list(shape)}.")
        if kind == "rgb":
            images[key] = (*shape[1:], 3)
        else:
            lowdim[key] = shape
    if not images:
        raise ConfigError("shape_meta has no image (type: rgb); without images, use RobomimicReplayLowdimDataset.")
    return images, lowdim, tuple(shape_meta["action"]["shape"])


def stored_frames(
    path: str | os.PathLike, shapes: Mapping[str, tuple[int, ...]], steps: int
) -> FileFrames | MemoryFrames:
    """Images {key: (H, W, 3)} of every step of a dataset, concatenated, cached in a file.

    The file is <path>.images-<checksum>.npy. The checksum covers `shapes` and the dataset's size and modification time,
    so a changed dataset or other images use another file. See `cached_frames`.
    """
    path = os.path.abspath(os.path.expanduser(path))
    status = os.stat(path)
    source = json.dumps([status.st_size, status.st_mtime_ns, list(shapes.items())])
    file = f"{path}.images-{hashlib.sha256(source.encode()).hexdigest()[:12]}.npy"
    frames = {f"obs/{key}": shape for key, shape in shapes.items()}

    def read(into: str | None = None) -> Any:
        with tqdm(
            desc=f"reading the images of {os.path.basename(path)}, once",
            total=1,
            bar_format="{desc}: {percentage:.0f}% [{elapsed}]",
            disable=None,
        ) as bar:

            def progress(done: int, total: int) -> None:
                bar.update(done / total - bar.n)

            demos = read_demos(path, ["actions"], frames, into, progress)
        if demos.episode_ends[-1] != steps:
            raise DataError(f"{path} changed while it was read.")
        return demos.frames

    return cached_frames(
        file, (steps, sum(map(math.prod, shapes.values()))), write=lambda out: read(out.name), in_memory=read
    )


def _check_suffix(key: str) -> None:
    if not key.endswith(("pos", "quat")):
        raise ConfigError(
            f"{key}: normalization=upstream selects the scaling by the end of the name, which must be pos, qpos or "
            f"quat; normalization=min_max takes any name."
        )
