"""Episodes laid end to end: `data/<key>` arrays of shape (steps, ...) and `meta/episode_ends` (episodes,), int64 and cumulative.

The same structure lives in memory as numpy arrays, or in a zarr group: a folder, a `.zip`, or any zarr store. Groups of zarr
format 2 and 3 are read; format 2 is written, which Diffusion Policy's own code, on zarr 2, also reads.

Files may be damaged or hostile. Before a chunk is decoded its codec is one of those below, none of which can run code, and its size,
stored and decoded, is what the metadata says; no more is allocated than a few times the array. Chunks of lz4 or Blosc carry no checksum,
so the root attribute `checksums` holds one of the values of each array: written by everything here that writes, compared by
`read_array` and everything that copies. Reading single steps of a zarr array (`buffer["action"][3]`) compares nothing.
"""
import bz2
import math
import os
import stat
import zipfile
import zlib

import numcodecs
import numpy as np
import zarr
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, ZipStore

from diffusion_policy.common.errors import DataError, DataNotFoundError
from diffusion_policy.common.memory import available_bytes, readable_bytes

READ_BLOCK_BYTES = 64e6
MAX_METADATA_BYTES = 16e6
SMALL_CHUNK_BYTES = 64e6  # a chunk may be larger than the array it belongs to, which grows, but not larger than this and 4 arrays
METADATA_FILES = (".zgroup", ".zarray", ".zattrs", "zarr.json")
COMPRESSORS_READ = ("blosc", "zlib", "gzip", "bz2", "zstd", "lz4")
WRITE_CONFIG = {"write_empty_chunks": True}  # chunks of zeros too: a missing one then always means that data was lost
COMPRESSORS = {
    "default": dict(cname="lz4", clevel=5, shuffle=numcodecs.Blosc.NOSHUFFLE),
    "disk": dict(cname="zstd", clevel=5, shuffle=numcodecs.Blosc.BITSHUFFLE),
}


def check_chunks_compatible(chunks: tuple, shape: tuple):
    """Raise unless `chunks` is one positive integer for each dimension of `shape`."""
    if len(chunks) != len(shape) or not all(isinstance(c, (int, np.integer)) and c > 0 for c in chunks):
        raise DataError(f"Chunks {chunks} do not fit an array of shape {shape}: give one positive integer a dimension.")


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


def rechunk_recompress_array(group: zarr.Group, name: str, chunks=None, chunk_length=None, compressor=None) -> zarr.Array:
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
        _check_chunks(array)
        _require_memory(array, math.prod(array.shape) * dtype.itemsize)
    result = np.empty(array.shape, dtype)
    crc = 0
    for rows in _blocks(array):
        block = _read(array, rows)
        with np.errstate(invalid="ignore"):
            result[rows] = block
        if result.dtype != array.dtype and not np.array_equal(result[rows], block):
            raise DataError(f"{_where(array)}: its values are not all {result.dtype} numbers.")
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
            raise DataError(f"{_where(root)}: the metadata of an array or group in it cannot be read: {error}.") from error

    def _check(self):
        root, where = self.root, _where(self.root)
        for name in ("data", "meta"):
            if name not in root:
                raise DataError(f"{where} has no group {name!r}: it is not a replay buffer, or its metadata is missing.")
        self.data, self.meta = root["data"], root["meta"]
        if "episode_ends" not in self.meta:
            raise DataError(f"{where} has no array meta/episode_ends: it is not a replay buffer, or its metadata is missing.")
        for group in (self.data, self.meta):
            for key in _array_keys(group):
                if isinstance(group[key], zarr.Array):
                    _check_metadata(group[key])
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
                raise DataError(f"{where}: data/{key} has shape {value.shape}, but meta/episode_ends ends at {steps} steps.")

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
    def copy_from_store(cls, src_store, store=None, keys=None, chunks=None, compressors=None,
                        if_exists="replace") -> "ReplayBuffer":
        """A copy of the group in `src_store` (a zarr store or a path), checked as it is read.

        store: where to, numpy arrays in memory if None. keys: which arrays, all if None.
        chunks, compressors: as in `add_episode`; what they do not name keeps the source's.
        """
        source = cls(_open_group(src_store, "r"))
        source._require_episodes()
        keys = list(source.keys()) if keys is None else keys
        for key in keys:
            if key not in source:
                raise DataError(f"{_where(source.root)} has no array data/{key}; it has: {', '.join(source.keys())}.")
        if store is not None:
            root = source._write_to(store, keys, chunks, compressors, if_exists)
        else:
            root = {"data": {key: read_array(source[key]) for key in keys},
                    "meta": {key: read_array(source.meta[key]) for key in _array_keys(source.meta)}}
        if isinstance(src_store, (str, os.PathLike)):
            source.root.store.close()
        return cls(root)

    @classmethod
    def copy_from_path(cls, zarr_path, backend=None, store=None, keys=None, chunks=None, compressors=None,
                       if_exists="replace") -> "ReplayBuffer":
        """As `copy_from_store`, from a folder or a .zip; backend 'numpy' is the same as store None."""
        return cls.copy_from_store(zarr_path, None if backend == "numpy" else store, keys, chunks, compressors, if_exists)

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
            attributes["checksums"] = {f"{name}/{key}": _checksum(source[key]) for name, source, names in sources for key in names}
        root = _writable_root(store, attributes=attributes)
        if self.backend == "zarr" and os.path.realpath(_where(root)) == os.path.realpath(_where(self.root)):
            raise DataError(f"{_where(root)} cannot be written over itself: it would be emptied before it is read.")
        checksums = {} if if_exists == "replace" else _get_checksums(root)
        if not attributes:
            _set_checksums(root, None)  # none while it changes: if this stops half-way they would be wrong
        for name, source, names in sources:
            # replaced as a whole: arrays left from before could have another number of steps
            group = root.create_group(name, overwrite=True) if if_exists == "replace" and name in root else root.require_group(name)
            for key in names:
                if key in group and if_exists == "raise":
                    raise DataError(f"{_where(root)} already has {name}/{key}.")
                if key not in group:
                    array = source[key]
                    compressor = _resolve_compressor(compressors, key, array) if name == "data" else _compressor_of(array)
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
                raise DataError(f"data/{key} holds steps of shape {self[key].shape[1:]}, the episode's are {value.shape[1:]}.")

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
                checksum = _write_array(self.data, key, value, _resolve_chunks(chunks, key, value),
                                        _resolve_compressor(compressors, key, value))
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
            raise DataError(f"{_where(self.root)} has no episodes: meta/episode_ends is empty.")


