"""Episodes laid end to end: `data/<key>` arrays of shape (steps, ...) and `meta/episode_ends` (episodes,), int64 and cumulative.

The same structure lives in memory as numpy arrays, or in a zarr group: a folder, a `.zip`, or any zarr store. Groups of zarr
format 2 and 3 are read; format 2 is written, which Diffusion Policy's own code, on zarr 2, also reads.

Files may be damaged or hostile: what is checked before anything is decoded is in zarr_checks. Chunks of lz4 or Blosc carry no checksum,
so the root attribute `checksums` holds one of the values of each array: written by everything here that writes, compared by
`read_array` and everything that copies. Reading single steps of a zarr array (`buffer["action"][3]`) compares nothing.
"""

import math
import os
import zlib

import numcodecs
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

WRITE_CONFIG = {"write_empty_chunks": True}  # chunks of zeros too: a missing one then always means that data was lost
COMPRESSORS = {
    "default": dict(cname="lz4", clevel=5, shuffle=numcodecs.Blosc.NOSHUFFLE),
    "disk": dict(cname="zstd", clevel=5, shuffle=numcodecs.Blosc.BITSHUFFLE),
}


def get_optimal_chunks(shape: tuple, dtype, target_chunk_bytes=2e6, max_chunk_length=None) -> tuple:
    """Chunks of about `target_chunk_bytes`: trailing dimensions whole while they fit, the next one cut, the others 1."""
    shape = tuple(shape) if max_chunk_length is None else (int(max_chunk_length), *shape[1:])
    chunks, inner_bytes = [1] * len(shape), np.dtype(dtype).itemsize
    for axis in reversed(range(len(shape))):
        if axis == 0 or inner_bytes * shape[axis] > target_chunk_bytes:
            chunks[axis] = max(1, min(shape[axis], math.ceil(target_chunk_bytes / inner_bytes)))
            break
        chunks[axis] = shape[axis]
        inner_bytes *= shape[axis]
    return tuple(chunks)


def rechunk_recompress_array(
    group: zarr.Group, name: str, chunks=None, chunk_length=None, compressor=None
) -> zarr.Array:
    """Rewrite `group[name]` with other chunks (or only another length of them) and compressor; None keeps what it has."""
    array = group[name]
    if chunks is None:
        chunks = array.chunks if chunk_length is None else (chunk_length, *array.chunks[1:])
    if compressor is None:
        compressor = _compressor_of(array)
    if tuple(chunks) == array.chunks and compressor == _compressor_of(array):
        return array
    _write_array(group, name, read_array(array), chunks, compressor)
    return group[name]


