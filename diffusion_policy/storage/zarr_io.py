"""Reading and writing the arrays of a replay buffer in zarr, with checks and checksums.

Groups of zarr format 2 and 3 are read; format 2 is written, which Diffusion Policy's own code, on zarr 2, also reads.

Chunks of lz4 or Blosc carry no checksum. The root attribute `checksums` therefore holds one per array, over its values.
Everything here that writes updates it; `read_array` and everything that copies compares it. Reading single steps of a
zarr array (`buffer["action"][3]`) compares nothing.
"""

from __future__ import annotations

import hashlib
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import zarr
from zarr.storage import ZipStore

from diffusion_policy.common.errors import DataError, DataNotFoundError
from diffusion_policy.storage.zarr_checks import (
    READ_BLOCK_BYTES,
    check_chunks,
    check_chunks_compatible,
    check_folder,
    check_metadata,
    check_zip,
    place_of,
    require_memory,
)

WRITE_CONFIG: Any = {"write_empty_chunks": True}  # chunks of zeros too: a missing chunk then always means lost data
ATTRIBUTE = "checksums"


# ---------------------------------------------------------------------- groups
def open_group(source: Any, mode: str) -> zarr.Group:
    """Open a zarr store, or the path of a folder or a .zip."""
    if isinstance(source, (str, os.PathLike)):
        source = os.path.expanduser(source)
        if mode in ("r", "r+") and not os.path.exists(source):
            raise DataNotFoundError(f"There is no dataset at {source}.")
        if source.endswith(".zip") or os.path.isfile(source):
            if mode != "r":
                raise DataError(f"{source}: a .zip can only be read; save_to_path() writes one.")
            check_zip(source)
            source = ZipStore(source, mode="r")
        elif os.path.isdir(source):
            check_folder(source)
    if mode not in ("r", "r+"):
        return writable_root(source, overwrite=mode == "w")
    try:
        # Consolidated metadata may contradict those of the arrays.
        return zarr.open_group(source, mode=mode, use_consolidated=False)  # type: ignore[arg-type]
    except MemoryError:
        raise
    except Exception as error:  # zarr raises exceptions of every kind for damaged metadata
        raise DataError(f"{source} is not a zarr group, or its metadata cannot be read: {error}.") from error


def writable_root(store: Any, overwrite: bool = False, attributes: dict | None = None) -> zarr.Group:
    """The group in `store`; it is created, in zarr format 2, if there is none."""
    if not overwrite:
        try:
            root = zarr.open_group(store, mode="r+", use_consolidated=False)
        except FileNotFoundError:  # zarr also raises this for a folder without a group
            pass
        else:
            if root.metadata.zarr_format != 2:
                raise DataError(
                    f"{place_of(root)} is a group of zarr format 3, which can only be read: write to another place."
                )
            return root
    return zarr.create_group(store, zarr_format=2, overwrite=overwrite, attributes=attributes)


def array_keys(group: zarr.Group | Mapping) -> list[str]:
    return sorted(group.array_keys()) if isinstance(group, zarr.Group) else list(group)


def check_replay_buffer(root: Any) -> None:
    """Check the layout of a replay buffer, a zarr group or a dict: its arrays, episode ends and lengths."""
    try:
        _check_layout(root)
    except (DataError, MemoryError):
        raise
    except Exception as error:  # zarr raises exceptions of every kind for a damaged .zarray or zarr.json
        raise DataError(f"{place_of(root)}: the metadata of an array or group cannot be read: {error}.") from error


def _check_layout(root: Any) -> None:
    where = place_of(root)
    for name in ("data", "meta"):
        if name not in root:
            raise DataError(f"{where} has no group {name!r}: it is not a replay buffer, or its metadata is missing.")
    data, meta = root["data"], root["meta"]
    if "episode_ends" not in meta:
        raise DataError(
            f"{where} has no array meta/episode_ends: it is not a replay buffer, or its metadata is missing."
        )
    for group in (data, meta):
        for key in array_keys(group):
            if isinstance(group[key], zarr.Array):
                check_metadata(group[key])
    for name in get_checksums(root):
        group, _, key = name.partition("/")
        if group not in ("data", "meta") or key not in array_keys(root[group]):
            raise DataError(f"{where} had an array {name}, which is missing: its folder or its metadata was lost.")
    ends = read_array(meta["episode_ends"])
    if ends.ndim != 1 or ends.dtype.kind not in "iu" or (np.diff(ends, prepend=0) <= 0).any():
        raise DataError(f"{where}: meta/episode_ends must be positive integers that increase: {ends[:10]}...")
    steps = int(ends[-1]) if len(ends) else 0
    for key in array_keys(data):
        if data[key].shape[:1] != (steps,):
            raise DataError(
                f"{where}: data/{key} has shape {data[key].shape}, but meta/episode_ends ends at {steps} steps."
            )


# ---------------------------------------------------------------------- arrays
def read_array(array: Any, dtype: Any = None) -> np.ndarray:
    """All of a zarr (or numpy) array, cast to `dtype` in blocks so that the original need not fit in memory beside it.

    A cast must keep every value. Raises DataError when a chunk is missing (zarr itself would return zeros), unreadable,
    or different from what was written, and when the array is larger than the free memory.
    """
    dtype = np.dtype(dtype or array.dtype)
    if isinstance(array, zarr.Array):
        check_chunks(array)
        require_memory(array, math.prod(array.shape) * dtype.itemsize)
    result = np.empty(array.shape, dtype)
    crc = 0
    for rows in _blocks(array):
        block = _read(array, rows)
        with np.errstate(invalid="ignore"):
            result[rows] = block
        if result.dtype != array.dtype and not np.array_equal(result[rows], block):
            raise DataError(f"{place_of(array)}: its values are not all {result.dtype} numbers.")
        if isinstance(array, zarr.Array):
            crc = crc32(block, crc)
    _compare_checksum(array, crc)
    return result


