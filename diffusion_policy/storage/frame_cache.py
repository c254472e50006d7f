"""Image frames that are rendered or decoded once, cached in a .npy file, and read from there batch by batch."""

from __future__ import annotations

import itertools
import logging
import math
import os
import weakref
from collections.abc import Callable
from typing import IO, Any

import numpy as np
import torch

from diffusion_policy.common.errors import DataError
from diffusion_policy.common.memory import readable_bytes
from diffusion_policy.storage.atomic import write_atomically

log = logging.getLogger(__name__)


class MemoryFrames:
    """Frames (M, ...) uint8 in memory."""

    def __init__(self, frames: np.ndarray):
        self.rows = torch.from_numpy(frames).flatten(1)

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: (N,) -> the bytes of these frames, (N, bytes) uint8."""
        # Whole rows of bytes: much faster than indexing an array of more dimensions.
        return self.rows.index_select(0, rows)


class FileFrames:
    """Frames (M, ...) uint8 in an .npy file; only the result of `take` is in memory.

    The file is not mapped: pages of a mapping count as memory of the process, and the process is killed if the file is
    truncated meanwhile. Reading is as fast. Worker processes read the same file, forked or not.
    """

    def __init__(self, file: str):
        frames = np.load(file, mmap_mode="r")  # to find their offset; also checks the length of the file
        self.file, self.length, self.bytes, self.offset = file, len(frames), math.prod(frames.shape[1:]), frames.offset
        self.handle = os.open(file, os.O_RDONLY)
        weakref.finalize(self, os.close, self.handle)

    def __reduce__(self) -> tuple:
        return FileFrames, (self.file,)

    def __len__(self) -> int:
        return self.length

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: (N,) -> the bytes of these frames, (N, bytes) uint8."""
        numbers = rows.numpy()
        out = np.empty((len(numbers), self.bytes), np.uint8)
        starts = np.flatnonzero(np.diff(numbers, prepend=-2) != 1).tolist()  # consecutive rows need one read
        for start, end in itertools.pairwise([*starts, len(numbers)]):
            self._read(out[start:end], self.offset + int(numbers[start]) * self.bytes)
        return torch.from_numpy(out)

    def _read(self, out: np.ndarray, offset: int) -> None:
        left = out.data.cast("B")
        while left:
            size = os.preadv(self.handle, [left], offset)  # forked processes share a file position, so no seek
            if not size:
                raise DataError(f"{self.file} was cut short while it was in use. Start again to rebuild it.")
            left, offset = left[size:], offset + size


def cached_frames(
    file: str,
    shape: tuple,
    write: Callable[[IO[bytes]], Any],
    in_memory: Callable[[], np.ndarray],
    check: Callable[[np.ndarray], bool] = lambda frames: True,
) -> FileFrames | MemoryFrames:
    """Frames of `shape`, uint8, in `file`, which is written if it is missing or wrong.

    Args:
        file: the .npy file.
        shape: of all frames together, (M, ...).
        write: write(out) appends the bytes of all frames to an open file, which becomes `file` once it is complete.
        in_memory: returns the frames, for the case that no file can be written.
        check: whether the content of an existing file looks right.
    """
    if os.path.isfile(file):
        try:
            frames = np.load(file, mmap_mode="r")
            if frames.shape == shape and frames.dtype == np.uint8 and check(frames):
                return FileFrames(file)
        except (ValueError, OSError, EOFError):
            pass
        log.warning("%s is damaged or of another version: rebuilding it", file)
    log.info("caching images of %s, once, in %s", readable_bytes(math.prod(shape)), file)

    def content(out: IO[bytes]) -> None:
        np.lib.format.write_array_header_1_0(out, {"descr": "|u1", "fortran_order": False, "shape": shape})
        out.flush()  # `write` may start a process that appends to the file by name
        write(out)

    try:
        write_atomically(file, content)
    except OSError as error:
        log.warning("%s cannot be written (%s): the images are kept in memory and rebuilt next time", file, error)
        return MemoryFrames(in_memory())
    return FileFrames(file)
