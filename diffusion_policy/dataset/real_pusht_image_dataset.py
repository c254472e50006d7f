"""Demonstrations of a real robot, as upstream records them: a zarr folder of numbers beside videos of the cameras."""

import contextlib
import hashlib
import json
import logging
import math
import os
import pathlib
from collections.abc import Generator, Iterator, Mapping
from typing import IO

import imageio_ffmpeg
import numpy as np
import torch
from tqdm import tqdm

from diffusion_policy.common.errors import ConfigError, DataError, DataNotFoundError
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.dataset.base_dataset import ImageWindowedDataset, check_steps
from diffusion_policy.dataset.robomimic_replay_image_dataset import read_shape_meta
from diffusion_policy.storage.frame_cache import FileFrames, MemoryFrames, cached_frames


class RealPushTImageDataset(ImageWindowedDataset):
    """obs: images camera_<i> (T, 3, H, W) and low-dim values of shape_meta; action (T, 2) or (T, 6).

    The folder has replay_buffer.zarr and videos/<episode>/<camera>.mp4. Of a pose or an action with shape [2], x and y
    are used. The frames are scaled, cut to the shape's proportions, and kept in the folder (0.5 MB per step for two
    cameras of 240 x 320).

    Args:
        shape_meta: see `RobomimicReplayImageDataset`.
        n_latency_steps: actions are those of so many steps later.
        use_cache: accepted for upstream's configs and ignored: frames are always cached.
        delta_action: use the differences of successive actions; the first of an episode is zero.
    """

    def __init__(
        self,
        shape_meta: Mapping,
        dataset_path: str | os.PathLike,
        horizon: int = 1,
        pad_before: int = 0,
        pad_after: int = 0,
        n_obs_steps: int | None = None,
        n_latency_steps: int = 0,
        use_cache: bool = False,
        seed: int = 42,
        val_ratio: float = 0.0,
        max_train_episodes: int | None = None,
        delta_action: bool = False,
    ):
        folder = pathlib.Path(dataset_path).expanduser()
        for part in ("replay_buffer.zarr", "videos"):
            if not (folder / part).is_dir():
                raise DataNotFoundError(f"There is no recording of a robot at {folder}: it has no folder {part}.")
        self.n_obs_steps, self.n_latency_steps, self.delta_action = n_obs_steps, n_latency_steps, delta_action
        self.frame_shapes, self.lowdim_shapes, self.action_shape = read_shape_meta(shape_meta)
        self.lowdim_keys = list(self.lowdim_shapes)
        keys = [*self.lowdim_keys, "action", "timestamp"]
        replay_buffer = ReplayBuffer.copy_from_path(folder / "replay_buffer.zarr", keys=keys)
        super().__init__(
            replay_buffer, horizon + n_latency_steps, pad_before, pad_after, seed, val_ratio, max_train_episodes
        )
        self.frames = video_frames(folder, self.frame_shapes, replay_buffer)
        self.frame_of = torch.arange(replay_buffer.n_steps)

    def _make_steps(self, replay_buffer: ReplayBuffer) -> dict[str, torch.Tensor]:
        check_steps(replay_buffer, {key: replay_buffer[key].shape[1:] for key in replay_buffer.keys()})
        out = {}
        for key, shape in {**self.lowdim_shapes, "action": self.action_shape}.items():
            values = replay_buffer[key]
            if shape == (2,) and (key == "action" or "pose" in key):
                values = values[:, :2]
            if values.shape[1:] != shape:
                raise DataError(f"{key!r} holds steps of shape {values.shape[1:]}, shape_meta says {shape}.")
            out[key] = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
        if self.delta_action:
            if self.action_shape[0] > 3:
                raise ConfigError("delta_action=true is for positions: an action of 3 numbers at most.")
            out["action"] = torch.diff(out["action"], dim=0, prepend=out["action"][:1])
            out["action"][replay_buffer.episode_ends[:-1]] = 0
        return out

    def get_batch(self, indices: object) -> dict:
        batch = super().get_batch(indices)  # type: ignore[arg-type]
        return {**batch, "action": batch["action"][:, self.n_latency_steps :]}


def video_frames(
    folder: pathlib.Path, shapes: Mapping[str, tuple[int, ...]], replay_buffer: ReplayBuffer
) -> FileFrames | MemoryFrames:
    """Images {camera_<i>: (H, W, 3)} of every step, concatenated, cached in <folder>/images-<checksum>.npy.

    The checksum covers `shapes` and the sizes and times of the videos. See `cached_frames`.
    """
    ends = replay_buffer.episode_ends
    paths = [[folder / "videos" / str(i) / f"{camera_number(key)}.mp4" for key in shapes] for i in range(len(ends))]
    missing = [path for episode in paths for path in episode if not path.is_file()]
    if missing:
        raise DataNotFoundError(f"There is no video {missing[0]} ({len(missing)} of the recording's are missing).")
    stats = [(path.stat().st_size, path.stat().st_mtime_ns) for episode in paths for path in episode]
    source = json.dumps([list(shapes.items()), stats])
    file = folder / f"images-{hashlib.sha256(source.encode()).hexdigest()[:12]}.npy"
    dt = float(replay_buffer["timestamp"][1] - replay_buffer["timestamp"][0])

    def steps() -> Iterator[bytes]:
        for videos, length in zip(paths, replay_buffer.episode_lengths, strict=True):
            cameras = [
                read_video(path, shape[0], shape[1], dt) for path, shape in zip(videos, shapes.values(), strict=True)
            ]
            for _ in range(length):
                yield b"".join(next_frame(frames, path, length) for frames, path in zip(cameras, videos, strict=True))
            for frames in cameras:
                frames.close()

    def write(out: IO[bytes]) -> None:
        for step in tqdm(steps(), desc="reading the videos, once", total=int(ends[-1]), unit="step", disable=None):
            out.write(step)

    def in_memory() -> np.ndarray:
        return np.stack([np.frombuffer(step, np.uint8) for step in steps()])

    return cached_frames(str(file), (int(ends[-1]), sum(map(math.prod, shapes.values()))), write, in_memory)


def camera_number(key: str) -> int:
    """The number of camera_<number>, which is the name of its videos."""
    number = key.rpartition("_")[2]
    if not number.isdecimal():
        raise ConfigError(f"shape_meta.obs.{key}: the name of a camera must end in its number, such as camera_1.")
    return int(number)


def read_video(path: pathlib.Path, height: int, width: int, dt: float) -> Generator[bytes, None, None]:
    """The first frame (height, width, 3) at or after each multiple of `dt` seconds, as bytes."""
    scale = f"scale={width}:{height}:force_original_aspect_ratio=increase:flags=area,crop={width}:{height}"
    frames = imageio_ffmpeg.read_frames(str(path), output_params=["-vf", scale])
    try:
        with quiet("imageio_ffmpeg"):  # it warns that the frames are scaled
            rate, due = next(frames)["fps"], 0
        for number, frame in enumerate(frames):
            # The small constant prevents rounding from moving a punctual frame one step back.
            while number / rate >= due * dt - 1e-5:
                yield frame
                due += 1
    finally:
        frames.close()


@contextlib.contextmanager
def quiet(name: str) -> Iterator[None]:
    """Silence the warnings of a logger."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def next_frame(frames: Iterator[bytes], path: pathlib.Path, length: int) -> bytes:
    try:
        return next(frames)
    except StopIteration:
        raise DataError(f"{path} is shorter than its episode of {length} steps.") from None
    except (OSError, RuntimeError, KeyError, ZeroDivisionError) as error:
        raise DataError(f"{path} cannot be read as a video: {str(error).splitlines()[0]}") from error
