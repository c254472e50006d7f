"""Frames of cameras, decoded once, scaled, and kept in a file."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from diffusion_policy.dataset.recordings import Recordings
from diffusion_policy.storage.episode_frames import episode_frames
from diffusion_policy.storage.frame_cache import FileFrames, MemoryFrames

#: Where frames go if the folder of the recording cannot be written.
FALLBACK = pathlib.Path("data/frame_cache")


def camera_frames(
    recordings: Recordings,
    episodes: Sequence[int],
    sizes: Mapping[str, tuple[int, int]],
    cache_dir: str | os.PathLike | None = None,
) -> FileFrames | MemoryFrames:
    """The images of every step of `episodes`, those of all cameras concatenated, scaled to {camera: (height, width)}.

    The file is <recording>.frames-<checksum>.npy. The checksum covers the arguments and the size and time of every file
    of the recording, so other frames are in another file.
    """
    path = recordings.path.resolve()
    source = json.dumps([list(episodes), list(sizes.items()), file_stats(path)])
    name = f"{path.name}.frames-{hashlib.sha256(source.encode()).hexdigest()[:12]}.npy"

    def read(number: int) -> Iterator[bytes]:
        cameras = [scaled(recordings, episodes[number], camera, size) for camera, size in sizes.items()]
        for images in zip(*cameras, strict=True):
            yield b"".join(image.tobytes() for image in images)

    lengths = [recordings.lengths[i] for i in episodes]
    frame_bytes = sum(3 * height * width for height, width in sizes.values())
    return episode_frames(str(cache_folder(path, cache_dir) / name), lengths, frame_bytes, read)


def scaled(recordings: Recordings, index: int, camera: str, size: tuple[int, int]) -> Iterator[np.ndarray]:
    """The frames (height, width, 3) of an episode."""
    import cv2  # here, because it delays the first training step

    height, width = size
    for frame in recordings.frames(index, camera):
        if frame.shape[:2] == (height, width):
            yield np.ascontiguousarray(frame)
        else:
            yield cv2.resize(frame, (width, height), interpolation=cv2.INTER_AREA)


def cache_folder(path: pathlib.Path, asked: str | os.PathLike | None) -> pathlib.Path:
    if asked is not None:
        return pathlib.Path(asked)
    return path.parent if os.access(path.parent, os.W_OK) else FALLBACK


def file_stats(path: pathlib.Path) -> list[tuple[Any, ...]]:
    """Name, size and time of a file, or of every file in a folder."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    stats = [(str(file.relative_to(path.parent)), file.stat()) for file in files]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
