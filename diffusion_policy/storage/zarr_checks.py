"""Checks of a zarr group from an unknown source, before any of it is decoded. Each check raises DataError.

Files may be damaged or hostile. A chunk is decoded only if its codec is on the list below, none of which can run code,
and if its stored and decoded sizes are those of the metadata. At most a few times the size of the array is allocated.
"""

from __future__ import annotations

import functools
import math
import os
import stat
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import zarr

from diffusion_policy.common.errors import DataError
from diffusion_policy.common.memory import available_bytes, readable_bytes
from diffusion_policy.storage.compressed_size import chunk_problem
from diffusion_policy.storage.zarr_chunks import StoredChunks

READ_BLOCK_BYTES = 64e6
MAX_METADATA_BYTES = 16e6
SMALL_CHUNK_BYTES = 64e6  # a chunk may exceed its array, which can grow, but not this plus 4 times the array
METADATA_FILES = (".zgroup", ".zarray", ".zattrs", "zarr.json")
CODECS = ("blosc", "zlib", "gzip", "zstd", "lz4")


def place_of(node: Any) -> str:
    """How an error message names a group or an array."""
    if isinstance(node, (zarr.Group, zarr.Array)):
        return str(node.store_path).removeprefix("file://")
    return "The array in memory" if isinstance(node, np.ndarray) else "The replay buffer in memory"


# ---------------------------------------------------------------------- files
def check_folder(path: str) -> None:
    """Check that all files at `path` are in it, and that its metadata are regular files of a sensible size."""
    _check_links(path)
    for group in (path, *(os.path.join(path, name) for name in ("data", "meta"))):
        folders = [group]
        if group != path and os.path.isdir(group):
            folders += [entry.path for entry in os.scandir(group) if entry.is_dir()]
        for file in (os.path.join(folder, name) for folder in folders for name in METADATA_FILES):
            if os.path.exists(file):
                info = os.stat(file)
                if not stat.S_ISREG(info.st_mode):
                    raise DataError(f"{file} is not a file.")
                _check_metadata_size(file, info.st_size)


def _check_links(path: str) -> None:
    """Raise if a link leads out of the folder: it would be read, or written, elsewhere. `path` itself may be a link."""
    root = os.path.realpath(path)
    for folder, folders, files in os.walk(root):
        for entry in (os.path.join(folder, name) for name in (*folders, *files)):
            if os.path.islink(entry) and os.path.commonpath([root, os.path.realpath(entry)]) != root:
                raise DataError(
                    f"{entry} is a link out of the dataset, and such links are not followed. Copy the dataset with its "
                    "targets: cp -rL"
                )


def check_zip(path: str) -> None:
    """Check that `path` is a zip file whose entries can be read within known bounds."""
    try:
        with zipfile.ZipFile(path) as file:
            for info in file.infolist():
                # Python decompresses the other methods without a limit.
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise DataError(f"{path}: entry {info.filename} is compressed by a method other than deflate.")
                if info.filename.endswith(METADATA_FILES):
                    _check_metadata_size(f"{path}: {info.filename}", info.file_size)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        raise DataError(f"{path} is not a zarr group, it is not a zip file or was cut short: {error}.") from error


def _check_metadata_size(file: str, size: int) -> None:
    if size > MAX_METADATA_BYTES:
        raise DataError(f"{file} has {readable_bytes(size)}: too large, it is no metadata of a replay buffer.")


# ---------------------------------------------------------------------- arrays
def check_chunks_compatible(chunks: tuple, shape: tuple) -> None:
    """Check that `chunks` has one positive integer per dimension of `shape`."""
    if len(chunks) != len(shape) or not all(isinstance(c, (int, np.integer)) and c > 0 for c in chunks):
        raise DataError(
            f"Chunks {chunks} do not fit an array of shape {shape}: give one positive integer per dimension."
        )


def require_memory(array: zarr.Array, size: float) -> None:
    """Check that `size` bytes are free to read `array`."""
    free = available_bytes()
    if size > free:
        raise DataError(
            f"{place_of(array)} declares shape {array.shape}, in chunks of {array.chunks}: reading it takes "
            f"{readable_bytes(size)}, but only {readable_bytes(free)} of memory are free."
        )


