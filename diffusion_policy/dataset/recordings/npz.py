"""Episodes as .npz files of numpy arrays."""

from __future__ import annotations

import itertools
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from diffusion_policy.common.errors import DataError
from diffusion_policy.common.memory import available_bytes, readable_bytes
from diffusion_policy.dataset.recordings.base import Recordings
from diffusion_policy.dataset.recordings.hdf5 import natural_order
from diffusion_policy.dataset.recordings.layout import Camera, Feature, check_same_layout, is_camera

MAX_FILES = 1_000_000


class NpzRecordings(Recordings):
    """One episode per file, or several with an array `episode_ends`. A number `fps` is the rate.

    Arrays with one row per step are features, or cameras if they are uint8 images; others are ignored.
    """

    kind = "npz folder"

    def _open(self) -> None:
        self.held: tuple[Path, dict[str, np.ndarray]] | None = None
        first: dict[str, tuple] | None = None
        files = sorted(self.path.glob("*.npz"), key=lambda file: natural_order(file.name)) or [self.path]
        for file in files:
            with self._leaving_out():
                headers = _headers(file)
                length = _steps(headers, file)
                ends = self._ends(file, headers, length)
                layout = {key: value for key, value in headers.items() if value[0][:1] == (length,)}
                shapes = {key: shape[1:] for key, (shape, _) in layout.items()}
                fps = float(_array(file, "fps", headers)) if headers.get("fps", ((0,),))[0] == () else None
                if first is None:
                    first, self.fps = shapes, fps
                    self._describe(layout)
                check_same_layout(first, shapes, file.name)
                if fps != self.fps:
                    raise DataError(
                        f"{file.name} has {fps} steps per second, the first file {self.fps}: the rates differ."
                    )
                for number, (start, end) in enumerate(itertools.pairwise([0, *ends])):
                    name = file.name if len(ends) == 1 else f"episode {number} ({file.name})"
                    self._add(name, end - start, (file, slice(start, end)))

    def _ends(self, file: Path, headers: dict, length: int) -> list[int]:
        if "episode_ends" not in headers:
            return [length]
        ends = _array(file, "episode_ends", headers)
        if (
            ends.ndim != 1
            or ends.dtype.kind not in "iu"
            or (np.diff(ends, prepend=0) <= 0).any()
            or ends[-1:].tolist() != [length]
        ):
            raise DataError(f"{file}: episode_ends must increase up to the number of steps, {length}.")
        return ends.tolist()

    def _describe(self, layout: dict[str, tuple[tuple, np.dtype]]) -> None:
        for key, (shape, dtype) in layout.items():
            if is_camera(shape[1:], dtype) and dtype == np.uint8:
                self.cameras[key] = Camera(*shape[1:3])
            elif key not in ("timestamp", "episode_ends"):
                self.features[key] = Feature(shape[1:], dtype.name)
        self.has_times = "timestamp" in layout

    def _values(self, index: int, key: str) -> np.ndarray:
        file, rows = self.places[index]
        held = self.held  # another thread may replace it
        if held is None or held[0] != file:
            held = self.held = (file, {})
        if key not in held[1]:
            held[1][key] = _array(file, key, _headers(file))
        return held[1][key][rows]

    def _read(self, index: int) -> dict[str, np.ndarray]:
        return {key: self._values(index, key) for key in self.features}

    def _timestamps(self, index: int) -> np.ndarray | None:
        return self._values(index, "timestamp").reshape(self.lengths[index]) if self.has_times else None

    def _frames(self, index: int, camera: str, count: int, block: int) -> Iterator[np.ndarray]:
        yield self._values(index, camera)[:count]


def _headers(file: Path) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """{key: (shape, dtype)} of a file, without its values. Sizes are compared with those of the archive."""
    headers = {}
    if not file.is_file():
        raise DataError(f"{file} is not a regular file.")
    try:
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist()[:1000]:
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise DataError(f"{file}: {info.filename} is compressed by a method other than deflate.")
                with archive.open(info) as member:
                    version = np.lib.format.read_magic(member)
                    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
                    shape, _, dtype = read[version](member)
                    size = int(np.prod(shape, dtype=object)) * dtype.itemsize + member.tell()
                if dtype.kind in "biuf" and size == info.file_size:
                    headers[info.filename.removesuffix(".npy")] = (shape, dtype)
                elif dtype.kind in "biuf":
                    raise DataError(f"{file}: {info.filename} declares {size} bytes, and has {info.file_size}.")
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{file} cannot be read, it is not an .npz file or was cut short: {error}.") from error
    return headers


def _steps(headers: dict[str, tuple], file: Path) -> int:
    """The number of steps: that of the actions, or of the first array."""
    arrays = {key: shape for key, (shape, _) in headers.items() if shape and key != "episode_ends"}
    if not arrays:
        raise DataError(f"{file} has no arrays of numbers.")
    key = next((key for key in ("action", "actions") if key in arrays), next(iter(arrays)))
    if not arrays[key][0]:
        raise DataError(f"{file}: {key} has no steps.")
    return arrays[key][0]


def _array(file: Path, key: str, headers: dict[str, tuple]) -> np.ndarray:
    if key not in headers:
        raise DataError(f"{file} has no array {key!r}.")
    shape, dtype = headers[key]
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if size > available_bytes() / 2:
        raise DataError(f"{file}: {key} declares {readable_bytes(size)}, more than can be held in memory.")
    try:
        with np.load(file, allow_pickle=False) as archive:
            return archive[key]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{file}: {key} cannot be read, the file is damaged: {error}.") from error
