"""Demonstrations of robomimic's tasks as images and numbers."""

import hashlib
import json
import math
import os
from collections.abc import Mapping

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
from diffusion_policy.dataset.base_dataset import ImageWindowedDataset, check_steps
from diffusion_policy.dataset.robomimic_replay_lowdim_dataset import action_normalizer, check_vectors, convert_actions
from diffusion_policy.model.common.normalizer import LinearNormalizer
from diffusion_policy.model.common.rotation_transformer import RotationTransformer
from diffusion_policy.storage.frame_cache import FileFrames, MemoryFrames, cached_frames
from diffusion_policy.storage.hdf5_reader import read_demos


class RobomimicReplayImageDataset(ImageWindowedDataset):
    """obs: what shape_meta names, images (T, 3, H, W) and numbers (T, D); action (T, Da).

    shape_meta: {'obs': {key: {shape, type: rgb | low_dim}}, 'action': {shape}}; low_dim if no type is given.
    abs_action, rotation_rep: as in RobomimicReplayLowdimDataset.
    normalization: 'upstream' scales positions (keys that end in pos) to [-1, 1] and leaves quaternions, rotations, grippers and relative
        actions as they are; 'min_max' is MIP's, every dimension of all numbers to [-1, 1]. Pixels go to [-1, 1] in both.
    use_legacy_normalizer: absolute actions are divided by their largest magnitude.
    use_cache: accepted for upstream's sake. Images are always converted once and kept beside the dataset, see `stored_frames`; upstream's
        own cache, <dataset_path>.zarr.zip, is lossy and tied to a codec, and is not read.
    """

    def __init__(
        self,
        shape_meta,
        dataset_path,
        horizon=1,
        pad_before=0,
        pad_after=0,
        n_obs_steps=None,
        abs_action=False,
        rotation_rep="rotation_6d",
        use_legacy_normalizer=False,
        use_cache=False,
        seed=42,
        val_ratio=0.0,
        max_train_episodes=None,
        normalization="upstream",
    ):
        if normalization not in ("upstream", "min_max"):
            raise ConfigError(f"normalization is 'upstream' or 'min_max', not {normalization!r}.")
        if n_obs_steps is not None and n_obs_steps < 1:
            raise ConfigError(f"n_obs_steps is at least 1, or null for the whole window, not {n_obs_steps}.")
        self.n_obs_steps, self.abs_action, self.normalization = n_obs_steps, abs_action, normalization
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
        data["action"] = convert_actions(demos.arrays["actions"], self.rotation_transformer, dataset_path).astype(
            np.float32
        )
        if data["action"].shape[1:] != action_shape:
            raise DataError(
                f"{dataset_path}: its actions become {data['action'].shape[1]} numbers with abs_action={abs_action}, but "
                f"shape_meta.action.shape is {list(action_shape)}."
            )
        buffer = ReplayBuffer({"data": data, "meta": {"episode_ends": demos.episode_ends}})
        super().__init__(buffer, horizon, pad_before, pad_after, seed, val_ratio, max_train_episodes)
        self.frames = stored_frames(dataset_path, self.frame_shapes, buffer.n_steps)
        self.frame_of = torch.arange(buffer.n_steps)

    def _make_steps(self, replay_buffer):
        check_steps(replay_buffer, {**self.lowdim_shapes, "action": replay_buffer["action"].shape[1:]})
        return {key: torch.from_numpy(replay_buffer[key]) for key in (*self.lowdim_keys, "action")}

    def get_normalizer(self, mode="limits", **kwargs) -> LinearNormalizer:
        """See the class; mode and keyword arguments count only for 'min_max'."""
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


def read_shape_meta(shape_meta: Mapping) -> tuple[dict, dict, tuple]:
    """-> images {key: (H, W, 3)}, numbers {key: (D,)}, shape of an action (Da,)"""
    images, numbers = {}, {}
    for key, entry in shape_meta["obs"].items():
        shape, kind = tuple(entry["shape"]), entry.get("type", "low_dim")
        if kind not in ("rgb", "low_dim"):
            raise ConfigError(f"shape_meta.obs.{key}.type is rgb or low_dim, not {kind!r}.")
        if kind == "rgb" and (len(shape) != 3 or shape[0] != 3):
            raise ConfigError(f"shape_meta.obs.{key}.shape is [3, height, width] for an image, not {list(shape)}.")
        if kind == "low_dim" and len(shape) != 1:
            raise ConfigError(f"shape_meta.obs.{key}.shape has one dimension for numbers, not {list(shape)}.")
        (images if kind == "rgb" else numbers)[key] = (*shape[1:], 3) if kind == "rgb" else shape
    if not images:
        raise ConfigError("shape_meta has no image (type: rgb); without images, use RobomimicReplayLowdimDataset.")
    return images, numbers, tuple(shape_meta["action"]["shape"])


def stored_frames(path: str, shapes: dict, steps: int) -> FileFrames | MemoryFrames:
    """Images {key: (H, W, 3)} of every step of a dataset, side by side.

    They are read once into <path>.images-<checksum>.npy, with the checksum of the dataset's size and time of change and of `shapes`, so that
    neither a changed dataset nor other images find that file. See `cached_frames`.
    """
    path = os.path.abspath(os.path.expanduser(path))
    status = os.stat(path)
    source = json.dumps([status.st_size, status.st_mtime_ns, list(shapes.items())])
    file = f"{path}.images-{hashlib.sha256(source.encode()).hexdigest()[:12]}.npy"
    frames = {f"obs/{key}": shape for key, shape in shapes.items()}

    def read(into=None) -> np.ndarray | None:
        with tqdm(
            desc=f"reading the images of {os.path.basename(path)}, once",
            total=1,
            bar_format="{desc}: {percentage:.0f}% [{elapsed}]",
            disable=None,
        ) as bar:

            def progress(done, total):
                bar.update(done / total - bar.n)

            demos = read_demos(path, ["actions"], frames, into, progress)
        if demos.episode_ends[-1] != steps:
            raise DataError(f"{path} changed while it was read.")
        return demos.frames

    return cached_frames(
        file, (steps, sum(map(math.prod, shapes.values()))), write=lambda out: read(out.name), in_memory=read
    )


def _check_suffix(key: str):
    if not key.endswith(("pos", "quat")):
        raise ConfigError(
            f"{key}: how upstream scales numbers is told from the end of their name, pos, qpos or quat; normalization=min_max "
            f"takes any."
        )