def write_array(group: zarr.Group, name: str, values: Any, chunks: tuple, compressor: Any) -> str:
    """Write a numpy or zarr array as group[name], replacing an existing one; returns its checksum."""
    check_chunks_compatible(chunks, values.shape)
    array = group.create_array(
        name,
        shape=values.shape,
        dtype=values.dtype,
        chunks=tuple(chunks),
        compressors=compressor,
        overwrite=name in group,
        config=WRITE_CONFIG,
    )
    return checksum(values, tuple(chunks[:1]), array)


def _read(array: Any, rows: Any) -> np.ndarray:
    try:
        return np.asarray(array[rows])
    except MemoryError:
        raise
    except Exception as error:  # every codec has its own exceptions
        raise DataError(f"{place_of(array)} cannot be read, a chunk of it is damaged or cut short: {error}.") from error


def _blocks(array: Any, multiple_of: int = 1) -> Iterator[Any]:
    """Slices of the first axis that cover it, each of about READ_BLOCK_BYTES."""
    if array.ndim == 0:
        yield ...
        return
    row_bytes = max(1, math.prod(array.shape[1:]) * array.dtype.itemsize)
    rows = max(1, int(READ_BLOCK_BYTES / row_bytes / multiple_of)) * multiple_of
    for start in range(0, array.shape[0], rows):
        yield slice(start, start + rows)


# ---------------------------------------------------------------------- checksums
def sha256(array: zarr.Array) -> str:
    """sha256 of the little-endian bytes of an array, read in blocks: it need not fit in memory."""
    check_chunks(array)
    digest = hashlib.sha256()
    step = max(1, array.chunks[0]) if array.ndim else 1
    for rows in _blocks(array, step):
        block = _read(array, rows)
        digest.update(np.ascontiguousarray(block, block.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


def checksum(values: Any, multiple_of: tuple = (), copy_to: zarr.Array | None = None) -> str:
    """The checksum of a numpy or zarr array, compared with the stored one; also copies the values to `copy_to`."""
    if isinstance(values, zarr.Array):
        check_chunks(values)
    crc = 0
    for rows in _blocks(values, *multiple_of):  # whole chunks at a time: a zip cannot rewrite one
        block = _read(values, rows)
        crc = crc32(block, crc)
        if copy_to is not None:
            copy_to[rows] = block
    _compare_checksum(values, crc)
    return describe(values, crc)


def continued_checksum(old: str, array: zarr.Array, rows: np.ndarray) -> str:
    """The checksum of `array` after `rows` were appended, from its checksum before."""
    return describe(array, crc32(rows.astype(array.dtype), int(old[-8:], 16)))


def crc32(block: np.ndarray, crc: int = 0) -> int:
    """CRC-32 of little-endian values in C order, continuing `crc`."""
    block = np.ascontiguousarray(block, block.dtype.newbyteorder("<"))
    return zlib.crc32(block.reshape(-1).view(np.uint8).data, crc)


def describe(array: Any, crc: int) -> str:
    """A checksum with dtype and shape: '<f4 50x2 crc32 1a2b3c4d'."""
    return f"{array.dtype.newbyteorder('<').str} {'x'.join(map(str, array.shape))} crc32 {crc:08x}"


def _compare_checksum(array: Any, crc: int) -> None:
    """Raise if the replay buffer of a zarr array has another checksum for it."""
    if not isinstance(array, zarr.Array) or array.path.count("/") < 1:
        return
    path, group, name = ("/" + array.path).rsplit("/", 2)
    try:
        root = zarr.open_group(array.store, path=path.strip("/"), mode="r", use_consolidated=False)
    except FileNotFoundError:  # not an array of a replay buffer
        return
    expected, found = get_checksums(root).get(f"{group}/{name}"), describe(array, crc)
    if expected is not None and expected != found:
        raise DataError(
            f"{place_of(array)} is not what was written: it is {found}, its checksum says {expected}. Get or copy "
            f"the data again. (If other software changed it on purpose, remove 'checksums' from the attributes of "
            f"{place_of(root)}.)"
        )


def get_checksums(root: Any) -> dict[str, str]:
    """{'data/action': checksum, ...} of a zarr group; empty if there are none."""
    checksums = root.attrs.get(ATTRIBUTE, {}) if isinstance(root, zarr.Group) else {}
    if not isinstance(checksums, dict) or not all(isinstance(value, str) for value in checksums.values()):
        raise DataError(f"{place_of(root)}: its attribute 'checksums' is damaged: {str(checksums)[:80]}.")
    return dict(checksums)


def set_checksums(root: zarr.Group, checksums: dict[str, str] | None) -> None:
    """Write or, with None, remove the checksums."""
    attributes = dict(root.attrs)
    if checksums is not None:
        root.attrs[ATTRIBUTE] = checksums
    elif attributes.pop(ATTRIBUTE, None) is not None:
        root.attrs.put(attributes)


def take_checksums(root: Any) -> dict[str, str]:
    """The checksums, removed from the group: they would be wrong if a change of its arrays stopped half-way."""
    checksums = get_checksums(root)
    if checksums:
        set_checksums(root, None)
    return checksums
