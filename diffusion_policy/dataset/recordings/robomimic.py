"""robomimic's HDF5 files: data/demo_<i>/actions and obs/<key>, images among them."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from diffusion_policy.common.errors import DataError
from diffusion_policy.dataset.recordings.base import Recordings
from diffusion_policy.dataset.recordings.hdf5 import MEMORY_PER_BYTE, natural_order
from diffusion_policy.dataset.recordings.layout import Camera, Feature, check_same_layout, is_camera


class RobomimicRecordings(Recordings):
    """The array `actions` is the feature action; observations have their own names, without obs/."""

    kind = "robomimic hdf5"

    def _open(self, members: dict[str, Any]) -> None:  # type: ignore[override]
        demos: dict[str, dict[str, tuple]] = {}
        for name, layout in members["datasets"].items():
            parts = name.split("/", 2)
            if len(parts) == 3 and parts[0] == "data":
                demos.setdefault(parts[1], {})[parts[2]] = layout
        self.fps = _control_rate(members["attributes"])
        first: dict[str, tuple] | None = None
        for demo in sorted(demos, key=natural_order):
            with self._leaving_out():
                arrays = demos[demo]
                if "actions" not in arrays:
                    raise DataError(f"{self.path}: data/{demo} has no actions: its recording was not finished.")
                length = arrays["actions"][0][0]
                shapes = {key: shape[1:] for key, (shape, _) in arrays.items()}
                if first is None:
                    first = shapes
                    self._describe(arrays)
                check_same_layout(first, shapes, f"data/{demo}")
                self._add(f"{demo} ({self.path.name})", length, f"data/{demo}/")

    def _describe(self, arrays: dict[str, tuple]) -> None:
        self.names = {"action" if name == "actions" else name.removeprefix("obs/"): name for name in arrays}
        for key, name in self.names.items():
            shape, dtype = arrays[name]
            if is_camera(shape[1:], dtype) and np.dtype(dtype) == np.uint8:
                self.cameras[key] = Camera(*shape[1:3])
            else:
                self.features[key] = Feature(shape[1:], np.dtype(dtype).name)

    @property
    def obs_keys(self) -> list[str]:
        """The low-dimensional observations."""
        return [key for key in self.features if self.names[key].startswith("obs/")]

    def _read(self, index: int) -> dict[str, np.ndarray]:
        size = 8 * self.lengths[index] * sum(feature.size for feature in self.features.values())
        names = [self.names[key] for key in self.features]
        _, arrays = self.pool.ask_once(
            "hdf5_arrays", self.path, group=self.places[index], keys=names, memory=MEMORY_PER_BYTE * size
        )
        return {key: arrays[self.names[key]] for key in self.features}

    def _frames(self, index: int, camera: str, count: int, block: int) -> Iterator[np.ndarray]:
        shape = self.cameras[camera].shape
        key = self.places[index] + self.names[camera]
        memory = MEMORY_PER_BYTE * block * math.prod(shape)
        for _, arrays in self.pool.ask(
            "hdf5_images", self.path, key=key, shape=shape, count=count, block=block, memory=memory
        ):
            yield arrays["frames"]


def _control_rate(attributes: dict[str, str]) -> float | None:
    """Steps per second, from the description of the environment."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        rate = float(json.loads(attributes["env_args"])["env_kwargs"]["control_freq"])
        return rate if 0 < rate < 1e5 else None
    return None