def read_array(array, dtype=None) -> np.ndarray:
    """All of a zarr (or numpy) array, cast to `dtype` in blocks so that the original need not fit in memory beside it.

    A cast must keep every value. Raises DataError when a chunk is missing (zarr itself would return zeros), unreadable, or not
    what was written, and when the array is larger than the memory that is free.
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
            crc = _crc(block, crc)
    _compare_checksum(array, crc)
    return result


class ReplayBuffer:
    """A zarr group, or a dict {'data': {key: array}, 'meta': {'episode_ends': array}}, as a list of episodes."""

    def __init__(self, root):
        self.root = root
        try:
            self._check()
        except (DataError, MemoryError):
            raise
        except Exception as error:  # zarr raises of every kind for a damaged .zarray or zarr.json
            raise DataError(
                f"{place_of(root)}: the metadata of an array or group in it cannot be read: {error}."
            ) from error

    def _check(self):
        root, where = self.root, place_of(self.root)
        for name in ("data", "meta"):
            if name not in root:
                raise DataError(
                    f"{where} has no group {name!r}: it is not a replay buffer, or its metadata is missing."
                )
        self.data, self.meta = root["data"], root["meta"]
        if "episode_ends" not in self.meta:
            raise DataError(
                f"{where} has no array meta/episode_ends: it is not a replay buffer, or its metadata is missing."
            )
        for group in (self.data, self.meta):
            for key in _array_keys(group):
                if isinstance(group[key], zarr.Array):
                    check_metadata(group[key])
        for name in _get_checksums(root):
            group, _, key = name.partition("/")
            if group not in ("data", "meta") or key not in _array_keys(root[group]):
                raise DataError(f"{where} had an array {name}, which is missing: its folder or its metadata was lost.")
        ends = read_array(self.meta["episode_ends"])
        if ends.ndim != 1 or ends.dtype.kind not in "iu" or (np.diff(ends, prepend=0) <= 0).any():
            raise DataError(f"{where}: meta/episode_ends must be positive integers that increase: {ends[:10]}...")
        steps = int(ends[-1]) if len(ends) else 0
        for key, value in self.items():
            if value.shape[:1] != (steps,):
                raise DataError(
                    f"{where}: data/{key} has shape {value.shape}, but meta/episode_ends ends at {steps} steps."
                )

    # Making one

    @classmethod
    def create_empty_zarr(cls, storage=None, root=None) -> "ReplayBuffer":
        """Empty, in a zarr store (default: in memory) or in an open group."""
        if root is None:
            root = _writable_root(zarr.storage.MemoryStore() if storage is None else storage)
        root.require_group("data")
        meta = root.require_group("meta")
        if "episode_ends" not in meta:
            ends = _write_array(meta, "episode_ends", np.zeros(0, dtype=np.int64), (1,), None)
            if len(root["data"]) == 0:
                _set_checksums(root, {"meta/episode_ends": ends})
        return cls(root)

    @classmethod
    def create_empty_numpy(cls) -> "ReplayBuffer":
        """Empty, in memory."""
        return cls({"data": {}, "meta": {"episode_ends": np.zeros(0, dtype=np.int64)}})

    @classmethod
    def create_from_group(cls, group) -> "ReplayBuffer":
        """On an open group, which is made a replay buffer if it is empty."""
        if len(group) == 0 and not getattr(group, "read_only", True):
            return cls.create_empty_zarr(root=group)
        return cls(group)

    @classmethod
    def create_from_path(cls, zarr_path, mode="r") -> "ReplayBuffer":
        """On the group at `zarr_path` (folder or .zip), without reading its data; `mode` is zarr's."""
        buffer = cls.create_from_group(_open_group(zarr_path, mode))
        if mode == "r":
            buffer._require_episodes()
        return buffer

    @classmethod
    def copy_from_store(
        cls, src_store, store=None, keys=None, chunks=None, compressors=None, if_exists="replace"
    ) -> "ReplayBuffer":
        """A copy of the group in `src_store` (a zarr store or a path), checked as it is read.

        store: where to, numpy arrays in memory if None. keys: which arrays, all if None.
        chunks, compressors: as in `add_episode`; what they do not name keeps the source's.
        """
        source = cls(_open_group(src_store, "r"))
        source._require_episodes()
        keys = list(source.keys()) if keys is None else keys
        for key in keys:
            if key not in source:
                raise DataError(f"{place_of(source.root)} has no array data/{key}; it has: {', '.join(source.keys())}.")
        if store is not None:
            root = source._write_to(store, keys, chunks, compressors, if_exists)
        else:
            root = {
                "data": {key: read_array(source[key]) for key in keys},
                "meta": {key: read_array(source.meta[key]) for key in _array_keys(source.meta)},
            }
        if isinstance(src_store, (str, os.PathLike)):
            source.root.store.close()
        return cls(root)

    @classmethod
    def copy_from_path(
        cls, zarr_path, backend=None, store=None, keys=None, chunks=None, compressors=None, if_exists="replace"
    ) -> "ReplayBuffer":
        """As `copy_from_store`, from a folder or a .zip; backend 'numpy' is the same as store None."""
        return cls.copy_from_store(
            zarr_path, None if backend == "numpy" else store, keys, chunks, compressors, if_exists
        )

    # Saving it

    def save_to_store(self, store, chunks=None, compressors=None, if_exists="replace"):
        """Write everything into a zarr store (or path) and return it; arguments as in `copy_from_store`."""
        self._write_to(store, list(self.keys()), chunks, compressors, if_exists)
        return store

    def save_to_path(self, zarr_path, chunks=None, compressors=None, if_exists="replace"):
        """Write everything into a folder, or, if the path ends so, a .zip file."""
        path = os.path.expanduser(zarr_path)
        if not path.endswith(".zip"):
            return self.save_to_store(path, chunks, compressors, if_exists)
        if if_exists != "replace" and os.path.exists(path):
            raise DataError(f"{path} is already there, and a .zip is only replaced as a whole.")
        with ZipStore(path + ".tmp", mode="w") as store:  # a zip is only readable once it is closed
            self.save_to_store(store, chunks, compressors)
        os.replace(path + ".tmp", path)
        return path

    def _write_to(self, store, keys, chunks, compressors, if_exists) -> zarr.Group:
        """if_exists: 'replace' what is there, 'skip' arrays that are there, or 'raise'."""
        if if_exists not in ("replace", "skip", "raise"):
            raise ValueError(f"if_exists={if_exists!r}: use 'replace', 'skip' or 'raise'")
        sources = (("meta", self.meta, _array_keys(self.meta)), ("data", self.data, keys))
        attributes = {}
        if isinstance(store, ZipStore):  # a zip cannot rewrite its attributes, so they have to come first
            attributes["checksums"] = {
                f"{name}/{key}": _checksum(source[key]) for name, source, names in sources for key in names
            }
        root = _writable_root(store, attributes=attributes)
        if self.backend == "zarr" and os.path.realpath(place_of(root)) == os.path.realpath(place_of(self.root)):
            raise DataError(f"{place_of(root)} cannot be written over itself: it would be emptied before it is read.")
        checksums = {} if if_exists == "replace" else _get_checksums(root)
        if not attributes:
            _set_checksums(root, None)  # none while it changes: if this stops half-way they would be wrong
        for name, source, names in sources:
            # replaced as a whole: arrays left from before could have another number of steps
            group = (
                root.create_group(name, overwrite=True)
                if if_exists == "replace" and name in root
                else root.require_group(name)
            )
            for key in names:
                if key in group and if_exists == "raise":
                    raise DataError(f"{place_of(root)} already has {name}/{key}.")
                if key not in group:
                    array = source[key]
                    compressor = (
                        _resolve_compressor(compressors, key, array) if name == "data" else _compressor_of(array)
                    )
                    chunk_shape = _resolve_chunks(chunks if name == "data" else None, key, array)
                    checksums[f"{name}/{key}"] = _write_array(group, key, array, chunk_shape, compressor)
        if not attributes:
            _set_checksums(root, checksums)
        return root

    @staticmethod
    def resolve_compressor(compressor="default"):
        """'default' (fast), 'disk' (small), or any numcodecs codec, or None for none."""
        return numcodecs.Blosc(**COMPRESSORS[compressor]) if isinstance(compressor, str) else compressor

    # Reading it

    @property
    def backend(self) -> str:
        return "zarr" if isinstance(self.root, zarr.Group) else "numpy"

    @property
    def episode_ends(self) -> np.ndarray:
        """(episodes,) int64: the step after the last one of each episode."""
        return self.meta["episode_ends"][:]

    @property
    def episode_lengths(self) -> np.ndarray:
        """(episodes,)"""
        return np.diff(self.episode_ends, prepend=0)

    @property
    def n_episodes(self) -> int:
        return self.meta["episode_ends"].shape[0]

    @property
    def n_steps(self) -> int:
        return int(self.episode_ends[-1]) if self.n_episodes else 0

    @property
    def chunk_size(self) -> int | None:
        """Steps in a chunk of the first array; None in memory."""
        return next((array.chunks[0] for array in self.values()), None) if self.backend == "zarr" else None

    def keys(self):
        return _array_keys(self.data)

    def values(self):
        return [self.data[key] for key in self.keys()]

    def items(self):
        return [(key, self.data[key]) for key in self.keys()]

    def __getitem__(self, key):
        return self.data[key]

    def __contains__(self, key) -> bool:
        return key in self.data

    def __repr__(self) -> str:
        arrays = ", ".join(f"{key} {value.shape} {value.dtype}" for key, value in self.items())
        return f"ReplayBuffer({self.backend}, {self.n_episodes} episodes, {self.n_steps} steps: {arrays})"

    def get_episode_idxs(self) -> np.ndarray:
        """(steps,) int64: the episode of each step."""
        return np.repeat(np.arange(self.n_episodes), self.episode_lengths)

    def get_episode_slice(self, idx: int) -> slice:
        ends = self.episode_ends
        idx = range(len(ends))[idx]
        return slice(int(ends[idx - 1]) if idx else 0, int(ends[idx]))

    def get_episode(self, idx: int, copy=False) -> dict:
        """{key: (length, ...)}"""
        steps = self.get_episode_slice(idx)
        return self.get_steps_slice(steps.start, steps.stop, copy=copy)

    def get_steps_slice(self, start, stop, step=None, copy=False) -> dict:
        """{key: (steps, ...)}; without `copy`, arrays in memory are views."""
        result = {key: value[start:stop:step] for key, value in self.items()}
        return {key: value.copy() for key, value in result.items()} if copy else result

    # Changing it

    def update_meta(self, data: dict):
        """Set arrays of `meta`."""
        for key, value in data.items():
            value = np.asarray(value)
            if value.dtype == object:
                raise DataError(f"meta/{key} cannot be stored: it is not an array of numbers or text.")
            if self.backend == "zarr":
                checksums = self._take_checksums()
                checksum = _write_array(self.meta, key, value, get_optimal_chunks(value.shape, value.dtype), None)
                if checksums:
                    _set_checksums(self.root, {**checksums, f"meta/{key}": checksum})
            else:
                self.meta[key] = value

    def add_episode(self, data: dict, chunks=None, compressors=None):
        """Append {key: (length, ...)}; the keys are those of the episodes before.

        For the arrays that the first episode creates in a zarr store: chunks is a tuple, or {key: tuple}, by default of about
        2 MB; compressors is anything `resolve_compressor` takes, or {key: such}.
        """
        data = {key: np.asarray(value) for key, value in data.items()}
        lengths = {key: len(value) for key, value in data.items()}
        if len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise DataError(f"An episode's arrays need one and the same length, at least 1: {lengths}.")
        if self.n_episodes and set(data) != set(self.keys()):
            raise DataError(f"The episode has keys {sorted(data)}, the replay buffer {sorted(self.keys())}.")
        for key, value in data.items():
            if key in self and self[key].shape[1:] != value.shape[1:]:
                raise DataError(
                    f"data/{key} holds steps of shape {self[key].shape[1:]}, the episode's are {value.shape[1:]}."
                )

        start, stop = self.n_steps, self.n_steps + next(iter(lengths.values()))
        checksums = self._take_checksums()
        for key, value in data.items():
            if self.backend == "numpy":
                self.data[key] = np.concatenate([self.data[key], value]) if key in self.data else value.copy()
            elif key in self.data:
                array = self.data[key].with_config(WRITE_CONFIG)
                array.resize((stop, *array.shape[1:]))
                array[start:stop] = value
                if f"data/{key}" in checksums:
                    # The checksum of the old rows goes on over the new ones.
                    crc = _crc(value.astype(array.dtype), int(checksums[f"data/{key}"][-8:], 16))
                    checksums[f"data/{key}"] = _describe(array, crc)
            else:
                checksum = _write_array(
                    self.data,
                    key,
                    value,
                    _resolve_chunks(chunks, key, value),
                    _resolve_compressor(compressors, key, value),
                )
                if checksums:
                    checksums[f"data/{key}"] = checksum
        self._set_episode_ends(np.append(self.episode_ends, stop), checksums)

    def extend(self, data: dict):
        """As `add_episode`."""
        self.add_episode(data)

    def drop_episode(self):
        """Remove the last episode."""
        if not self.n_episodes:
            raise DataError("The replay buffer has no episode to drop.")
        start = self.get_episode_slice(-1).start
        self._take_checksums()  # for good: those of the steps that stay are only known by reading them all
        for key, array in self.items():
            if self.backend == "numpy":
                self.data[key] = array[:start].copy()
            else:
                array.resize((start, *array.shape[1:]))
        self._set_episode_ends(self.episode_ends[:-1])

    def pop_episode(self) -> dict:
        """Remove the last episode and return it."""
        episode = self.get_episode(-1, copy=True)
        self.drop_episode()
        return episode

    def get_chunks(self) -> dict:
        """{key: chunks} of a zarr buffer."""
        return {key: array.chunks for key, array in self.items()}

    def set_chunks(self, chunks: dict):
        for key, value in chunks.items():
            check_chunks_compatible(value, self[key].shape)
            rechunk_recompress_array(self.data, key, chunks=value)

    def get_compressors(self) -> dict:
        """{key: codec} of a zarr buffer."""
        return {key: _compressor_of(array) for key, array in self.items()}

    def set_compressors(self, compressors: dict):
        for key, value in compressors.items():
            rechunk_recompress_array(self.data, key, compressor=self.resolve_compressor(value))

    def _set_episode_ends(self, ends: np.ndarray, checksums: dict | None = None):
        """checksums: of all arrays, if they are known."""
        if self.backend == "numpy":
            self.meta["episode_ends"] = ends
            return
        array = self.meta["episode_ends"].with_config(WRITE_CONFIG)
        array.resize(ends.shape)
        array[:] = ends
        if array.chunks[0] < len(ends):  # room to grow, so that this stays one small file and is rarely rewritten
            rechunk_recompress_array(self.meta, "episode_ends", chunk_length=int(len(ends) * 1.5))
        if checksums:
            _set_checksums(self.root, {**checksums, "meta/episode_ends": _checksum(ends.astype(array.dtype))})

    def _take_checksums(self) -> dict:
        """The checksums, which are removed while the buffer changes: if that stops half-way they would be wrong."""
        checksums = _get_checksums(self.root)
        if checksums:
            _set_checksums(self.root, None)
        return checksums

    def _require_episodes(self):
        if not self.n_episodes:
            raise DataError(f"{place_of(self.root)} has no episodes: meta/episode_ends is empty.")


