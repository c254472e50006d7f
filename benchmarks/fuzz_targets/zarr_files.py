"""Replay buffers in zarr: folders and zip files of both formats, with and without checksums."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import shutil
import warnings
import zipfile

import numcodecs
import numpy as np
import zarr

from benchmarks.fuzz import Finding
from benchmarks.fuzz_targets.mutate import SIZES, FileTarget, mutate_bytes, mutate_json, pick, pickled_payload
from diffusion_policy.common.errors import DataError
from diffusion_policy.common.replay_buffer import ReplayBuffer

METADATA = (".zgroup", ".zarray", ".zattrs", "zarr.json")
CODECS = (
    {"id": "pickle"},
    {"id": "json2"},
    {"id": "msgpack2"},
    {"id": "vlen-utf8"},
    {"id": "vlen-bytes"},
    {"id": "delta", "dtype": "<f4"},
    {"id": "zlib"},
    {"id": "lzma"},
    {"id": "zstd"},
    {"id": "lz4"},
    {"id": "gzip"},
    {"id": "base64"},
    {"id": "packbits"},
    {"id": "nope"},
    {"id": "blosc", "cname": "zlib", "clevel": 99},
    {"id": "quantize", "digits": 1, "dtype": "<f4"},
    {"id": "shuffle", "elementsize": 4},
    {"name": "gzip", "configuration": {"level": 5}},
    {"name": "numcodecs.pickle", "configuration": {}},
    {"name": "vlen-utf8"},
    {"name": "bytes"},
    {"name": "transpose", "configuration": {"order": [1, 0]}},
    {"name": "crc32c"},
    {
        "name": "sharding_indexed",
        "configuration": {"chunk_shape": [5, 2], "codecs": [{"name": "bytes"}], "index_codecs": [{"name": "bytes"}]},
    },
)
DTYPES = (
    "|O",
    "<f2",
    "<f8",
    ">f4",
    "<U0",
    "<U99999999",
    "|V4",
    "|S4",
    "<c8",
    "<M8[ns]",
    "|b1",
    "|u1",
    "float16",
    "float64",
    "string",
    "r32",
    [["a", "<f4"]],
)


def example(seed: int = 0) -> ReplayBuffer:
    rng = np.random.default_rng(seed)
    buffer = ReplayBuffer.create_empty_numpy()
    for length in (17, 30, 9):
        buffer.add_episode(
            {
                "action": rng.normal(size=(length, 2)).astype(np.float32),
                "state": rng.normal(size=(length, 5)).round(1),
                "img": rng.integers(0, 9, (length, 3, 3), dtype=np.uint8),
            }
        )
    return buffer


def write_entries(path: pathlib.Path, entries: dict) -> None:
    """Write a folder of entries {name: bytes, "fifo", "folder" or the target of a link}."""
    path.mkdir(exist_ok=True)
    for name, data in entries.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(data, bytes):
            file.write_bytes(data)
        elif data == "fifo":
            os.mkfifo(file)
        elif data == "folder":
            file.mkdir()
        else:
            file.symlink_to(data)


def entries_of(path: pathlib.Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def zipped(entries: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", kind) as file:
        warnings.simplefilter("ignore")
        for name, data in entries.items():
            file.writestr(zipfile.ZipInfo(name), data, kind)
    return out.getvalue()


class ZarrTarget(FileTarget):
    """Oracle: with checksums, the result equals what was written; without, what zarr reads."""

    def __init__(self, folder: pathlib.Path, canary: pathlib.Path):
        warnings.simplefilter("ignore")
        numcodecs.pickles.ALLOW_UNSAFE_PICKLE_DECODE = True  # as if this were an older numcodecs, which runs them
        self.folder, self.canary, self.good = folder, canary, example()
        self.bases = {}
        for name, arguments in {
            "default": {},
            "disk": {"compressors": "disk", "chunks": {"action": (10, 2), "state": (10, 5)}},
            "none": {"compressors": dict.fromkeys(self.good.keys())},
            "zlib": {"compressors": numcodecs.Zlib(1)},
            "zstd": {"compressors": numcodecs.Zstd(1)},
            "lz4": {"compressors": numcodecs.LZ4()},
        }.items():
            self.good.save_to_path(folder / "base.zarr", **arguments)
            self.bases[name] = entries_of(folder / "base.zarr")
            shutil.rmtree(folder / "base.zarr")
        root = zarr.create_group(folder / "v3.zarr", zarr_format=3)
        for group, arrays in (("data", self.good.data), ("meta", self.good.meta)):
            for key, value in arrays.items():
                root.create_array(
                    f"{group}/{key}", data=value, chunks=(20, *value.shape[1:]), config={"write_empty_chunks": True}
                )
        root.store.close()
        self.bases["v3"] = entries_of(folder / "v3.zarr")

    # ------------------------------------------------------------------ making a case
    def check(self, value) -> str:
        rng = self.rng(value)
        entries = dict(self.bases[pick(rng, self.bases)])
        attributes = entries.get(".zattrs")
        if rng.random() < 0.3 and attributes:
            del entries[".zattrs"]
            attributes = None
        for _ in range(int(rng.choice([1, 1, 2]))):
            entries = self._damage(rng, entries)
        path = self.folder / ("case.zarr.zip" if rng.random() < 0.3 else "case.zarr")
        if path.suffix == ".zip":
            data = zipped(
                {name: data for name, data in entries.items() if isinstance(data, bytes)},
                pick(
                    rng, [zipfile.ZIP_STORED] * 8 + [zipfile.ZIP_DEFLATED] * 2 + [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
                ),
            )
            if rng.random() < 0.5:
                data = mutate_bytes(rng, data)
            path.write_bytes(data)
        else:
            write_entries(path, entries)
        try:
            return self._read(path, attributes is not None and attributes)
        finally:
            path.unlink() if path.is_file() else shutil.rmtree(path)

    def _damage(self, rng, entries: dict) -> dict:
        entries = dict(entries)
        names = [name for name in entries if isinstance(entries[name], bytes)]
        name = pick(rng, names)
        metadata = [name for name in names if name.endswith((".zarray", "zarr.json", ".zgroup"))]
        match int(rng.integers(14)):
            case 0 | 1 | 2:
                entries[name] = mutate_bytes(rng, entries[name], entries[pick(rng, names)])
            case 3 | 4:
                chunks = [name for name in names if not name.endswith(METADATA)]
                if chunks:
                    name = pick(rng, chunks)
                    entries[name] = mutate_bytes(rng, entries[name])
            case 5:
                del entries[name]
            case 6:
                other = pick(rng, names)
                entries[name], entries[other] = entries[other], entries[name]
            case 7 | 8 if metadata:
                name = pick(rng, metadata)
                with contextlib.suppress(ValueError, RecursionError):  # it was damaged before
                    entries[name] = mutate_json(rng, entries[name])
            case 9 | 10 if metadata:
                self._semantic(rng, entries, pick(rng, metadata))
            case 11:
                entries[name] = pick(rng, ["fifo", "folder", "/dev/zero", "/dev/urandom", "dangling"])
            case 12:
                chunks = [name for name in names if not name.endswith(METADATA)]
                if chunks:
                    entries[pick(rng, chunks)] = self._bomb(rng)
            case 13 if ".zattrs" in names:
                with contextlib.suppress(ValueError, RecursionError):
                    entries[".zattrs"] = mutate_json(rng, entries[".zattrs"])
        return entries

    def _semantic(self, rng, entries, name):
        """Well-formed metadata with another meaning; for codecs that run code, chunks that would do so."""
        try:
            metadata = json.loads(entries[name])
            version3 = name.endswith("zarr.json")
            match int(rng.integers(5)):
                case 0:
                    metadata["shape"] = [
                        int(pick(rng, [*SIZES, *metadata["shape"], 56, 47])) for _ in metadata["shape"]
                    ]
                case 1:
                    chunks = [int(pick(rng, [*SIZES, *metadata["shape"], 10, 20])) for _ in metadata["shape"]]
                    if version3:
                        metadata["chunk_grid"]["configuration"]["chunk_shape"] = chunks
                    else:
                        metadata["chunks"] = chunks
                case 2:
                    metadata["data_type" if version3 else "dtype"] = pick(rng, DTYPES)
                case 3:
                    codecs = [pick(rng, CODECS) for _ in range(int(rng.integers(1, 4)))]
                    if version3:
                        metadata["codecs"] = codecs
                    elif rng.random() < 0.5:
                        metadata["filters"] = codecs
                    else:
                        metadata["compressor"] = codecs[0]
                case 4:
                    metadata.update(
                        {
                            "dtype": "|O",
                            "filters": [{"id": "vlen-utf8"}, {"id": "pickle"}],
                            "compressor": None,
                            "fill_value": None,
                        }
                    )
                    folder = name.rpartition("/")[0] + "/"
                    for chunk in [
                        chunk for chunk in entries if chunk.startswith(folder) and not chunk.endswith(METADATA)
                    ]:
                        entries[chunk] = pickled_payload(rng, self.canary)
            entries[name] = json.dumps(metadata).encode()
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
            pass

    def _bomb(self, rng) -> bytes:
        codec = pick(
            rng,
            [numcodecs.Blosc("lz4"), numcodecs.Blosc("zstd"), numcodecs.Zlib(9), numcodecs.Zstd(9), numcodecs.LZ4()],
        )
        return codec.encode(np.zeros(int(rng.choice([3, 448, 10_000, 20_000_000])), dtype=np.uint8))

    # ------------------------------------------------------------------ judging it
    def _read(self, path: pathlib.Path, attributes) -> str:
        try:
            buffer = ReplayBuffer.copy_from_path(path)
        except DataError as error:
            if len(str(error)) < 20:
                raise Finding(f"the message says nothing: {error}") from error
            return type(error).__name__
        steps = buffer.episode_ends[-1]
        if any(len(values) != steps for values in buffer.values()) or (buffer.episode_lengths <= 0).any():
            raise Finding(f"read {buffer!r}, which is not consistent")
        if attributes and self._attributes(path) == json.loads(attributes):
            for name, group in (("data", self.good.data), ("meta", self.good.meta)):
                for key, expected in group.items():
                    found = getattr(buffer, name).get(key)
                    if found is None or found.dtype != expected.dtype or not np.array_equal(found, expected):
                        raise Finding(
                            f"{name}/{key} was read with other values than were written, although checksums are there"
                        )
            return "read"
        root = zarr.open_group(zarr.storage.ZipStore(path) if path.suffix == ".zip" else path, mode="r")
        for key, found in buffer.items():
            if not np.array_equal(found, root[f"data/{key}"][:], equal_nan=found.dtype.kind in "fc"):
                raise Finding(f"data/{key} was read differently than by zarr")
        return "read"

    def _attributes(self, path: pathlib.Path):
        try:
            if path.suffix == ".zip":
                with zipfile.ZipFile(path) as file:
                    return json.loads(file.read(".zattrs"))
            return json.loads((path / ".zattrs").read_bytes())
        except (OSError, KeyError, ValueError, zipfile.BadZipFile):
            return None
