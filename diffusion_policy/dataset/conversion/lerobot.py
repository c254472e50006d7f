"""Recordings as a LeRobotDataset v3, the format of lerobot 0.4 and later."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.dataset.conversion.common import keep_whole, new_folder
from diffusion_policy.dataset.conversion.lerobot_stats import Stats, episode_stats, image_stats, total_stats
from diffusion_policy.dataset.conversion.lerobot_tables import DATA_PATH, DataWriter, write_episodes, write_tasks
from diffusion_policy.dataset.conversion.lerobot_videos import VideoWriter
from diffusion_policy.dataset.recordings import Recordings
from diffusion_policy.dataset.recordings.lerobot import require_libraries

VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
STATS_FRAMES, STATS_PIXELS = 20, 100  # images per episode, and their height, from which statistics are made


def to_lerobot(
    recordings: Recordings, path: Path, images: bool = False, fps: float | None = None, quiet: bool = False
) -> dict[str, str]:
    """Write a LeRobotDataset v3, and return the names that features and cameras have in it."""
    require_libraries(path)
    fps = fps or recordings.fps
    if fps is None:
        raise ConfigError(f"{recordings.path} has no frame rate: pass --fps, the steps per second.")
    if images:
        keep_whole(recordings)
    names = lerobot_names(recordings, images)
    with new_folder(path) as folder:
        writer = _Writer(recordings, folder, names, fps, images)
        for index in tqdm(range(len(recordings)), unit="episode", disable=True if quiet else None):
            writer.add(index)
        writer.finish()
    return names


def lerobot_names(recordings: Recordings, images: bool) -> dict[str, str]:
    """{name here: name that LeRobot's policies look for}: action, observation.state, observation.images.<camera>."""
    names = {key: key for key in recordings.features}
    single = len(recordings.obs_keys) == 1
    for key in recordings.obs_keys:
        if not key.startswith("observation."):
            names[key] = "observation.state" if single else f"observation.{key}"
    if recordings.action_key:
        names[recordings.action_key] = "action"
    for camera in recordings.cameras if images else ():
        names[camera] = camera if camera.startswith("observation.") else f"observation.images.{camera}"
    if len(set(names.values())) < len(names) or any("/" in name for name in names.values()):
        raise ConfigError(f"{recordings.path}: names clash or have a slash in them: {', '.join(names.values())}.")
    return names


class _Writer:
    """Writes one episode after the other; only statistics stay in memory."""

    def __init__(self, recordings: Recordings, folder: Path, names: dict[str, str], fps: float, images: bool):
        self.recordings, self.folder, self.names, self.fps = recordings, folder, names, fps
        self.tasks = recordings.tasks or [""]
        self.shapes = {key: list(feature.shape) or [1] for key, feature in recordings.features.items()}
        self.data = DataWriter(folder)
        cameras = recordings.cameras if images else {}
        self.videos = {key: VideoWriter(folder, VIDEO_PATH, names[key], camera, fps) for key, camera in cameras.items()}
        self.rows: list[dict[str, Any]] = []
        self.stats: list[dict[str, Stats]] = []

    def add(self, index: int) -> None:
        number, length, start = len(self.rows), self.recordings.lengths[index], self.data.steps
        values = self.recordings.episode(index)
        columns = {self.names[key]: values[key].reshape(length, *shape) for key, shape in self.shapes.items()}
        columns |= {
            "timestamp": self._times(index, length),
            "frame_index": np.arange(length),
            "episode_index": np.full(length, number),
            "index": np.arange(start, start + length),
            "task_index": np.full(length, self.recordings.task_of[index]),
        }
        stats = {key: episode_stats(column) for key, column in columns.items()}
        row = {"episode_index": number, "tasks": [self.tasks[self.recordings.task_of[index]]], "length": length}
        row |= self.data.add(columns)
        for camera, video in self.videos.items():
            sample: list[np.ndarray] = []
            row |= video.add(self._sampled(index, camera, sample))
            stats[self.names[camera]] = image_stats(sample)
        self.rows.append(row)
        self.stats.append(stats)

    def _times(self, index: int, length: int) -> np.ndarray:
        """Seconds since the start. Recorded ones are kept if they are those of the videos, which have a fixed rate."""
        regular = (np.arange(length) / self.fps).astype(np.float32)
        recorded = self.recordings.timestamps(index)
        if recorded is not None and np.abs(recorded - regular).max() < 1e-4:
            return recorded.astype(np.float32)
        return regular

    def _sampled(self, index: int, camera: str, sample: list[np.ndarray]) -> Iterator[np.ndarray]:
        """The frames of an episode; some of them, made smaller, are added to `sample`."""
        every = max(1, self.recordings.lengths[index] // STATS_FRAMES)
        thin = max(1, self.recordings.cameras[camera].height // STATS_PIXELS)
        for step, frame in enumerate(self.recordings.frames(index, camera)):
            if step % every == 0:
                sample.append(frame[::thin, ::thin])
            yield frame

    def finish(self) -> None:
        self.data.close()
        for video in self.videos.values():
            video.close()
        write_tasks(self.folder, self.tasks)
        write_episodes(self.folder, self.rows, self.stats)
        total = {key: total_stats([stats[key] for stats in self.stats]) for key in self.stats[0]}
        listed = {key: {name: value.tolist() for name, value in stats.items()} for key, stats in total.items()}
        (self.folder / "meta/stats.json").write_text(json.dumps(listed, indent=4))
        (self.folder / "meta/info.json").write_text(json.dumps(self._info(), indent=4))

    def _info(self) -> dict[str, Any]:
        features: dict[str, Any] = {
            self.names[key]: {"dtype": feature.dtype, "shape": self.shapes[key], "names": feature.names}
            for key, feature in self.recordings.features.items()
        }
        features |= {video.key: video.feature() for video in self.videos.values()}
        features["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
        for key in ("frame_index", "episode_index", "index", "task_index"):
            features[key] = {"dtype": "int64", "shape": [1], "names": None}
        return {
            "codebase_version": "v3.0",
            "robot_type": None,
            "total_episodes": len(self.rows),
            "total_frames": self.data.steps,
            "total_tasks": len(self.tasks),
            "chunks_size": 1000,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200,
            "fps": int(self.fps) if float(self.fps).is_integer() else self.fps,
            "splits": {"train": f"0:{len(self.rows)}"},
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if self.videos else None,
            "features": features,
        }
