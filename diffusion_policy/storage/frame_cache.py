"""Frames that are made once, kept in a plain .npy file beside their dataset, and read from there batch by batch."""

import logging
import math
import os
import weakref

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
        # Whole rows of bytes: many times faster than indexing an array of more dimensions.
        return self.rows.index_select(0, rows)


class FileFrames:
    """Frames (M, ...) uint8 in an .npy file, of which memory holds what `take` returned and no more.

    The file is not mapped: all that a process has ever looked at in a mapping counts as its memory, and if the file is cut short
    meanwhile the process is killed. Reading takes as long. Worker processes read the same file, forked or not.
    """

    def __init__(self, file: str):
        frames = np.load(file, mmap_mode="r")  # where they begin; also checks that the file is as long as it says
        self.file, self.length, self.bytes, self.offset = file, len(frames), math.prod(frames.shape[1:]), frames.offset
        self.handle = os.open(file, os.O_RDONLY)
        weakref.finalize(self, os.close, self.handle)

    def __reduce__(self):
        return FileFrames, (self.file,)

    def __len__(self) -> int:
        return self.length

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: (N,) -> the bytes of these frames, (N, bytes) uint8."""
        rows = rows.numpy()
        out = np.empty((len(rows), self.bytes), np.uint8)
        starts = np.flatnonzero(
            np.diff(rows, prepend=-2) != 1
        ).tolist()  # the steps of a window follow each other: one reading
        for start, end in zip(starts, [*starts[1:], len(rows)]):
            self._read(out[start:end], self.offset + int(rows[start]) * self.bytes)
        return torch.from_numpy(out)

    def _read(self, out: np.ndarray, offset: int):
        left = memoryview(out).cast("B")
        while left:
            size = os.preadv(self.handle, [left], offset)  # not seek and read: forked processes share a file's position
            if not size:
                raise DataError(f"{self.file} was cut short while it was in use. Start again: it will be made anew.")
            left, offset = left[size:], offset + size


def cached_frames(file: str, shape: tuple, write, in_memory, check=lambda frames: True) -> FileFrames | MemoryFrames:
    """Frames of `shape`, uint8, in `file`, which is made if it is missing or not what it should be.

    write(out) writes the frames' bytes to an open file that ends there; it becomes `file` only when it is complete. check(frames) says
    whether an existing file's content is right, as far as that can be seen. in_memory() are the frames where no file can be written.
    """
    if os.path.isfile(file):
        try:
            frames = np.load(file, mmap_mode="r")
            if frames.shape == shape and frames.dtype == np.uint8 and check(frames):
                return FileFrames(file)
        except (ValueError, OSError, EOFError):
            pass
        log.warning("%s is damaged or was made in another way: it is made again", file)
    log.info("images of %s are made, once, and kept in %s", readable_bytes(math.prod(shape)), file)

    def content(out) -> None:
        np.lib.format.write_array_header_1_0(out, {"descr": "|u1", "fortran_order": False, "shape": shape})
        out.flush()  # a process that `write` starts may append to the file by its name
        write(out)

    try:
        write_atomically(file, content)
    except OSError as error:
        log.warning("%s cannot be written (%s): the images are kept in memory and made again next time", file, error)
        return MemoryFrames(in_memory())
    return FileFrames(file)