def _codec_of(array: zarr.Array) -> tuple[str | None, int]:
    """(id of the compressor or None, bytes appended after the compressed data); raises for any other codec.

    Some codecs run code (pickle) or decode to any size. One of CODECS is allowed and, in format 3, codecs around it
    that only move bytes.
    """
    metadata: Any = array.metadata
    if metadata.zarr_format == 2:
        filters, after = [codec.codec_id for codec in metadata.filters or ()], 0
        compressors = [] if metadata.compressor is None else [metadata.compressor.codec_id]
    else:
        names = [codec["name"] for codec in metadata.to_dict()["codecs"]]
        names = names[1:] if names[0] == "transpose" else names
        after = 4 if names[-1] == "crc32c" else 0
        names = names[:-1] if after else names
        filters, compressors = ([], names[1:]) if names[:1] == ["bytes"] else (names, [])
    allowed = len(compressors) <= 1 and set(compressors) <= set(CODECS)
    refused = [*filters, *(() if allowed else compressors)]
    if refused:
        raise DataError(
            f"{place_of(array)} is encoded with {', '.join(refused)}, which is not read here because decoding it can "
            f"run code or fill the memory. Allowed are arrays without filters and with at most one of "
            f"{', '.join(CODECS)}."
        )
    return (compressors[0] if compressors else None), after


def check_metadata(array: zarr.Array) -> None:
    """Check dtype, codec, chunk shape and declared size of an array."""
    if array.dtype.kind not in "biufcmMSU" or array.dtype.itemsize == 0:
        raise DataError(
            f"{place_of(array)} has dtype {array.dtype}: only arrays of numbers or of text of fixed length are read."
        )
    _codec_of(array)
    check_chunks_compatible(array.chunks, array.shape)
    size, chunk = (math.prod(lengths) * array.dtype.itemsize for lengths in (array.shape, array.chunks))
    if chunk > SMALL_CHUNK_BYTES + 4 * size:
        raise DataError(
            f"{place_of(array)}: a chunk of shape {array.chunks} has {readable_bytes(chunk)}, the whole array "
            f"{readable_bytes(size)}."
        )


def check_chunks(array: zarr.Array) -> None:
    """Check that every chunk is there, complete, and decodes to the declared size; zarr itself does not."""
    check_metadata(array)
    item = array.dtype.itemsize
    decoded = math.prod(array.chunks) * item
    block = min(READ_BLOCK_BYTES, math.prod(array.shape) * item)
    require_memory(array, 2 * max(block, math.prod(array.shape[1:]) * item, decoded))
    codec, after = _codec_of(array)
    grid = [-(-length // chunk) for length, chunk in zip(array.shape, array.chunks, strict=True)]
    with StoredChunks(array) as stored:
        for coordinates in _coordinates(grid):
            name = array.metadata.encode_chunk_key(coordinates)
            size = stored.size(name)
            if size is None:
                raise DataError(
                    f"{place_of(array)}: {_count_missing(array, stored, grid)} of {math.prod(grid)} chunks are "
                    f"missing, most likely from an incomplete download or copy. (Writers that leave out chunks of "
                    f"zeros, as zarr 3 does by default, need write_empty_chunks=True.)"
                )
            try:
                problem = chunk_problem(codec, decoded, size - after, functools.partial(stored.read, name))
            except (OSError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError) as error:
                problem = str(error)
            if problem:
                raise DataError(
                    f"{place_of(array)} cannot be read, its chunk {name} is damaged or cut short: {problem}."
                )


def _count_missing(array: zarr.Array, stored: StoredChunks, grid: list[int]) -> int | str:
    if math.prod(grid) > 100_000:
        return "some"
    return sum(stored.size(array.metadata.encode_chunk_key(coordinates)) is None for coordinates in _coordinates(grid))


def _coordinates(grid: list[int]) -> Iterator[tuple[int, ...]]:
    """All points of a grid. itertools.product would build lists first, and a damaged file may declare a huge grid."""
    if not grid:
        yield ()
        return
    for first in range(grid[0]):
        for rest in _coordinates(grid[1:]):
            yield first, *rest
