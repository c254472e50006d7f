"""Helpers of the readers of HDF5 recordings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from diffusion_policy.common.errors import DataError
from diffusion_policy.storage.reader_process import ReaderPool

MEMORY_PER_BYTE = 4
LEFT_OUT = ["next_obs", "mask", "compress_len"]


def natural_order(name: str) -> list:
    """A sort key with which episode_2 comes before episode_10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def files_of(place: Path) -> list[Path]:
    """The HDF5 files of a folder, or the file itself."""
    if not place.is_dir():
        return [place]
    files = [file for file in place.iterdir() if file.suffix in (".hdf5", ".h5")]
    links = [file for file in files if not file.is_file()]
    if links:
        raise DataError(f"{links[0]} is not a regular file.")
    return sorted(files, key=lambda file: natural_order(file.name))


def members(file: Path, pool: ReaderPool | None = None) -> dict[str, Any]:
    """{datasets: {name: (shape, dtype)}, attributes: {name: text}} of a file."""
    facts, _ = (pool or ReaderPool()).ask_once("hdf5_members", file, leave_out=LEFT_OUT)
    facts["datasets"] = {name: (tuple(shape), dtype) for name, (shape, dtype) in facts["datasets"].items()}
    return facts
