"""The interface that all formats of recordings share."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diffusion_policy.common.errors import DataError
from diffusion_policy.dataset.recordings.layout import Camera, Feature
from diffusion_policy.storage.reader_process import ReaderPool

FRAME_BLOCK_BYTES = 8e6


class Recordings:
    """Episodes of a robot. Nothing is kept in memory but a description of each.

    kind: the format. fps: steps per second, None if the recording does not say. lengths, episode_names, task_of: per
    usable episode its steps, its name and file for messages, and its task as a number in `tasks`. left_out: why other
    episodes are not usable, with `skip_broken`.

    A format fills these in `_open`, calls `_add` for each episode, and has `_read` and `_frames`.
    """

    kind = ""

    def __init__(self, path: str | os.PathLike, skip_broken: bool = False, **arguments: Any):
        self.path, self.skip_broken = Path(path), skip_broken
        self.fps: float | None = None
        self.features: dict[str, Feature] = {}
        self.cameras: dict[str, Camera] = {}
        self.lengths: list[int] = []
        self.episode_names: list[str] = []
        self.task_of: list[int] = []
        self.left_out: list[str] = []
        self.tasks: list[str] = []
        self.places: list[Any] = []
        self.pool = ReaderPool()
        self._open(**arguments)
        if skip_broken:
            self._keep_readable()
        if not self.lengths:
            reasons = f": {self.left_out[0]}" if self.left_out else "."
            raise DataError(f"{self.path} has no usable episodes{reasons}")

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}: {self.kind}, {len(self)} episodes)"

    # ------------------------------------------------------------------ for users
    def episode(self, index: int) -> dict[str, np.ndarray]:
        """{feature: (T, ...)} of one episode, checked against `features` and `lengths`."""
        with self._naming(index):
            arrays = self._read(index)
            for key, feature in self.features.items():
                expected = (self.lengths[index], *feature.shape)
                if arrays[key].shape != expected:
                    raise DataError(f"{key} has shape {arrays[key].shape}, expected is {expected}.")
        return {key: arrays[key] for key in self.features}

    def timestamps(self, index: int) -> np.ndarray | None:
        """(T,) seconds, or None if the recording has none."""
        with self._naming(index):
            return self._timestamps(index)

    def has_frames(self, index: int, camera: str) -> bool:
        """Whether the images of an episode are there."""
        return camera in self.cameras

    def short_name(self, index: int) -> str:
        """The name of an episode without its file."""
        return self.episode_names[index].split(" (")[0]

    def frame_count(self, index: int, camera: str) -> int | None:
        """How many images an episode has, if that is known without decoding them."""
        return None

    def frames(self, index: int, camera: str, count: int | None = None) -> Iterator[np.ndarray]:
        """The images of an episode, one per step, decoded while you iterate; `count`: only so many of the first."""
        expected = self.lengths[index] if count is None else min(count, self.lengths[index])
        with self._naming(index):
            if camera not in self.cameras:
                raise DataError(f"there is no camera {camera!r}; the cameras are: {', '.join(self.cameras) or 'none'}.")
            shape, found = self.cameras[camera].shape, 0
            block = max(1, int(FRAME_BLOCK_BYTES / math.prod(shape)))
            with contextlib.closing(self._frames(index, camera, expected, block)) as blocks:  # type: ignore[type-var]
                for images in blocks:
                    if list(images.shape[1:]) != shape or images.dtype != np.uint8:
                        raise DataError(f"{camera} has images of shape {images.shape[1:]}, expected is {shape}.")
                    found += len(images)
                    yield from images
            if found != expected:
                raise DataError(f"{camera} has {found} images, but {expected} steps.")

    def keep(self, indices: Sequence[int]) -> None:
        """Forget all other episodes."""
        for name in ("lengths", "episode_names", "task_of", "places"):
            values = getattr(self, name)
            setattr(self, name, [values[index] for index in indices])

    @property
    def action_key(self) -> str | None:
        """The feature that holds the actions, if one has the usual name."""
        return next((key for key in ("action", "actions") if key in self.features), None)

    @property
    def obs_keys(self) -> list[str]:
        """The features that are observations by their name; without one, all vectors but the actions."""
        known = [key for key in self.features if key.startswith("observation.") or key in ("state", "qpos")]
        others = ("reward", "done", "success", "episode_ends")
        vectors = [
            key
            for key, feature in self.features.items()
            if len(feature.shape) == 1 and not key.startswith("action") and not any(word in key for word in others)
        ]
        return [key for key in known if len(self.features[key].shape) == 1] or vectors

    # ------------------------------------------------------------------ for the formats
    def _open(self) -> None:
        raise NotImplementedError

    def _read(self, index: int) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def _frames(self, index: int, camera: str, count: int, block: int) -> Iterator[np.ndarray]:
        raise NotImplementedError

    def _timestamps(self, index: int) -> np.ndarray | None:
        return None

    def _add(self, name: str, length: int, place: Any, task: int = 0) -> None:
        self.episode_names.append(name)
        self.lengths.append(length)
        self.places.append(place)
        self.task_of.append(task)

    def _relative(self, file: Path) -> str:
        return str(file.relative_to(self.path)) if file.is_relative_to(self.path) and file != self.path else str(file)

    @contextlib.contextmanager
    def _leaving_out(self) -> Iterator[None]:
        """Around the work on one episode: its error is noted instead of raised, with `skip_broken`."""
        try:
            yield
        except DataError as error:
            if not self.skip_broken:
                raise type(error)(f"{error} (skip_broken leaves such episodes out.)") from error
            self.left_out.append(str(error))

    @contextlib.contextmanager
    def _naming(self, index: int) -> Iterator[None]:
        """Errors inside name the episode."""
        try:
            yield
        except DataError as error:
            raise type(error)(f"{self.episode_names[index]}: {error}") from error

    def _keep_readable(self) -> None:
        """Read the numbers of every episode, and keep those without an error."""
        good = []
        for index in range(len(self)):
            with self._leaving_out():
                self.episode(index)
                self.timestamps(index)
                good.append(index)
        self.keep(good)
