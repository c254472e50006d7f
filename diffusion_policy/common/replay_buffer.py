"""Episodes, one after the other: `data/<key>` arrays (steps, ...) and cumulative `meta/episode_ends` (episodes,).

The same structure lives in memory as numpy arrays, or in a zarr group: a folder, a `.zip`, or any zarr store. Files are
checked before they are decoded, see diffusion_policy.storage.zarr_io.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numcodecs
import numpy as np
import zarr
from zarr.storage import ZipStore

from diffusion_policy.common.errors import DataError
from diffusion_policy.storage import zarr_io
from diffusion_policy.storage.zarr_checks import check_chunks_compatible, place_of
from diffusion_policy.storage.zarr_io import array_keys, read_array

__all__ = [
    "ReplayBuffer",
    "check_chunks_compatible",
    "get_optimal_chunks",
    "read_array",
    "rechunk_recompress_array",
]

COMPRESSORS: dict[str, dict[str, Any]] = {
    "default": dict(cname="lz4", clevel=5, shuffle=numcodecs.Blosc.NOSHUFFLE),
    "disk": dict(cname="zstd", clevel=5, shuffle=numcodecs.Blosc.BITSHUFFLE),
}


def get_optimal_chunks(
    shape: tuple, dtype: Any, target_chunk_bytes: float = 2e6, max_chunk_length: int | None = None
) -> tuple:
    """Chunks of about `target_chunk_bytes`: trailing dimensions whole while they fit, the next one cut, others 1."""
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
    group: zarr.Group, name: str, chunks: tuple | None = None, chunk_length: int | None = None, compressor: Any = None
) -> zarr.Array:
    """Rewrite `group[name]` with other chunks (or another chunk length) and compressor; None keeps the present one."""
    array: Any = group[name]
    if chunks is None:
        chunks = array.chunks if chunk_length is None else (chunk_length, *array.chunks[1:])
    if compressor is None:
        compressor = _compressor_of(array)
    if tuple(chunks) == array.chunks and compressor == _compressor_of(array):
        return array
    zarr_io.write_array(group, name, read_array(array), chunks, compressor)
    rewritten: Any = group[name]
    return rewritten


class ReplayBuffer:
    """A zarr group, or a dict {'data': {key: array}, 'meta': {'episode_ends': array}}, as a list of episodes."""

    def __init__(self, root: Any):
        zarr_io.check_replay_buffer(root)
        self.root, self.data, self.meta = root, root["data"], root["meta"]

    # ------------------------------------------------------------------ creating

    @classmethod
    def create_empty_zarr(cls, storage: Any = None, root: Any = None) -> ReplayBuffer:
        """An empty buffer in a zarr store (default: in memory) or in an open group."""
        if root is None:
            root = zarr_io.writable_root(zarr.storage.MemoryStore() if storage is None else storage)
        root.require_group("data")
        meta = root.require_group("meta")
        if "episode_ends" not in meta:
            ends = zarr_io.write_array(meta, "episode_ends", np.zeros(0, dtype=np.int64), (1,), None)
            if len(root["data"]) == 0:
                zarr_io.set_checksums(root, {"meta/episode_ends": ends})
        return cls(root)

    @classmethod
    def create_empty_numpy(cls) -> ReplayBuffer:
        """An empty buffer of numpy arrays."""
        return cls({"data": {}, "meta": {"episode_ends": np.zeros(0, dtype=np.int64)}})

    @classmethod
    def create_from_group(cls, group: Any) -> ReplayBuffer:
        """A buffer on an open group; an empty group is initialised."""
        if len(group) == 0 and not getattr(group, "read_only", True):
            return cls.create_empty_zarr(root=group)
        return cls(group)

    @classmethod
    def create_from_path(cls, zarr_path: str | os.PathLike, mode: str = "r") -> ReplayBuffer:
        """A buffer on the group at `zarr_path` (folder or .zip), without reading its data; `mode` is zarr's."""
        buffer = cls.create_from_group(zarr_io.open_group(zarr_path, mode))
        if mode == "r":
            buffer._require_episodes()
        return buffer

    @classmethod
    def copy_from_store(
        cls,
        src_store: Any,
        store: Any = None,
        keys: Sequence[str] | None = None,
        chunks: Any = None,
        compressors: Any = None,
        if_exists: str = "replace",
    ) -> ReplayBuffer:
        """A copy of the group in `src_store` (a zarr store or a path), checked while it is read.

        store: the target, numpy arrays in memory if None. keys: the arrays to copy, all if None.
        chunks, compressors: as in `add_episode`; arrays they do not name keep the source's.
        """
        source = cls(zarr_io.open_group(src_store, "r"))
        source._require_episodes()
        keys = list(source.keys()) if keys is None else keys
        for key in keys:
            if key not in source:
                raise DataError(f"{place_of(source.root)} has no array data/{key}; it has: {', '.join(source.keys())}.")
        if store is not None:
            root: Any = source._write_to(store, keys, chunks, compressors, if_exists)
        else:
            root = {
                "data": {key: read_array(source[key]) for key in keys},
                "meta": {key: read_array(source.meta[key]) for key in array_keys(source.meta)},
            }
        if isinstance(src_store, (str, os.PathLike)):
            source.root.store.close()
        return cls(root)

    @classmethod
    def copy_from_path(
        cls,
        zarr_path: str | os.PathLike,
        backend: str | None = None,
        store: Any = None,
        keys: Sequence[str] | None = None,
        chunks: Any = None,
        compressors: Any = None,
        if_exists: str = "replace",
    ) -> ReplayBuffer:
        """As `copy_from_store`, from a folder or a .zip; backend='numpy' is the same as store=None."""
        return cls.copy_from_store(
            zarr_path, None if backend == "numpy" else store, keys, chunks, compressors, if_exists
        )

    # ------------------------------------------------------------------ saving

    def save_to_store(self, store: Any, chunks: Any = None, compressors: Any = None, if_exists: str = "replace") -> Any:
        """Write everything into a zarr store (or path) and return it; arguments as in `copy_from_store`."""
        self._write_to(store, list(self.keys()), chunks, compressors, if_exists)
        return store

    def save_to_path(
        self,
        zarr_path: str | os.PathLike,
        chunks: Any = None,
        compressors: Any = None,
        if_exists: str = "replace",
    ) -> str:
        """Write everything into a folder, or into a .zip file if the path ends in .zip; returns the path."""
        path = str(os.path.expanduser(zarr_path))
        if not path.endswith(".zip"):
            return self.save_to_store(path, chunks, compressors, if_exists)
        if if_exists != "replace" and os.path.exists(path):
            raise DataError(f"{path} exists already, and a .zip can only be replaced as a whole.")
        with ZipStore(path + ".tmp", mode="w") as store:  # a zip is only readable once it is closed
            self.save_to_store(store, chunks, compressors)
        os.replace(path + ".tmp", path)
        return path

    def _write_to(self, store: Any, keys: Sequence[str], chunks: Any, compressors: Any, if_exists: str) -> zarr.Group:
        """if_exists: 'replace' everything, 'skip' existing arrays, or 'raise'."""
        if if_exists not in ("replace", "skip", "raise"):
            raise ValueError(f"if_exists={if_exists!r}: use 'replace', 'skip' or 'raise'")
        sources = (("meta", self.meta, array_keys(self.meta)), ("data", self.data, keys))
        attributes: dict[str, Any] = {}
        if isinstance(store, ZipStore):  # a zip cannot rewrite its attributes, so they come first
            attributes["checksums"] = {
                f"{name}/{key}": zarr_io.checksum(source[key]) for name, source, names in sources for key in names
            }
        root = zarr_io.writable_root(store, attributes=attributes)
        if self.backend == "zarr" and os.path.realpath(place_of(root)) == os.path.realpath(place_of(self.root)):
            raise DataError(f"{place_of(root)} cannot be written over itself: it would be emptied before it is read.")
        checksums = {} if if_exists == "replace" else zarr_io.get_checksums(root)
        if not attributes:
            zarr_io.set_checksums(root, None)  # they would be wrong if this stopped half-way
        for name, source, names in sources:
            # Replace whole groups: old arrays could have another number of steps.
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
                    checksums[f"{name}/{key}"] = zarr_io.write_array(group, key, array, chunk_shape, compressor)
        if not attributes:
            zarr_io.set_checksums(root, checksums)
        return root

    @staticmethod
    def resolve_compressor(compressor: Any = "default") -> Any:
        """'default' (fast), 'disk' (small), any numcodecs codec, or None."""
        return numcodecs.Blosc(**COMPRESSORS[compressor]) if isinstance(compressor, str) else compressor

    # ------------------------------------------------------------------ reading

    @property
    def backend(self) -> str:
        return "zarr" if isinstance(self.root, zarr.Group) else "numpy"

    @property
    def episode_ends(self) -> np.ndarray:
        """(episodes,) int64: the step after the last one of each episode."""
        return self.meta["episode_ends"][:]

    @property
    def episode_lengths(self) -> np.ndarray:
        """(episodes,) int64: steps of each episode."""
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

    def keys(self) -> list[str]:
        return array_keys(self.data)

    def values(self) -> list[Any]:
        return [self.data[key] for key in self.keys()]

    def items(self) -> list[tuple[str, Any]]:
        return [(key, self.data[key]) for key in self.keys()]

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def __contains__(self, key: str) -> bool:
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

    def get_episode(self, idx: int, copy: bool = False) -> dict[str, np.ndarray]:
        """{key: (length, ...)} of one episode."""
        steps = self.get_episode_slice(idx)
        return self.get_steps_slice(steps.start, steps.stop, copy=copy)

    def get_steps_slice(
        self, start: int, stop: int, step: int | None = None, copy: bool = False
    ) -> dict[str, np.ndarray]:
        """{key: (steps, ...)}; without `copy`, arrays in memory are views."""
        result = {key: value[start:stop:step] for key, value in self.items()}
        return {key: value.copy() for key, value in result.items()} if copy else result

    # ------------------------------------------------------------------ changing

    def update_meta(self, data: dict[str, Any]) -> None:
        """Set arrays of `meta`."""
        for key, value in data.items():
            value = np.asarray(value)
            if value.dtype == object:
                raise DataError(f"meta/{key} cannot be stored: it is not an array of numbers or text.")
            if self.backend == "zarr":
                checksums = zarr_io.take_checksums(self.root)
                checksum = zarr_io.write_array(
                    self.meta, key, value, get_optimal_chunks(value.shape, value.dtype), None
                )
                if checksums:
                    zarr_io.set_checksums(self.root, {**checksums, f"meta/{key}": checksum})
            else:
                self.meta[key] = value

    def add_episode(self, data: dict[str, Any], chunks: Any = None, compressors: Any = None) -> None:
        """Append {key: (length, ...)}, with the keys of the earlier episodes.

        chunks and compressors are for arrays that the first episode creates in a zarr store: chunks is a tuple or
        {key: tuple}, by default of about 2 MB; compressors is an argument of `resolve_compressor` or {key: argument}.
        """
        data = {key: np.asarray(value) for key, value in data.items()}
        lengths = {key: len(value) for key, value in data.items()}
        if len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise DataError(f"An episode's arrays need the same length, at least 1: {lengths}.")
        if self.n_episodes and set(data) != set(self.keys()):
            raise DataError(f"The episode has keys {sorted(data)}, the replay buffer {sorted(self.keys())}.")
        for key, value in data.items():
            if key in self and self[key].shape[1:] != value.shape[1:]:
                raise DataError(
                    f"data/{key} holds steps of shape {self[key].shape[1:]}, the episode's are {value.shape[1:]}."
                )

        start, stop = self.n_steps, self.n_steps + next(iter(lengths.values()))
        checksums = zarr_io.take_checksums(self.root)
        for key, value in data.items():
            if self.backend == "numpy":
                self.data[key] = np.concatenate([self.data[key], value]) if key in self.data else value.copy()
            elif key in self.data:
                array = self.data[key].with_config(zarr_io.WRITE_CONFIG)
                array.resize((stop, *array.shape[1:]))
                array[start:stop] = value
                if f"data/{key}" in checksums:
                    checksums[f"data/{key}"] = zarr_io.continued_checksum(checksums[f"data/{key}"], array, value)
            else:
                checksum = zarr_io.write_array(
                    self.data,
                    key,
                    value,
                    _resolve_chunks(chunks, key, value),
                    _resolve_compressor(compressors, key, value),
                )
                if checksums:
                    checksums[f"data/{key}"] = checksum
        self._set_episode_ends(np.append(self.episode_ends, stop), checksums)

    def extend(self, data: dict[str, Any]) -> None:
        """As `add_episode`."""
        self.add_episode(data)

    def drop_episode(self) -> None:
        """Remove the last episode."""
        if not self.n_episodes:
            raise DataError("The replay buffer has no episode to drop.")
        start = self.get_episode_slice(-1).start
        zarr_io.take_checksums(self.root)  # removed: new ones would need a read of all remaining steps
        for key, array in self.items():
            if self.backend == "numpy":
                self.data[key] = array[:start].copy()
            else:
                array.resize((start, *array.shape[1:]))
        self._set_episode_ends(self.episode_ends[:-1])

    def pop_episode(self) -> dict[str, np.ndarray]:
        """Remove the last episode and return it."""
        episode = self.get_episode(-1, copy=True)
        self.drop_episode()
        return episode

    def get_chunks(self) -> dict[str, tuple]:
        """{key: chunks} of a zarr buffer."""
        return {key: array.chunks for key, array in self.items()}

    def set_chunks(self, chunks: dict[str, tuple]) -> None:
        for key, value in chunks.items():
            check_chunks_compatible(value, self[key].shape)
            rechunk_recompress_array(self.data, key, chunks=value)

    def get_compressors(self) -> dict[str, Any]:
        """{key: codec} of a zarr buffer."""
        return {key: _compressor_of(array) for key, array in self.items()}

    def set_compressors(self, compressors: dict[str, Any]) -> None:
        for key, value in compressors.items():
            rechunk_recompress_array(self.data, key, compressor=self.resolve_compressor(value))

    def _set_episode_ends(self, ends: np.ndarray, checksums: dict[str, str] | None = None) -> None:
        """checksums: those of all arrays, if known."""
        if self.backend == "numpy":
            self.meta["episode_ends"] = ends
            return
        array = self.meta["episode_ends"].with_config(zarr_io.WRITE_CONFIG)
        array.resize(ends.shape)
        array[:] = ends
        if array.chunks[0] < len(ends):  # leave room to grow, so that it is rarely rewritten
            rechunk_recompress_array(self.meta, "episode_ends", chunk_length=int(len(ends) * 1.5))
        if checksums:
            zarr_io.set_checksums(
                self.root, {**checksums, "meta/episode_ends": zarr_io.checksum(ends.astype(array.dtype))}
            )

    def _require_episodes(self) -> None:
        if not self.n_episodes:
            raise DataError(f"{place_of(self.root)} has no episodes: meta/episode_ends is empty.")


def _compressor_of(array: Any) -> Any:
    """The codec of a zarr array of format 2; None for any other array."""
    if not isinstance(array, zarr.Array) or array.metadata.zarr_format != 2:
        return None
    return array.compressors[0] if array.compressors else None


def _resolve_compressor(compressors: Any, key: str, array: Any) -> Any:
    if compressors is not None and not isinstance(compressors, dict):
        return ReplayBuffer.resolve_compressor(compressors)
    if compressors and key in compressors:
        return ReplayBuffer.resolve_compressor(compressors[key])
    if isinstance(array, zarr.Array) and array.metadata.zarr_format == 2:
        return _compressor_of(array)
    return ReplayBuffer.resolve_compressor("default")


def _resolve_chunks(chunks: Any, key: str, array: Any) -> tuple:
    if isinstance(chunks, tuple):
        return chunks
    if chunks and key in chunks:
        return chunks[key]
    return array.chunks if isinstance(array, zarr.Array) else get_optimal_chunks(array.shape, array.dtype)
