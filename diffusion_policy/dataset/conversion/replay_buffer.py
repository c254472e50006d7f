"""Recordings as a replay buffer in zarr."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from diffusion_policy.common.replay_buffer import ReplayBuffer, get_optimal_chunks
from diffusion_policy.dataset.conversion.common import keep_whole, new_folder
from diffusion_policy.dataset.recordings import Recordings
from diffusion_policy.dataset.recordings.replay_buffer import ATTRIBUTE
from diffusion_policy.storage import zarr_io


class _Images:
    """The images of a camera as one array (steps, H, W, 3) that is read from its start to its end, once."""

    ndim, dtype = 4, np.dtype(np.uint8)

    def __init__(self, recordings: Recordings, camera: str, quiet: bool):
        self.shape = (sum(recordings.lengths), *recordings.cameras[camera].shape)
        self.frames = self._all(recordings, camera, quiet)

    def _all(self, recordings: Recordings, camera: str, quiet: bool) -> Iterator[np.ndarray]:
        with tqdm(total=self.shape[0], desc=camera, unit="frame", disable=True if quiet else None) as bar:
            for index in range(len(recordings)):
                for frame in recordings.frames(index, camera):
                    yield frame
                    bar.update()

    def __getitem__(self, rows: slice) -> np.ndarray:
        return np.stack([next(self.frames) for _ in range(*rows.indices(self.shape[0]))])


def to_zarr(recordings: Recordings, path: Path, images: bool = False, quiet: bool = False) -> None:
    """Write a replay buffer with the features, time stamps and, if asked for, images; one episode is in memory."""
    if images:
        keep_whole(recordings)
    with new_folder(path) as folder:
        buffer = ReplayBuffer.create_empty_zarr(str(folder))
        buffer.root.attrs[ATTRIBUTE] = _facts(recordings)
        for index in tqdm(range(len(recordings)), unit="episode", disable=True if quiet else None):
            values = recordings.episode(index)
            times = recordings.timestamps(index)
            buffer.add_episode(values if times is None else {**values, "timestamp": times})
        if images:
            checksums = zarr_io.take_checksums(buffer.root)
            for camera in recordings.cameras:
                source: Any = _Images(recordings, camera, quiet)
                chunks = (1, *get_optimal_chunks(source.shape, source.dtype)[1:])  # batches read single frames
                compressor = ReplayBuffer.resolve_compressor("disk")
                checksums[f"data/{camera}"] = zarr_io.write_array(buffer.data, camera, source, chunks, compressor)
            zarr_io.set_checksums(buffer.root, checksums)


def _facts(recordings: Recordings) -> dict[str, Any]:
    """Metadata that the arrays cannot hold, for the reader of replay buffers."""
    names = {key: feature.names for key, feature in recordings.features.items() if feature.names}
    return {"fps": recordings.fps, "tasks": recordings.tasks, "task_of": recordings.task_of, "names": names}