def _where(node) -> str:
    """How an error names a group or an array."""
    if isinstance(node, (zarr.Group, zarr.Array)):
        return str(node.store_path).removeprefix("file://")
    return "The array in memory" if isinstance(node, np.ndarray) else "The replay buffer in memory"


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
            _check_zip(source)
            source = ZipStore(source, mode="r")
        elif os.path.isdir(source):
            _check_folder(source)
    if mode not in ("r", "r+"):
        return _writable_root(source, overwrite=mode == "w")
    try:
        return zarr.open_group(source, mode=mode, use_consolidated=False)  # consolidated metadata may say other than each array's own
    except MemoryError:
        raise
    except Exception as error:
        raise DataError(f"{source} is not a zarr group, or its metadata cannot be read: {error}.") from error


def _check_folder(path):
    """Raise unless the metadata of the groups and arrays at `path` are files that can be read whole: no pipe, nothing endless."""
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


def _check_zip(path):
    """Raise unless `path` is a zip file whose entries can be read one by one without surprises."""
    try:
        with zipfile.ZipFile(path) as file:
            for info in file.infolist():
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others are decompressed without a limit
                    raise DataError(f"{path}: entry {info.filename} is compressed in another way than deflate.")
                if info.filename.endswith(METADATA_FILES):
                    _check_metadata_size(f"{path}: {info.filename}", info.file_size)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        raise DataError(f"{path} is not a zarr group, it is not a zip file or was cut short: {error}.") from error


def _check_metadata_size(where: str, size: int):
    if size > MAX_METADATA_BYTES:
        raise DataError(f"{where} has {readable_bytes(size)}, which is no metadata of a replay buffer.")


def _writable_root(store, overwrite=False, attributes=None) -> zarr.Group:
    """The group in `store`, made (in zarr format 2) if there is none."""
    if not overwrite:
        try:
            root = zarr.open_group(store, mode="r+", use_consolidated=False)
        except FileNotFoundError:  # also what zarr raises when there is a folder but no group in it
            pass
        else:
            if root.metadata.zarr_format != 2:
                raise DataError(f"{_where(root)} is a group of zarr format 3, which is only read here: write to another place.")
            return root
    return zarr.create_group(store, zarr_format=2, overwrite=overwrite, attributes=attributes)


def _write_array(group: zarr.Group, name: str, values, chunks, compressor) -> str:
    """Write a numpy or zarr array as group[name], in place of what is there; returns its checksum."""
    check_chunks_compatible(chunks, values.shape)
    array = group.create_array(
        name, shape=values.shape, dtype=values.dtype, chunks=tuple(chunks), compressors=compressor,
        overwrite=name in group, config=WRITE_CONFIG)
    return _checksum(values, tuple(chunks[:1]), array)


