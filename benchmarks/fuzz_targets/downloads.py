"""Downloads and unpacked datasets made to harm: archives that write elsewhere, bombs, wrong content, links.

Oracle: the published content is installed, or the command ends with exit code 1 and one message; nothing is installed
then, and no file appears outside the output folder.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import shutil
import stat
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.data import write_robomimic
from benchmarks.fuzz import Finding
from benchmarks.fuzz_targets.mutate import FileTarget, mutate_bytes
from diffusion_policy.common.errors import DataError
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.scripts import download
from diffusion_policy.storage import zarr_io

ZARR = "tiny/tiny.zarr"
Files = dict[str, bytes]


def zipped(files: Files, links: dict[str, str] | None = None, kind: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", kind) as file:
        for name, data in files.items():
            file.writestr(name, data)
        for name, target in (links or {}).items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (stat.S_IFLNK | 0o777) << 16
            file.writestr(info, target)
    return out.getvalue()


ARCHIVES: dict[str, Callable[[Any, Files], bytes]] = {
    "as published": lambda rng, files: zipped(files),
    "changed bytes": lambda rng, files: mutate_bytes(rng, zipped(files)),
    "a path with ..": lambda rng, files: zipped({**files, "../outside": b"x"}),
    "an absolute path": lambda rng, files: zipped({**files, "/tmp/fuzz_outside": b"x"}),
    "a deep path with ..": lambda rng, files: zipped({**files, "tiny/a/../../../outside": b"x"}),
    "a link out": lambda rng, files: zipped(files, {"tiny/link": "/etc"}),
    "a link, then a file through it": lambda rng, files: zipped(files, {"tiny/link": "../.."}),
    "a bomb": lambda rng, files: zipped({**files, "tiny/zeros": bytes(200_000_000)}, kind=zipfile.ZIP_DEFLATED),
    "other numbers": lambda rng, files: zipped(
        {k: v[:-1] + b"\x01" if "action/0" in k else v for k, v in files.items()}
    ),
    "other images": lambda rng, files: zipped({k: v[:-1] + b"\x01" if "img/0" in k else v for k, v in files.items()}),
    "no images": lambda rng, files: zipped({k: v for k, v in files.items() if "/img/" not in k}),
    "a missing chunk": lambda rng, files: zipped({k: v for k, v in files.items() if "state/0" not in k}),
    "another dataset": lambda rng, files: zipped({k.replace("tiny.zarr", "other.zarr"): v for k, v in files.items()}),
    "no files": lambda rng, files: zipped({}),
    "a web page": lambda rng, files: b"<html>not found</html>",
    "nothing": lambda rng, files: b"",
}
DEMOS: dict[str, Callable[[Any, bytes], bytes]] = {
    "demos: as published": lambda rng, data: data,
    "demos: changed bytes": lambda rng, data: mutate_bytes(rng, data),
    "demos: cut": lambda rng, data: data[: len(data) // 2],
    "demos: a pointer of git": lambda rng, data: b"version https://git-lfs.github.com/spec/v1\n",
}
LINKS = ("data", "data/action", "data/action/0.0", "data/action/.zarray", "meta/episode_ends", "extra")


class DownloadTarget(FileTarget):
    """Cases go through the archives, the demonstration files and the places of a link, in this order."""

    def __init__(self, folder: pathlib.Path, canary: pathlib.Path):
        self.folder = folder
        rng = np.random.default_rng(0)
        buffer = ReplayBuffer.create_empty_numpy()
        for n in (5, 8):
            episode = {key: rng.normal(size=(n, 4)).astype(np.float32) for key in ("action", "state")}
            buffer.add_episode({**episode, "img": rng.integers(0, 255, (n, 8, 8, 3)).astype(np.float32)})
        self.made = folder / "made" / ZARR
        buffer.save_to_path(self.made)
        images = zarr_io.sha256(zarr_io.open_group(self.made, "r")["data/img"])
        keys = ("action", "state")
        content = download.content_sha256(buffer, keys)
        source = download.Source("file:///unused", None, ZARR, 2, 13, keys, content, ("img", images))
        download.SOURCES["tiny"] = source
        self.files = {
            str(path.relative_to(folder / "made")): path.read_bytes()
            for path in (folder / "made").rglob("*")
            if path.is_file()
        }
        self.demos = write_robomimic(folder / "demos.hdf5").read_bytes()
        self.names = [*ARCHIVES, *DEMOS, *(f"a link out at {place}" for place in LINKS)]

    def label(self, value: tuple[int, int]) -> str:
        return self.names[value[1] % len(self.names)]

    def describe(self, value: tuple[int, int]) -> str:
        return f"{self.label(value)}, seed {value[0]}, number {value[1]}"

    def check(self, value: tuple[int, int]) -> str:
        name, rng = self.label(value), self.rng(value)
        place = self.folder / "case"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        if name.startswith("a link out at "):
            return self.linked(place, name.removeprefix("a link out at "))
        if name in ARCHIVES:
            (place / "file").write_bytes(ARCHIVES[name](rng, self.files))
            arguments, installed = ["tiny"], place / "out" / ZARR
        else:
            (place / "file").write_bytes(DEMOS[name](rng, self.demos))
            arguments = ["robomimic", "--task", "lift"]
            installed = place / "out/robomimic/datasets/lift/ph/low_dim_abs.hdf5"
        before, shown = set(self.folder.rglob("*")), io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            code = download.main([*arguments, "--url", (place / "file").as_uri(), "--output", str(place / "out")])
        outside = [path for path in set(self.folder.rglob("*")) - before if place / "out" not in (path, *path.parents)]
        if outside or pathlib.Path("/tmp/fuzz_outside").exists():
            raise Finding(f"files outside the output folder: {outside[:3]}")
        if code == 0 and not installed.exists():
            raise Finding("nothing was installed, and no error")
        if code != 0 and installed.exists():
            raise Finding(f"an error, and a dataset is installed: {shown.getvalue()}")
        if name.endswith("as published") != (code == 0) and not name.endswith("changed bytes"):
            raise Finding(f"exit code {code}: {shown.getvalue()}")
        if code == 0 and name in ARCHIVES:
            download.verify(installed, download.SOURCES["tiny"])
        return "read" if code == 0 else "DataError"

    def linked(self, place: pathlib.Path, where: str) -> str:
        """A dataset of which a part is a link to a place outside of it."""
        data, outside = place / "tiny.zarr", place / "outside"
        shutil.copytree(self.made, data)
        if (data / where).exists():
            os.rename(data / where, outside)
        else:
            outside.write_text("")
        (data / where).symlink_to(outside)
        try:
            ReplayBuffer.copy_from_path(data)
        except DataError as error:
            if "link" not in str(error):
                raise Finding(str(error)) from error
            return "DataError"
        raise Finding("a link was followed")