def _array_keys(group) -> list:
    return sorted(group.array_keys()) if isinstance(group, zarr.Group) else list(group)


def _open_group(source, mode: str) -> zarr.Group:
    """source: a zarr store, or the path of a folder or a .zip."""
    if isinstance(source, (str, os.PathLike)):
        source = os.path.expanduser(source)
        if mode in ("r", "r+") and not os.path.exists(source):
            raise DataNotFoundError(f"There is no dataset at {source}.")
        if source.endswith(".zip") or os.path.isfile(source):
            if mode != "r":
                raise DataError(f"{source}: a .zip is only read in place; save_to_path() writes one.")
            check_zip(source)
            source = ZipStore(source, mode="r")
        elif os.path.isdir(source):
            check_folder(source)
    if mode not in ("r", "r+"):
        return _writable_root(source, overwrite=mode == "w")
    try:
        return zarr.open_group(
            source, mode=mode, use_consolidated=False
        )  # consolidated metadata may say other than each array's own
    except MemoryError:
        raise
    except Exception as error:
        raise DataError(f"{source} is not a zarr group, or its metadata cannot be read: {error}.") from error


def _writable_root(store, overwrite=False, attributes=None) -> zarr.Group:
    """The group in `store`, made (in zarr format 2) if there is none."""
    if not overwrite:
        try:
            root = zarr.open_group(store, mode="r+", use_consolidated=False)
        except FileNotFoundError:  # also what zarr raises when there is a folder but no group in it
            pass
        else:
            if root.metadata.zarr_format != 2:
                raise DataError(
                    f"{place_of(root)} is a group of zarr format 3, which is only read here: write to another place."
                )
            return root
    return zarr.create_group(store, zarr_format=2, overwrite=overwrite, attributes=attributes)