def _checksum(values, multiple_of: tuple = (), copy_to: zarr.Array | None = None) -> str:
    """The checksum of a numpy or zarr array, compared with the one stored for it; `copy_to` also gets its values."""
    if isinstance(values, zarr.Array):
        _check_chunks(values)
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
            f"{_where(array)} is not what was written: it is {found}, its checksum says {expected}. Get or copy the data again. (If other "
            f"software changed it on purpose, remove 'checksums' from the attributes of {_where(root)}.)")


def _get_checksums(root) -> dict:
    """{'data/action': checksum, ...} of a zarr group; empty if nothing is known."""
    checksums = root.attrs.get("checksums", {}) if isinstance(root, zarr.Group) else {}
    if not isinstance(checksums, dict) or not all(isinstance(value, str) for value in checksums.values()):
        raise DataError(f"{_where(root)}: its attribute 'checksums' is damaged: {str(checksums)[:80]}.")
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
        raise DataError(f"{_where(array)} cannot be read, a chunk of it is damaged or cut short: {error}.") from error


def _require_memory(array: zarr.Array, size: int):
    free = available_bytes()
    if size > free:
        raise DataError(f"{_where(array)} says that it has shape {array.shape}, in chunks of {array.chunks}: reading it takes "
                        f"{readable_bytes(size)}, but only {readable_bytes(free)} of memory are free here.")


def _codecs(array: zarr.Array) -> tuple:
    """(id of the compressor or None, bytes after what it compressed) of a zarr array; raises for codecs that are not read here.

    Some codecs run code (pickle) or decode to any size. What is allowed is one of COMPRESSORS_READ and, in format 3, around it what only
    moves bytes.
    """
    metadata = array.metadata
    if metadata.zarr_format == 2:
        filters, after = [codec.codec_id for codec in metadata.filters or ()], 0
        compressors = [] if metadata.compressor is None else [metadata.compressor.codec_id]
    else:
        names = [codec["name"] for codec in metadata.to_dict()["codecs"]]
        names = names[1:] if names[0] == "transpose" else names
        after = 4 if names[-1] == "crc32c" else 0
        names = names[:-1] if after else names
        filters, compressors = ([], names[1:]) if names[:1] == ["bytes"] else (names, [])
    refused = [*filters, *(compressors if len(compressors) > 1 or not set(compressors) <= set(COMPRESSORS_READ) else ())]
    if refused:
        raise DataError(f"{_where(array)} is encoded with {', '.join(refused)}, which is not read here because decoding it can run code or "
                        f"fill the memory; read are arrays without filters and with at most one of {', '.join(COMPRESSORS_READ)}.")
    return (compressors[0] if compressors else None), after


def _check_metadata(array: zarr.Array):
    """Raise for an array that must not be decoded, judging by its metadata alone."""
    if array.dtype.kind not in "biufcmMSU" or array.dtype.itemsize == 0:
        raise DataError(f"{_where(array)} has dtype {array.dtype}: only arrays of numbers or of text of fixed length are read.")
    _codecs(array)
    check_chunks_compatible(array.chunks, array.shape)
    size, chunk = (math.prod(lengths) * array.dtype.itemsize for lengths in (array.shape, array.chunks))
    if chunk > SMALL_CHUNK_BYTES + 4 * size:
        raise DataError(f"{_where(array)}: a chunk of shape {array.chunks} has {readable_bytes(chunk)}, the whole array "
                        f"{readable_bytes(size)}.")


