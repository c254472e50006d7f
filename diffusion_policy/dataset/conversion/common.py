"""Helpers of both conversions."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from diffusion_policy.common.errors import ConfigError, DataError, StorageError
from diffusion_policy.dataset.recordings import Recordings
from diffusion_policy.storage.atomic import reason


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder that becomes `path` when everything in it is written, and is removed otherwise."""
    if path.exists():
        raise ConfigError(f"{path} exists already: choose another name, or remove it.")
    part = path.with_name(f".{path.name}.part-{os.getpid()}")
    try:
        part.mkdir(parents=True)
        yield part
        part.rename(path)
    except OSError as error:
        if isinstance(error, (DataError, StorageError)):
            raise
        raise StorageError(f"{path} cannot be written: {reason(error)}.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def keep_whole(recordings: Recordings) -> None:
    """Check that every episode has the images of all cameras; with `skip_broken`, keep those that have."""
    if not recordings.cameras:
        raise ConfigError(f"{recordings.path} has no cameras: convert it without images.")
    whole = []
    for index, name in enumerate(recordings.episode_names):
        missing = [camera for camera in recordings.cameras if not recordings.has_frames(index, camera)]
        if not missing:
            whole.append(index)
        elif recordings.skip_broken:
            recordings.left_out.append(f"{name} has no images of {missing[0]}.")
        else:
            raise DataError(f"{name} has no images of {missing[0]}; --skip-broken leaves such episodes out.")
    if not whole:
        raise DataError(f"{recordings.path}: no episode has the images of all cameras.")
    recordings.keep(whole)
