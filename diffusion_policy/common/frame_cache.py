"""Frames that are made once, kept in a plain .npy file beside their dataset, and mapped into memory instead of read."""
import logging
import math
import os

import numpy as np

from diffusion_policy.common.checkpoint_io import write_atomically
from diffusion_policy.common.memory import readable_bytes

log = logging.getLogger(__name__)


def cached_frames(file: str, shape: tuple, write, in_memory, check=lambda frames: True) -> np.ndarray:
    """uint8 array of `shape`, mapped from `file`, which is made if it is missing or not what it should be.

    write(out) writes the array's bytes to an open file that ends there; it becomes `file` only when it is complete. check(frames) says
    whether an existing file's content is right, as far as that can be seen. in_memory() is the array where no file can be written.
    """
    if os.path.isfile(file):
        try:
            frames = np.load(file, mmap_mode="c")
            if frames.shape == shape and frames.dtype == np.uint8 and check(frames):
                return frames
        except (ValueError, OSError, EOFError):
            pass
        log.warning("%s is damaged or was made in another way: it is made again", file)

    log.info("images of %s are made, once, and kept in %s", readable_bytes(math.prod(shape)), file)

    def content(out) -> None:
        np.lib.format.write_array_header_1_0(out, {"descr": "|u1", "fortran_order": False, "shape": shape})
        out.flush()     # a process that `write` starts may append to the file by its name
        write(out)

    try:
        write_atomically(file, content)
    except OSError as error:
        log.warning("%s cannot be written (%s): the images are kept in memory and made again next time", file, error)
        return in_memory()
    return np.load(file, mmap_mode="c")