def _write_array(group: zarr.Group, name: str, values, chunks, compressor) -> str:
    """Write a numpy or zarr array as group[name], in place of what is there; returns its checksum."""
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
    return _checksum(values, tuple(chunks[:1]), array)


def _checksum(values, multiple_of: tuple = (), copy_to: zarr.Array | None = None) -> str:
    """The checksum of a numpy or zarr array, compared with the one stored for it; `copy_to` also gets its values."""
    if isinstance(values, zarr.Array):
        check_chunks(values)
    crc = 0
    for rows in _blocks(values, *multiple_of):  # whole chunks at a time: a zip cannot rewrite one
        block = _read(values, rows)
        crc = _crc(block, crc)
        if copy_to is not None:
            copy_to[rows] = block
    _compare_checksum(values, crc)
    return _describe(values, crc)


def _crc(block: np.ndarray, crc: int = 0) -> int:
    """CRC-32 of little-endian values in C order, continuing `crc`."""
    block = np.ascontiguousarray(block, block.dtype.newbyteorder("<"))
    return zlib.crc32(block.reshape(-1).view(np.uint8), crc)


def _describe(array, crc: int) -> str:
    """'<f4 50x2 crc32 1a2b3c4d': a checksum with what makes bytes values."""
    return f"{array.dtype.newbyteorder('<').str} {'x'.join(map(str, array.shape))} crc32 {crc:08x}"


