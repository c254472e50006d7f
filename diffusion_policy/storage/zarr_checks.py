"""What is checked of a zarr group from elsewhere before any of it is decoded; each check raises a DataError.

Files may be damaged or hostile. Before a chunk is decoded its codec is one of those below, none of which can run code, and its size,
stored and decoded, is what the metadata says; no more is allocated than a few times the array.
"""

import bz2
import math
import os
import stat
import zipfile
import zlib

import numpy as np
import zarr
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, ZipStore

from diffusion_policy.common.errors import DataError
from diffusion_policy.common.memory import available_bytes, readable_bytes

READ_BLOCK_BYTES = 64e6
MAX_METADATA_BYTES = 16e6
SMALL_CHUNK_BYTES = (
    64e6  # a chunk may be larger than the array it belongs to, which grows, but not larger than this and 4 arrays
)
METADATA_FILES = (".zgroup", ".zarray", ".zattrs", "zarr.json")
COMPRESSORS_READ = ("blosc", "zlib", "gzip", "bz2", "zstd", "lz4")


def check_chunks_compatible(chunks: tuple, shape: tuple):
    """Raise unless `chunks` is one positive integer for each dimension of `shape`."""
    if len(chunks) != len(shape) or not all(isinstance(c, (int, np.integer)) and c > 0 for c in chunks):
        raise DataError(f"Chunks {chunks} do not fit an array of shape {shape}: give one positive integer a dimension.")


def place_of(node) -> str:
    """How an error names a group or an array."""
    if isinstance(node, (zarr.Group, zarr.Array)):
        return str(node.store_path).removeprefix("file://")
    return "The array in memory" if isinstance(node, np.ndarray) else "The replay buffer in memory"


def check_folder(path):
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


def check_zip(path):
    """Raise unless `path` is a zip file whose entries can be read one by one without surprises."""
    try:
        with zipfile.ZipFile(path) as file:
            for info in file.infolist():
                if info.compress_type not in (
                    zipfile.ZIP_STORED,
                    zipfile.ZIP_DEFLATED,
                ):  # others are decompressed without a limit
                    raise DataError(f"{path}: entry {info.filename} is compressed in another way than deflate.")
                if info.filename.endswith(METADATA_FILES):
                    _check_metadata_size(f"{path}: {info.filename}", info.file_size)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        raise DataError(f"{path} is not a zarr group, it is not a zip file or was cut short: {error}.") from error


def _check_metadata_size(file: str, size: int):
    if size > MAX_METADATA_BYTES:
        raise DataError(f"{file} has {readable_bytes(size)}, which is no metadata of a replay buffer.")


def require_memory(array: zarr.Array, size: int):
    free = available_bytes()
    if size > free:
        raise DataError(
            f"{place_of(array)} says that it has shape {array.shape}, in chunks of {array.chunks}: reading it takes "
            f"{readable_bytes(size)}, but only {readable_bytes(free)} of memory are free here."
        )


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
    refused = [
        *filters,
        *(compressors if len(compressors) > 1 or not set(compressors) <= set(COMPRESSORS_READ) else ()),
    ]
    if refused:
        raise DataError(
            f"{place_of(array)} is encoded with {', '.join(refused)}, which is not read here because decoding it can run code or "
            f"fill the memory; read are arrays without filters and with at most one of {', '.join(COMPRESSORS_READ)}."
        )
    return (compressors[0] if compressors else None), after


def check_metadata(array: zarr.Array):
    """Raise for an array that must not be decoded, judging by its metadata alone."""
    if array.dtype.kind not in "biufcmMSU" or array.dtype.itemsize == 0:
        raise DataError(
            f"{place_of(array)} has dtype {array.dtype}: only arrays of numbers or of text of fixed length are read."
        )
    _codecs(array)
    check_chunks_compatible(array.chunks, array.shape)
    size, chunk = (math.prod(lengths) * array.dtype.itemsize for lengths in (array.shape, array.chunks))
    if chunk > SMALL_CHUNK_BYTES + 4 * size:
        raise DataError(
            f"{place_of(array)}: a chunk of shape {array.chunks} has {readable_bytes(chunk)}, the whole array "
            f"{readable_bytes(size)}."
        )


def check_chunks(array: zarr.Array):
    """Raise for what zarr and its codecs pass over: a missing chunk, one that was cut short, one that decodes to another size."""
    check_metadata(array)
    require_memory(
        array,
        2
        * max(
            min(READ_BLOCK_BYTES, math.prod(array.shape) * array.dtype.itemsize),
            math.prod(array.shape[1:]) * array.dtype.itemsize,
            math.prod(array.chunks) * array.dtype.itemsize,
        ),
    )
    compressor, after = _codecs(array)
    decoded = math.prod(array.chunks) * array.dtype.itemsize
    grid = [-(-length // chunk) for length, chunk in zip(array.shape, array.chunks)]
    with _Stored(array) as stored:
        for coordinates in _coordinates(grid):
            name = array.metadata.encode_chunk_key(coordinates)
            size = stored.size(name)
            if size is None:
                raise DataError(
                    f"{place_of(array)}: {_count_missing(array, stored, grid)} of {math.prod(grid)} chunks are missing, most likely from an "
                    f"incomplete download or copy. (A writer that leaves out chunks of zeros, as zarr 3 does by default, must be told "
                    f"write_empty_chunks=True.)"
                )
            try:
                problem = _chunk_problem(compressor, decoded, size - after, lambda length: stored.read(name, length))
            except (
                OSError,
                zipfile.BadZipFile,
                zlib.error,
                EOFError,
                ValueError,
                NotImplementedError,
                RuntimeError,
            ) as error:
                problem = str(error)
            if problem:
                raise DataError(
                    f"{place_of(array)} cannot be read, its chunk {name} is damaged or cut short: {problem}."
                )


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
    if (
        compressor == "blosc"
    ):  # version, version of the codec, flags, typesize, then three numbers: decoded, block, stored
        header = read(16)
        found, stored = (int.from_bytes(header[start : start + 4], "little") for start in (4, 12))
        if len(header) < 16 or stored != size:
            return f"it has {size} bytes instead of {stored}"
    elif compressor == "lz4":  # numcodecs puts the decoded size first
        found = int.from_bytes(read(4), "little")
    elif compressor == "zstd":
        found = _zstd_content_size(read(18))
    else:
        found = _inflated_size(compressor, read(size), decoded)
    return (
        None
        if found == decoded
        else f"it decodes to {'an unknown number of' if found is None else found} bytes instead of {decoded}"
    )


def _zstd_content_size(header: bytes) -> int | None:
    """What a zstd frame says it decodes to, None if it does not say."""
    if len(header) < 6 or header[:4] != b"\x28\xb5\x2f\xfd":
        return None
    single, length = header[4] >> 5 & 1, (0, 2, 4, 8)[header[4] >> 6]
    if single and not length:
        length = 1
    start = 5 + (not single) + (0, 1, 2, 4)[header[4] & 3]  # after the window and the number of a dictionary
    value = int.from_bytes(header[start : start + length], "little") + (256 if length == 2 else 0)
    return value if length and len(header) >= start + length else None


def _inflated_size(compressor: str, data: bytes, limit: int) -> int | None:
    """What zlib, gzip or bz2 data decode to, at most limit + 1, by decoding no more; None if that is not all of the data."""
    decompressor = (
        bz2.BZ2Decompressor() if compressor == "bz2" else zlib.decompressobj(wbits={"zlib": 15, "gzip": 31}[compressor])
    )
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