def _check_chunks(array: zarr.Array):
    """Raise for what zarr and its codecs pass over: a missing chunk, one that was cut short, one that decodes to another size."""
    _check_metadata(array)
    _require_memory(array, 2 * max(min(READ_BLOCK_BYTES, math.prod(array.shape) * array.dtype.itemsize),
                                   math.prod(array.shape[1:]) * array.dtype.itemsize, math.prod(array.chunks) * array.dtype.itemsize))
    compressor, after = _codecs(array)
    decoded = math.prod(array.chunks) * array.dtype.itemsize
    grid = [-(-length // chunk) for length, chunk in zip(array.shape, array.chunks)]
    with _Stored(array) as stored:
        for coordinates in _coordinates(grid):
            name = array.metadata.encode_chunk_key(coordinates)
            size = stored.size(name)
            if size is None:
                raise DataError(
                    f"{_where(array)}: {_count_missing(array, stored, grid)} of {math.prod(grid)} chunks are missing, most likely from an "
                    f"incomplete download or copy. (A writer that leaves out chunks of zeros, as zarr 3 does by default, must be told "
                    f"write_empty_chunks=True.)")
            try:
                problem = _chunk_problem(compressor, decoded, size - after, lambda length: stored.read(name, length))
            except (OSError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
                problem = str(error)
            if problem:
                raise DataError(f"{_where(array)} cannot be read, its chunk {name} is damaged or cut short: {problem}.")


def _count_missing(array, stored, grid) -> int | str:
    if math.prod(grid) > 100_000:
        return "some"
    return sum(stored.size(array.metadata.encode_chunk_key(coordinates)) is None for coordinates in _coordinates(grid))


def _coordinates(grid: list):
    """All of a grid, one after the other; itertools.product would first make lists, and a grid may be absurd."""
    if not grid:
        yield ()
        return
    for first in range(grid[0]):
        for rest in _coordinates(grid[1:]):
            yield first, *rest


def _chunk_problem(compressor, decoded: int, size: int, read) -> str | None:
    """What is wrong with a chunk of `size` bytes, read(n) being its first n, that is to decode to `decoded` bytes."""
    if size <= 0:
        return "it is empty"
    if compressor is None:
        return None if size == decoded else f"it has {size} bytes instead of {decoded}"
    if size > 2 * decoded + 1024:  # no compressor makes data so much larger, and it would be read whole
        return f"it has {readable_bytes(size)}, but decodes to {readable_bytes(decoded)}"
    if compressor == "blosc":  # version, version of the codec, flags, typesize, then three numbers: decoded, block, stored
        header = read(16)
        found, stored = (int.from_bytes(header[start:start + 4], "little") for start in (4, 12))
        if len(header) < 16 or stored != size:
            return f"it has {size} bytes instead of {stored}"
    elif compressor == "lz4":  # numcodecs puts the decoded size first
        found = int.from_bytes(read(4), "little")
    elif compressor == "zstd":
        found = _zstd_content_size(read(18))
    else:
        found = _inflated_size(compressor, read(size), decoded)
    return None if found == decoded else f"it decodes to {'an unknown number of' if found is None else found} bytes instead of {decoded}"


def _zstd_content_size(header: bytes) -> int | None:
    """What a zstd frame says it decodes to, None if it does not say."""
    if len(header) < 6 or header[:4] != b"\x28\xb5\x2f\xfd":
        return None
    single, length = header[4] >> 5 & 1, (0, 2, 4, 8)[header[4] >> 6]
    if single and not length:
        length = 1
    start = 5 + (not single) + (0, 1, 2, 4)[header[4] & 3]  # after the window and the number of a dictionary
    value = int.from_bytes(header[start:start + length], "little") + (256 if length == 2 else 0)
    return value if length and len(header) >= start + length else None


def _inflated_size(compressor: str, data: bytes, limit: int) -> int | None:
    """What zlib, gzip or bz2 data decode to, at most limit + 1, by decoding no more; None if that is not all of the data."""
    decompressor = bz2.BZ2Decompressor() if compressor == "bz2" else zlib.decompressobj(wbits={"zlib": 15, "gzip": 31}[compressor])
    size = len(decompressor.decompress(data, limit + 1))
    return size if size > limit or (decompressor.eof and not decompressor.unused_data) else None


class _Stored:
    """The chunks of a zarr array as they are stored, without reading them whole where the store allows it."""

    def __init__(self, array: zarr.Array):
        self.store, self.prefix = array.store, array.path + "/" if array.path else ""

    def __enter__(self):
        self.zip = zipfile.ZipFile(self.store.path) if isinstance(self.store, ZipStore) else None
        return self

    def __exit__(self, *_):
        if self.zip:
            self.zip.close()

    def size(self, name: str) -> int | None:
        """Bytes of a chunk; None if there is no such file."""
        try:
            if self.zip:
                return self.zip.getinfo(self.prefix + name).file_size
            if isinstance(self.store, LocalStore):
                info = os.stat(self.store.root / self.prefix / name)
                return info.st_size if stat.S_ISREG(info.st_mode) else None
        except (KeyError, OSError):
            return None
        data = self._get(name)
        return None if data is None else len(data)

    def read(self, name: str, length: int) -> bytes:
        """The first bytes of a chunk."""
        if self.zip:
            with self.zip.open(self.prefix + name) as file:
                return file.read(length)
        if isinstance(self.store, LocalStore):
            with open(self.store.root / self.prefix / name, "rb") as file:
                return file.read(length)
        return self._get(name)[:length]

    def _get(self, name: str) -> bytes | None:
        data = sync(self.store.get(self.prefix + name, default_buffer_prototype()))
        return None if data is None else data.to_bytes()


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
