"""Episodes as ALOHA and ACT record them: one HDF5 file each, images raw or as JPEG."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from diffusion_policy.common.errors import DataError
from diffusion_policy.dataset.recordings.base import Recordings
from diffusion_policy.dataset.recordings.hdf5 import MEMORY_PER_BYTE, files_of, members
from diffusion_policy.dataset.recordings.layout import Camera, Feature, check_same_layout

OBSERVATIONS, IMAGES = "observations/", "observations/images/"


class AlohaRecordings(Recordings):
    """action, and observations/<qpos, qvel, ...> under their last name; cameras of observations/images.

    The files have no frame rate.
    """

    kind = "aloha hdf5"

    def _open(self) -> None:
        first: dict[str, tuple] | None = None
        for file in files_of(self.path):
            with self._leaving_out():
                layout = self._layout(file)
                length = layout["action"][0][0]
                shapes = {key: shape[1:] for key, (shape, _, _) in layout.items()}
                if first is None:
                    first = shapes
                    self._describe(file, layout)
                check_same_layout(first, shapes, file.name)
                self._add(file.name, length, file)

    def _layout(self, file: Path) -> dict[str, tuple[tuple, str, str]]:
        """{feature or camera: (shape, dtype, name in the file)}; encoded images have the shape (T, 0)."""
        datasets = members(file, self.pool)["datasets"]
        if "action" not in datasets or not any(name.startswith(OBSERVATIONS) for name in datasets):
            raise DataError(
                f"{file} is not an episode of ALOHA: it has no action or no observations, but "
                f"{', '.join(list(datasets)[:8]) or 'nothing'}. Its recording may not have been finished."
            )
        length = datasets["action"][0][0]
        layout = {}
        for name, (shape, dtype) in datasets.items():
            key = name.removeprefix(IMAGES).removeprefix(OBSERVATIONS)
            if "/" in key:
                continue
            if shape[:1] != (length,):
                raise DataError(f"{file}: {name} has {shape[:1]} steps, and action {length}: the recording was cut.")
            encoded = name.startswith(IMAGES) and len(shape) == 2
            layout[key] = ((length, 0) if encoded else shape, dtype, name)
        return layout

    def _describe(self, file: Path, layout: dict[str, tuple[tuple, str, str]]) -> None:
        self.names = {key: name for key, (_, _, name) in layout.items()}
        self.encoded = {
            key for key, (shape, _, name) in layout.items() if name.startswith(IMAGES) and shape[1:] == (0,)
        }
        for key, (shape, dtype, name) in layout.items():
            if key in self.encoded:
                facts, _ = self.pool.ask_once("hdf5_image_size", file, key=name)
                self.cameras[key] = Camera(facts["height"], facts["width"])
            elif name.startswith(IMAGES):
                if len(shape) != 4 or shape[3] != 3:
                    raise DataError(f"{file}: {name} has shape {shape}, not that of images (T, H, W, 3).")
                self.cameras[key] = Camera(*shape[1:3])
            else:
                self.features[key] = Feature(shape[1:], np.dtype(dtype).name)

    def _read(self, index: int) -> dict[str, np.ndarray]:
        size = 8 * self.lengths[index] * sum(feature.size for feature in self.features.values())
        _, arrays = self.pool.ask_once(
            "hdf5_arrays",
            self.places[index],
            group="",
            keys=[self.names[key] for key in self.features],
            memory=MEMORY_PER_BYTE * size,
        )
        return {key: arrays[self.names[key]] for key in self.features}

    def _frames(self, index: int, camera: str, count: int, block: int) -> Iterator[np.ndarray]:
        shape = self.cameras[camera].shape
        arguments: dict[str, Any] = dict(key=self.names[camera], shape=shape, count=count, block=block)
        arguments |= dict(encoded=camera in self.encoded, memory=MEMORY_PER_BYTE * block * math.prod(shape))
        for _, arrays in self.pool.ask("hdf5_images", self.places[index], **arguments):
            yield arrays["frames"]
