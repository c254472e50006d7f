"""Detection of the format of a path."""

from __future__ import annotations

import os
from pathlib import Path

from diffusion_policy.common.errors import DataError, DataNotFoundError
from diffusion_policy.dataset.recordings.base import Recordings

KINDS = (
    "a LeRobotDataset folder (v2.0, v2.1, v3), ALOHA/ACT hdf5 episodes (a folder or a file), a robomimic hdf5 file, "
    "a replay buffer (.zarr or .zarr.zip), or npz episodes (a folder or a file)"
)


def open_recordings(path: str | os.PathLike, skip_broken: bool = False) -> Recordings:
    """Open recordings of any known format.

    Args:
        path: a folder or a file.
        skip_broken: leave out episodes that cannot be read instead of raising an error; `left_out` says why. All
            numbers are then read once here.
    """
    place = Path(path).expanduser()
    if not place.exists():
        raise DataNotFoundError(f"There is nothing at {place}.")
    if place.is_dir():
        return _open_folder(place, skip_broken)
    if place.suffix in (".hdf5", ".h5"):
        return _open_hdf5(place, skip_broken)
    if place.suffix == ".npz":
        return _open_npz(place, skip_broken)
    if place.suffix == ".zip":
        return _open_zarr(place, skip_broken)
    raise _unknown(place)


def _unknown(place: Path) -> DataError:
    return DataError(f"{place} is not a recording that can be read here. Known are {KINDS}.")


def _open_folder(place: Path, skip_broken: bool) -> Recordings:
    if (place / "meta" / "info.json").exists():
        from diffusion_policy.dataset.recordings.lerobot import open_lerobot

        return open_lerobot(place, skip_broken)
    if any((place / name).exists() for name in (".zgroup", "zarr.json")) or place.suffix == ".zarr":
        return _open_zarr(place, skip_broken)
    names = sorted(entry.name for entry in os.scandir(place))
    if any(name.endswith((".hdf5", ".h5")) for name in names):
        return _open_hdf5(place, skip_broken)
    if any(name.endswith(".npz") for name in names):
        return _open_npz(place, skip_broken)
    if (place / "meta").is_dir() and (place / "data").is_dir():
        raise DataError(f"{place} looks like a LeRobotDataset whose recording was not finished: no meta/info.json.")
    raise _unknown(place)


def _open_zarr(place: Path, skip_broken: bool) -> Recordings:
    from diffusion_policy.dataset.recordings.replay_buffer import ReplayBufferRecordings

    return ReplayBufferRecordings(place, skip_broken)


def _open_npz(place: Path, skip_broken: bool) -> Recordings:
    from diffusion_policy.dataset.recordings.npz import NpzRecordings

    return NpzRecordings(place, skip_broken)


def _open_hdf5(place: Path, skip_broken: bool) -> Recordings:
    from diffusion_policy.dataset.recordings.aloha import AlohaRecordings
    from diffusion_policy.dataset.recordings.hdf5 import files_of, members
    from diffusion_policy.dataset.recordings.robomimic import RobomimicRecordings

    files = files_of(place)
    try:
        found = members(files[0])
    except DataError:
        if len(files) == 1 or not skip_broken:
            raise
        found = {"datasets": {}}
    if any(name.startswith("data/") for name in found["datasets"]):
        if len(files) > 1:
            raise DataError(f"{place} has {len(files)} robomimic files: give one of them.")
        return RobomimicRecordings(files[0], skip_broken, members=found)
    return AlohaRecordings(place, skip_broken)
