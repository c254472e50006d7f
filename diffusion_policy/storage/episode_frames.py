"""A frame cache that is filled episode by episode, by several threads, and continued after a kill."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO

import numpy as np
from tqdm import tqdm

from diffusion_policy.common.errors import DataError, StorageError
from diffusion_policy.common.memory import readable_bytes
from diffusion_policy.storage.atomic import FULL_DISK, reason
from diffusion_policy.storage.frame_cache import FileFrames, MemoryFrames

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)
Read = Callable[[int], Iterator[bytes]]


def episode_frames(file: str, lengths: Sequence[int], frame_bytes: int, read: Read) -> FileFrames | MemoryFrames:
    """Frames (sum of lengths, frame_bytes) uint8 of all episodes, in the .npy file `file`.

    The file is written as <file>.partial. The journal <file>.done lists the episodes in it that are complete, so that a
    process that was killed is continued. A second process waits for the first. If the folder cannot be written, the
    frames are kept in memory.

    Args:
        file: its name must differ for other content.
        lengths: frames of each episode.
        frame_bytes: size of a frame.
        read: read(number of an episode) yields its frames; called by several threads.
    """
    if (frames := _opened(file, (sum(lengths), frame_bytes))) is not None:
        return frames
    total = readable_bytes(sum(lengths) * frame_bytes)
    try:
        os.makedirs(os.path.dirname(os.path.abspath(file)), exist_ok=True)
        journal = open(f"{file}.done", "a+b", buffering=0)  # noqa: SIM115 - closed below
    except OSError as error:
        log.warning("%s cannot be written (%s): %s of frames are kept in memory", file, error, total)
        episodes = [np.frombuffer(b"".join(read(i)), np.uint8) for i in range(len(lengths))]
        return MemoryFrames(np.concatenate(episodes).reshape(-1, frame_bytes))
    with contextlib.closing(journal):
        if fcntl is not None:
            fcntl.flock(journal, fcntl.LOCK_EX)
        if not os.path.isfile(file):  # another process may have written it meanwhile
            log.info("decoding %s of frames, once, into %s", total, file)
            _fill(file, journal, list(lengths), frame_bytes, read)
    return FileFrames(file)


def _opened(file: str, shape: tuple[int, int]) -> FileFrames | None:
    """The complete file; None if there is none. A damaged one is removed."""
    if not os.path.isfile(file):
        return None
    with contextlib.suppress(ValueError, OSError, EOFError):
        frames = np.load(file, mmap_mode="r")
        if frames.shape == shape and frames.dtype == np.uint8:
            return FileFrames(file)
    log.warning("%s is damaged: decoding it again", file)
    os.remove(file)
    return None


def _fill(file: str, journal: IO[bytes], lengths: list[int], frame_bytes: int, read: Read) -> None:
    partial = f"{file}.partial"
    header = io.BytesIO()
    shape = (sum(lengths), frame_bytes)
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    start = len(header.getvalue())
    firsts = np.cumsum([0, *lengths]).tolist()
    done = _finished(journal, partial)
    handle = os.open(partial, os.O_RDWR | os.O_CREAT, 0o644)
    lock, stop = threading.Lock(), threading.Event()
    bar = tqdm(total=sum(lengths), desc="decoding the frames, once", unit="frame", disable=None)
    bar.update(sum(lengths[i] for i in done))

    def decode(number: int) -> None:
        place = start + firsts[number] * frame_bytes
        count = 0
        for frame in read(number):
            if stop.is_set():
                return
            os.pwrite(handle, frame, place + count * frame_bytes)
            count += 1
            bar.update()
        if count != lengths[number]:
            raise DataError(f"episode {number} has {count} frames, but {lengths[number]} steps.")
        os.fsync(handle)  # before the journal records it
        with lock:
            journal.write(f"{number}\n".encode())

    try:
        os.pwrite(handle, header.getvalue(), 0)
        os.truncate(handle, start + shape[0] * frame_bytes)
        with concurrent.futures.ThreadPoolExecutor(_cores()) as pool:
            try:
                for future in [pool.submit(decode, i) for i in range(len(lengths)) if i not in done]:
                    future.result()
            except BaseException:  # also Ctrl-C: what is complete stays
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        os.fsync(handle)
        os.replace(partial, file)
        os.remove(journal.name)
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise StorageError(f"{partial}: {reason(error)}. Free some space and start again: it continues.") from error
    finally:
        bar.close()
        os.close(handle)


def _finished(journal: IO[bytes], partial: str) -> set[int]:
    """The episodes that are complete; an empty journal if the file they are in is gone."""
    if not os.path.isfile(partial):
        journal.truncate(0)
        return set()
    journal.seek(0)
    lines = journal.read().split(b"\n")[:-1]  # a line without an end was being written
    return {int(line) for line in lines if line.isdigit()}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
