"""The sizes of a config from a recording: what `task=my_data` fills in before the policy is built."""

from __future__ import annotations

import math
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.dataset.recorded_keys import action_key, find_keys, observed_keys, short_names
from diffusion_policy.dataset.recorded_representation import representation_of
from diffusion_policy.dataset.recordings import Camera, Recordings, open_recordings
from diffusion_policy.workspace.console import say

#: The shorter side of a frame unless task.image_size is given, and the share of a side that a crop keeps.
SHORT_SIDE, CROP = 96, 0.9
IMAGE_DATASET = "diffusion_policy.dataset.recorded_dataset.RecordedImageDataset"


def describe(cfg: DictConfig) -> None:
    """Fill in what cfg.task leaves open, from the recording at task.path, and say what was chosen."""
    task = cfg.task
    recordings = open_recordings(task.path, bool(task.skip_broken))
    keys = observed_keys(recordings, _plain(task.obs_keys))
    action = action_key(recordings, task.action_key)
    cameras = _cameras(cfg, recordings)
    names = short_names([*keys, *cameras])
    widths = {names[key]: recordings.features[key].size for key in keys}
    rotations = {("action" if key == action else key): each for key, each in (_plain(task.rotations) or {}).items()}
    representation = representation_of(
        widths, recordings.features[action].size, rotations, bool(task.relative_actions), joined=not cameras
    )
    encoded = {key: field.encoded_width for key, field in representation.obs.items()}
    values: dict[str, Any] = {
        "obs_keys": keys,
        "action_key": action,
        "cameras": cameras,
        "fps": recordings.fps,
        "action_dim": representation.action.encoded_width,
        "action_names": recordings.features[action].names,
    }
    if rotations or task.relative_actions:
        values["representation"] = representation.to_config()
    if cameras:
        sizes = {names[key]: frame_size(recordings.cameras[key], _plain(task.image_size)) for key in cameras}
        values |= _image_values(task, sizes, encoded, values["action_dim"])
    else:
        values["obs_dim"] = encoded["obs"]
    with open_dict(cfg):
        task.update(OmegaConf.create(values))
        if cameras:
            task.dataset.update(
                {"_target_": IMAGE_DATASET, "cameras": "${task.cameras}", "cache_dir": "${task.cache_dir}"}
            )
            task.dataset.shape_meta = "${task.shape_meta}"
            task.dataset.max_train_episodes = OmegaConf.select(cfg, "size.image.max_train_episodes")
    _say(recordings, cfg)


def frame_size(camera: Camera, asked: list[int] | None) -> tuple[int, int]:
    """The height and width of the frames that a policy sees."""
    if asked is not None:
        if len(asked) != 2 or min(asked) < 1:
            raise ConfigError(f"task.image_size={asked} must be [height, width]")
        return asked[0], asked[1]
    scale = min(1.0, SHORT_SIDE / min(camera.height, camera.width))
    return round(camera.height * scale), round(camera.width * scale)


def _image_values(task: DictConfig, sizes: dict, encoded: dict[str, int], action_dim: int) -> dict[str, Any]:
    """shape_meta and the crop."""
    images = {key: {"shape": [3, *size], "type": "rgb"} for key, size in sizes.items()}
    vectors = {key: {"shape": [width], "type": "low_dim"} for key, width in encoded.items()}
    smallest = [min(size[side] for size in sizes.values()) for side in (0, 1)]
    crop = [max(2, math.floor(CROP * side) // 2 * 2) for side in smallest]
    return {
        "shape_meta": {"obs": images | vectors, "action": {"shape": [action_dim]}},
        "crop_shape": _plain(task.crop_shape) or crop,
    }


def _cameras(cfg: DictConfig, recordings: Recordings) -> list[str]:
    """The cameras that task.cameras names; without it, all if the config learns from images, else none."""
    policy: Any = OmegaConf.to_container(cfg.policy)
    asked = _plain(cfg.task.cameras)
    if isinstance(asked, str):
        raise ConfigError(f"task.cameras={asked!r} must be a list, such as [{asked}]")
    if asked is None:
        asked = list(recordings.cameras) if "shape_meta" in policy else []
    if "shape_meta" in policy and not asked:
        raise ConfigError(
            f"this config learns from images, but {recordings.path} has no camera: use modality=lowdim"
            if not recordings.cameras
            else f"this config learns from images: choose task.cameras from {', '.join(recordings.cameras)}"
        )
    return find_keys("task.cameras", asked, recordings.cameras)


def _say(recordings: Recordings, cfg: DictConfig) -> None:
    task = cfg.task
    rate = "an unknown rate" if task.fps is None else f"{task.fps:g} Hz"
    say(
        f"{recordings.path}: {recordings.kind}, {len(recordings)} episodes, {sum(recordings.lengths)} steps at {rate}; "
        f"observing {', '.join([*task.obs_keys, *task.cameras])}, acting with {task.action_key} ({task.action_dim})"
    )
    for key in task.cameras:
        camera, (_, height, width) = recordings.cameras[key], task.shape_meta.obs[short_names(_seen(task))[key]].shape
        say(
            f"{key}: frames of {camera.height} x {camera.width} are scaled to {height} x {width} and cut to "
            f"{' x '.join(map(str, task.crop_shape))} (task.image_size, task.crop_shape)"
        )
    for reason in recordings.left_out:
        say(f"left out: {reason}")


def _seen(task: DictConfig) -> list[str]:
    return [*task.obs_keys, *task.cameras]


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
