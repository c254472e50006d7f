"""Replay buffers in zarr, those of `inspect_data --convert` and of Diffusion Policy among them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from diffusion_policy.common.errors import DataError
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.dataset.recordings.base import Recordings
from diffusion_policy.dataset.recordings.layout import Camera, Feature, is_camera
from diffusion_policy.storage.zarr_checks import check_chunks

ATTRIBUTE = "recording"  # {fps, tasks, task_of, names} that the arrays cannot hold


class ReplayBufferRecordings(Recordings):
    """data/<key>: images (T, H, W, 3) are cameras, `timestamp` are seconds, the other arrays features."""

    kind = "replay buffer zarr"

    def _open(self) -> None:
        self.buffer = ReplayBuffer.create_from_path(self.path)
        facts = self.buffer.root.attrs.get(ATTRIBUTE, {})
        facts = facts if isinstance(facts, dict) else {}
        for key, array in self.buffer.items():
            check_chunks(array)
            shape = tuple(array.shape[1:])
            if is_camera(shape, array.dtype):
                self.cameras[key] = Camera(*shape[:2])
            elif key != "timestamp" and array.dtype.kind in "biuf":
                self.features[key] = Feature(shape, array.dtype.name, _names(facts.get("names"), key, shape))
        self.tasks = [str(task) for task in _list(facts.get("tasks"))]
        ends = self.buffer.episode_ends.tolist()
        task_of = [int(number) for number in _list(facts.get("task_of")) if isinstance(number, int)]
        task_of = task_of if len(task_of) == len(ends) else [0] * len(ends)
        for number, (start, end) in enumerate(itertools.pairwise([0, *ends])):
            self._add(f"episode {number} ({self.path.name})", end - start, slice(start, end), task_of[number])
        fps = facts.get("fps")
        self.fps = float(fps) if isinstance(fps, (int, float)) and 0 < fps < 1e5 else self._measured_rate()

    def _measured_rate(self) -> float | None:
        """Steps per second, from the time stamps of the first episode."""
        times = self._timestamps(0)
        step = float(np.median(np.diff(times))) if times is not None and len(times) > 1 else 0.0
        return round(1 / step, 3) if step > 0 else None

    def _values(self, key: str, rows: slice) -> np.ndarray:
        try:
            return np.asarray(self.buffer[key][rows])
        except MemoryError:
            raise
        except Exception as error:  # every codec has its own exceptions
            raise DataError(f"data/{key} cannot be read, a chunk of it is damaged: {error}.") from error

    def _read(self, index: int) -> dict[str, np.ndarray]:
        return {key: self._values(key, self.places[index]) for key in self.features}

    def _timestamps(self, index: int) -> np.ndarray | None:
        if "timestamp" not in self.buffer:
            return None
        return self._values("timestamp", self.places[index]).reshape(self.lengths[index])

    def _frames(self, index: int, camera: str, count: int, block: int) -> Iterator[np.ndarray]:
        start = self.places[index].start
        for begin in range(start, start + count, block):
            images = self._values(camera, slice(begin, min(begin + block, start + count)))
            with np.errstate(invalid="ignore"):
                whole = images.astype(np.uint8)
            if not np.array_equal(whole, images):
                raise DataError(f"data/{camera} holds values other than whole numbers from 0 to 255: store uint8.")
            yield whole


def _list(value: Any) -> list:
    return value if isinstance(value, list) else []


def _names(names: Any, key: str, shape: tuple[int, ...]) -> list[str] | None:
    value = names.get(key) if isinstance(names, dict) else None
    return [str(name) for name in value] if isinstance(value, list) and shape == (len(value),) else None