def _compare_checksum(array, crc: int):
    """Raise if the replay buffer that a zarr array belongs to says that its values were others."""
    if not isinstance(array, zarr.Array) or array.path.count("/") < 1:
        return
    path, group, name = ("/" + array.path).rsplit("/", 2)
    try:
        root = zarr.open_group(array.store, path=path.strip("/"), mode="r", use_consolidated=False)
    except FileNotFoundError:  # an array in a group of something else
        return
    expected, found = _get_checksums(root).get(f"{group}/{name}"), _describe(array, crc)
    if expected is not None and expected != found:
        raise DataError(
            f"{place_of(array)} is not what was written: it is {found}, its checksum says {expected}. Get or copy the data again. (If other "
            f"software changed it on purpose, remove 'checksums' from the attributes of {place_of(root)}.)"
        )


def _get_checksums(root) -> dict:
    """{'data/action': checksum, ...} of a zarr group; empty if nothing is known."""
    checksums = root.attrs.get("checksums", {}) if isinstance(root, zarr.Group) else {}
    if not isinstance(checksums, dict) or not all(isinstance(value, str) for value in checksums.values()):
        raise DataError(f"{place_of(root)}: its attribute 'checksums' is damaged: {str(checksums)[:80]}.")
    return dict(checksums)


def _set_checksums(root: zarr.Group, checksums: dict | None):
    attributes = dict(root.attrs)
    if checksums is not None:
        root.attrs["checksums"] = checksums
    elif attributes.pop("checksums", None) is not None:
        root.attrs.put(attributes)


