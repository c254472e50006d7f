"""robomimic's hdf5 files: `data/demo_<i>/<key>`, i = 0, 1, ..., read in a child process.

libhdf5 was not written for hostile files: a few changed bytes can make it crash, loop, or allocate without end. It
therefore runs in a child process (see hdf5_child) with limits on time and memory, and the arrays come back as plain
.npy files. If the child fails in any way, that is a DataError.

Images are much larger than the rest. The child appends them to a file, one demonstration after the other, so that no
process holds more than one demonstration of them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from diffusion_policy.common.errors import DataError, DataNotFoundError
from diffusion_policy.common.memory import available_bytes

TIME_LIMIT = 600.0  # seconds without an answer or progress; the largest low-dimensional files take a few
Progress = Callable[[int, int], Any]


@dataclasses.dataclass
class Demos:
    """The demonstrations of a file, one after the other.

    arrays: {key: (steps, ...)}; episode_ends: (demos,) int64, cumulative; env_args: the file's description of its
    environment; frames: (steps, bytes) uint8, the images of a step side by side, unless they were written to a file.
    """

    arrays: dict[str, np.ndarray]
    episode_ends: np.ndarray
    env_args: dict | None
    frames: np.ndarray | None = None


def read_demos(
    path: str | os.PathLike,
    keys: Sequence[str],
    frames: Mapping[str, Sequence[int]] | None = None,
    into: str | os.PathLike | None = None,
    progress: Progress | None = None,
    time_limit: float = TIME_LIMIT,
) -> Demos:
    """Read arrays (such as 'actions', 'obs/object') of every demonstration.

    Args:
        path: the hdf5 file.
        keys: the arrays to read.
        frames: {key: (H, W, C)}, uint8 images to read as well.
        into: a file to append the images to, those of a step side by side, instead of returning them.
        progress: progress(done, total) is called while images are read.
        time_limit: seconds without an answer or progress after which the child is killed.

    Raises:
        DataError: the file is damaged, or does not hold what is asked for.
        OSError: `into` cannot be written.
    """
    with Hdf5Process(time_limit) as process:
        return process.read(path, keys, frames, into, progress)


class Hdf5Process:
    """A child process that reads hdf5 files. It starts with the first file, and again after it died."""

    def __init__(self, time_limit: float = TIME_LIMIT):
        self.time_limit = time_limit
        self.child: Any = None

    def __enter__(self) -> Hdf5Process:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.communicate()
            self.child = None

    def read(
        self,
        path: str | os.PathLike,
        keys: Sequence[str],
        frames: Mapping[str, Sequence[int]] | None = None,
        into: str | os.PathLike | None = None,
        progress: Progress | None = None,
    ) -> Demos:
        """As `read_demos`."""
        path = os.path.abspath(os.path.expanduser(path))
        if not os.path.exists(path):
            raise DataNotFoundError(
                f"There is no dataset at {path}. Download robomimic's with "
                "`python -m diffusion_policy.scripts.download robomimic`."
            )
        if not os.path.isfile(path):
            raise DataError(f"{path} is not a file, so it is not an HDF5 dataset.")
        frames = {key: list(shape) for key, shape in (frames or {}).items()}
        with tempfile.TemporaryDirectory(prefix="hdf5_") as folder:
            file = os.path.abspath(into) if into is not None else os.path.join(folder, "frames")
            # A third: the child's array, its file if /tmp is in memory, and the parent's array.
            answer = self._ask(
                {
                    "path": path,
                    "keys": list(keys),
                    "folder": folder,
                    "memory": available_bytes() / 3,
                    "frames": frames,
                    "into": file,
                    "frames_stay": into is None,
                },
                progress,
            )
            if "errno" in answer:
                raise OSError(answer["errno"], os.strerror(answer["errno"]), file)
            if "error" in answer:
                raise DataError(answer["error"])
            arrays = {key: np.load(os.path.join(folder, f"{i}.npy"), allow_pickle=False) for i, key in enumerate(keys)}
            images = (
                np.fromfile(file, np.uint8).reshape(answer["episode_ends"][-1], -1) if frames and into is None else None
            )
        return Demos(arrays, np.array(answer["episode_ends"], dtype=np.int64), answer["env_args"], images)

    def _ask(self, question: dict[str, Any], progress: Progress | None = None) -> dict[str, Any]:
        """The child's answer: one line of JSON, after any number of progress lines. A silent child is killed."""
        if self.child is None:
            self.child = _start()
        deadline = time.monotonic() + self.time_limit
        answer, text = None, b""
        try:
            self.child.stdin.write(json.dumps(question).encode() + b"\n")
            self.child.stdin.flush()
            while answer is None:
                ready, _, _ = select.select([self.child.stdout], [], [], max(0, deadline - time.monotonic()))
                if not ready:
                    self.close()
                    raise DataError(
                        f"{question['path']} took longer than {self.time_limit:g} s to read: it is most likely damaged."
                    )
                part = os.read(self.child.stdout.fileno(), 1 << 20)
                if not part:
                    raise BrokenPipeError
                *lines, text = (text + part).split(b"\n")
                for line in map(json.loads, lines):
                    if "progress" not in line:
                        answer = line
                        break
                    deadline = time.monotonic() + self.time_limit
                    if progress is not None:
                        progress(*line["progress"])
        except BrokenPipeError:
            code = self.child.wait()
            self.close()
            raise DataError(
                f"{question['path']} cannot be read, it is damaged: libhdf5 ended the process that read it "
                f"({f'signal {-code}' if code < 0 else f'exit code {code}'})."
            ) from None
        return answer


def _start() -> subprocess.Popen:
    code = "import sys; sys.path.insert(0, sys.argv[1]); from diffusion_policy.storage.hdf5_child import serve; serve()"
    environment = {
        **os.environ,
        "HDF5_PLUGIN_PRELOAD": "::",
        "HDF5_PLUGIN_PATH": os.devnull,  # '::' disables plugins
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code, str(pathlib.Path(__file__).resolve().parents[2])],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
