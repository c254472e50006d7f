"""Recordings of robots: tables, videos, images, archives and metadata, changed, exchanged, linked and malicious."""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import pickle
import shutil
import zipfile

import numpy as np

from benchmarks import recordings as make
from benchmarks.fuzz import Finding
from benchmarks.fuzz_targets.mutate import SIZES, Creates, FileTarget, mutate_bytes, mutate_json, pick
from benchmarks.fuzz_targets.zarr_files import entries_of, write_entries
from diffusion_policy.common.errors import DataError
from diffusion_policy.dataset.conversion import to_lerobot
from diffusion_policy.dataset.recordings import base, hdf5, open_recordings
from diffusion_policy.storage.reader_process import ReaderPool

PATHS = (
    "../../../../etc/passwd",
    "/etc/passwd",
    "/dev/zero",
    "{episode_index.__class__.__mro__}",
    "{episode_index:099999999d}",
    "{0}",
    "{",
    "data/{video_key}/../../../x.parquet",
    "\x00",
    "",
)
DTYPES = ("object", "O", "V8", "S99999999", "U1", "float128", "datetime64", "complex64", "video", "image", "string", "")


class RecordingsTarget(FileTarget):
    """Oracle: a clear error, or episodes and images of the declared shapes."""

    def __init__(self, folder: pathlib.Path, canary: pathlib.Path):
        self.folder, self.canary = folder, canary
        good = folder / "good"
        make.write_lerobot_v2(good / "v2", lengths=(6, 4))
        to_lerobot(open_recordings(good / "v2"), good / "v3", images=True, quiet=True)
        make.write_aloha(good / "aloha", lengths=(4, 3))
        make.write_aloha(good / "encoded", lengths=(4, 3), compressed=True)
        make.write_npz(good / "npz", lengths=(4, 3))
        (good / "robomimic").mkdir()
        make.write_robomimic(good / "robomimic/demos.hdf5", lengths=(4, 3))
        self.bases = {path.name: entries_of(path) for path in good.iterdir()}
        pool = ReaderPool()  # one process for all cases: starting it takes longer than a case
        base.ReaderPool = hdf5.ReaderPool = lambda: pool  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ making a case
    def check(self, value) -> str:
        rng = self.rng(value)
        kind = pick(rng, [*self.bases, "v2", "v3"])
        entries: dict = dict(self.bases[kind])
        for _ in range(int(rng.choice([1, 1, 2]))):
            self._damage(rng, entries)
        path = self.folder / "case"
        write_entries(path, entries)
        try:
            return self._read(path, skip_broken=rng.random() < 0.3)
        finally:
            shutil.rmtree(path)

    def _damage(self, rng, entries: dict) -> None:
        names = [name for name in entries if isinstance(entries[name], bytes)]
        if not names:  # the only file was damaged before
            return
        name = pick(rng, names)
        infos = [name for name in names if name.endswith("info.json")]
        match int(rng.integers(10)):
            case 0 | 1 | 2:
                entries[name] = mutate_bytes(rng, entries[name], entries[pick(rng, names)])
            case 3:
                del entries[name]
            case 4:
                other = pick(rng, names)
                entries[name], entries[other] = entries[other], entries[name]
            case 5:
                entries[name] = pick(rng, ["fifo", "folder", "/dev/zero", "/etc/passwd", "dangling"])
            case 6 | 7 if infos:
                with contextlib.suppress(ValueError, RecursionError):
                    entries[infos[0]] = mutate_json(rng, entries[infos[0]])
            case 8 if infos:
                with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError, AttributeError):
                    entries[infos[0]] = self._semantic(rng, json.loads(entries[infos[0]]))
            case _:
                entries[name] = self._content(rng, name)

    def _semantic(self, rng, info: dict) -> bytes:
        """Well-formed metadata with another meaning."""
        feature = info["features"][pick(rng, info["features"])]
        match int(rng.integers(4)):
            case 0:
                info[pick(rng, ["data_path", "video_path"])] = pick(rng, PATHS)
            case 1:
                feature["shape"] = [int(pick(rng, SIZES)) for _ in range(int(rng.integers(0, 4)))]
            case 2:
                feature["dtype"] = pick(rng, DTYPES)
            case 3:
                info[pick(rng, ["fps", "chunks_size", "total_episodes"])] = pick(rng, SIZES)
        return json.dumps(info).encode()

    def _content(self, rng, name: str) -> bytes:
        """Another file of the same kind, or a malicious one."""
        kind = name.rpartition(".")[2]
        if kind == "parquet":
            return self._table(rng)
        if kind == "mp4":
            path = self.folder / "other.mp4"
            size = int(pick(rng, [16, 64]))
            make.write_video(path, make.images(5, 0, size, size), fps=int(pick(rng, [1, 20, 50])))
            playlist = b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
            return pick(rng, [path.read_bytes(), playlist, b"ffconcat version 1.0\nfile /etc/passwd\n"])
        if kind == "npz":
            return self._archive(rng)
        return pick(rng, [b"", pickle.dumps(Creates(self.canary)), b"{}", b"\n" * 1000, b"[" * 100_000])

    def _table(self, rng) -> bytes:
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = int(pick(rng, [0, 4, 6, 10]))
        lists = [list(range(int(rng.integers(0, 9)))) for _ in range(rows)]
        columns = {
            "observation.state": pick(
                rng, [lists, [b"x"] * rows, [None] * rows, [[1.0] * 4] * rows, [{"a": 1}] * rows]
            ),
            "action": pick(
                rng, [[[1.0] * 4] * rows, [[2**60] * 4] * rows, [["x"] * 4] * rows, [[[1.0, 2.0]] * 2] * rows]
            ),
            "timestamp": [0.0] * rows,
            "episode_index": pick(rng, [[0] * rows, [-1] * rows, ["0"] * rows]),
        }
        out = io.BytesIO()
        big = pa.array(np.zeros(20_000_000, np.int8))
        table = pa.table({"action": big}) if rng.random() < 0.05 else pa.table(columns)
        pq.write_table(table, out, compression=pick(rng, ["snappy", "zstd", "gzip", "none"]))
        return out.getvalue()

    def _archive(self, rng) -> bytes:
        out = io.BytesIO()
        match int(rng.integers(4)):
            case 0:
                np.savez(out, action=np.array([Creates(self.canary)], dtype=object), state=np.zeros((1, 2)))
            case 1:
                np.savez_compressed(out, action=np.zeros((30_000_000, 1), np.uint8))
            case 2:
                np.savez(out, action=np.zeros((4, 4)), episode_ends=rng.integers(-3, 9, int(rng.integers(0, 4))))
            case _:
                header = {"descr": "<f8", "fortran_order": False, "shape": (int(pick(rng, SIZES)), 4)}
                member = io.BytesIO(b"")
                np.lib.format.write_array_header_1_0(member, header)
                with zipfile.ZipFile(out, "w") as file:
                    file.writestr("action.npy", member.getvalue() + bytes(64))
        return out.getvalue()

    # ------------------------------------------------------------------ judging it
    def _read(self, path: pathlib.Path, skip_broken: bool) -> str:
        try:
            found = open_recordings(path, skip_broken)
            for index, length in enumerate(found.lengths):
                self._check_episode(found, index, length)
        except DataError as error:
            if len(str(error)) < 20 or "\n" in str(error):
                raise Finding(f"the message is not one clear line: {error}") from error
            return type(error).__name__
        return "read"

    def _check_episode(self, found: base.Recordings, index: int, length: int) -> None:
        for key, values in found.episode(index).items():
            if values.shape != (length, *found.features[key].shape) or values.dtype.kind not in "biuf":
                raise Finding(f"{key} was read as {values.shape}, {values.dtype}")
        found.timestamps(index)
        for camera, size in found.cameras.items():
            if found.has_frames(index, camera):
                shapes = {frame.shape for frame in found.frames(index, camera)}
                if shapes - {tuple(size.shape)}:
                    raise Finding(f"{camera} was read as {shapes}")