def _read(array, rows) -> np.ndarray:
    try:
        return np.asarray(array[rows])
    except MemoryError:
        raise
    except Exception as error:  # every codec has its own exceptions
        raise DataError(f"{place_of(array)} cannot be read, a chunk of it is damaged or cut short: {error}.") from error


def _blocks(array, multiple_of: int = 1):
    """Slices of the first axis that cover it, each of about READ_BLOCK_BYTES."""
    if array.ndim == 0:
        yield ...
        return
    row_bytes = max(1, math.prod(array.shape[1:]) * array.dtype.itemsize)
    rows = max(1, int(READ_BLOCK_BYTES / row_bytes / multiple_of)) * multiple_of
    for start in range(0, array.shape[0], rows):
        yield slice(start, start + rows)


def _compressor_of(array):
    """The codec a zarr array of format 2 was written with; None for another, or an array in memory."""
    if not isinstance(array, zarr.Array) or array.metadata.zarr_format != 2:
        return None
    return array.compressors[0] if array.compressors else None


def _resolve_compressor(compressors, key: str, array):
    if compressors is not None and not isinstance(compressors, dict):
        return ReplayBuffer.resolve_compressor(compressors)
    if compressors and key in compressors:
        return ReplayBuffer.resolve_compressor(compressors[key])
    if isinstance(array, zarr.Array) and array.metadata.zarr_format == 2:
        return _compressor_of(array)
    return ReplayBuffer.resolve_compressor("default")


def _resolve_chunks(chunks, key: str, array) -> tuple:
    if isinstance(chunks, tuple):
        return chunks
    if chunks and key in chunks:
        return chunks[key]
    return array.chunks if isinstance(array, zarr.Array) else get_optimal_chunks(array.shape, array.dtype)
