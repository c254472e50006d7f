"""Atomic writes: a file appears complete or not at all."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import IO, Any

from diffusion_policy.common.errors import StorageError

TEMPORARY = ".{name}.{pid}.tmp"
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


def write_atomically(
    path: str | os.PathLike, write: Callable[[IO[bytes]], Any], previous: str | os.PathLike | None = None
) -> None:
    """Call write(file) on a temporary file beside `path`, flush it to disk, and rename it to `path`.

    The old content of `path` is kept as `previous`, if given. Raises StorageError and leaves `path` as it was if the
    write fails.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(TEMPORARY.format(name=path.name, pid=os.getpid()))
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            _keep(path, pathlib.Path(previous))
        os.replace(temporary, path)
        _flush_folder(path.parent)
    except OSError as error:
        raise StorageError(
            f"{path} could not be written: {reason(error)}. Its previous content is unchanged"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a UTF-8 text file atomically."""
    write_atomically(path, lambda file: file.write(text.encode()))


def copy(source: str | os.PathLike, path: str | os.PathLike) -> None:
    """Copy a file atomically."""
    with open(source, "rb") as original:
        write_atomically(path, lambda file: shutil.copyfileobj(original, file))


def remove_leftovers(folder: pathlib.Path) -> None:
    """Delete the temporary files of processes that were killed during a write."""
    for path in folder.glob(TEMPORARY.format(name="*", pid="[0-9]*")):
        path.unlink(missing_ok=True)


def reason(error: OSError) -> str:
    """Why a write failed, for an error message."""
    if error.errno in FULL_DISK:
        return "the disk is full, or its quota is used up"
    return error.strerror or str(error)


def _keep(path: pathlib.Path, previous: pathlib.Path) -> None:
    """Make `previous` a second name of the file at `path`, so that readers of `path` always find one."""
    spare = path.with_name(TEMPORARY.format(name=previous.name, pid=os.getpid()))
    try:
        os.link(path, spare)
        os.replace(spare, previous)
    except OSError:  # a file system without hard links
        os.replace(path, previous)


def _flush_folder(folder: pathlib.Path) -> None:
    """Flush a folder, so that a rename in it survives a power failure; not every system can do this."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
