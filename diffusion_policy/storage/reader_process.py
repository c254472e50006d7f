"""Arrays from files of unknown origin, read in a child process (see reader_child).

libhdf5, Arrow and FFmpeg are large C and C++ libraries: a damaged or hostile file can make them crash, loop, or
allocate without end. They therefore run in a child process with limits on time and memory, and only plain numbers come
back. If the child fails in any way, that is a DataError.

An answer is a line of JSON, followed by the bytes of its arrays. A long answer, such as the frames of a video, is a
series of them; the pipe makes the child wait for its reader.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import pathlib
import select
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from diffusion_policy.common.errors import DataError
from diffusion_policy.common.memory import available_bytes, readable_bytes

TIME_LIMIT = 120.0  # seconds without a part of the answer
MAX_LINE = 64_000_000
Answer = tuple[dict[str, Any], dict[str, np.ndarray]]


class ReaderProcess:
    """A child process that answers one question at a time."""

    def __init__(self, time_limit: float = TIME_LIMIT):
        self.time_limit = time_limit
        self.child = _start()
        self.rest = bytearray()
        self.close = weakref.finalize(self, _end, self.child, os.getpid())

    def ask(self, what: str, path: str | os.PathLike, **arguments: Any) -> Iterator[Answer]:
        """The answers to a question, a function of reader_child, about one file: ({...}, {key: array}) each."""
        self.where = str(path)
        question = {"what": what, "path": os.path.abspath(path), **arguments}
        try:
            self.child.stdin.write(json.dumps(question).encode() + b"\n")
            self.child.stdin.flush()
            while True:
                answer = json.loads(self._line())
                if "error" in answer:
                    raise DataError(answer["error"])
                if "end" in answer:
                    return
                yield answer, {key: self._array(*layout) for key, layout in answer.pop("arrays").items()}
        except (BrokenPipeError, EOFError):
            code = self.child.wait()
            reason = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise DataError(f"{path} cannot be read, it is damaged: its reader crashed ({reason}).") from None

    def _line(self) -> bytes:
        while b"\n" not in self.rest:
            if len(self.rest) > MAX_LINE:
                raise DataError(f"{self.where} cannot be read: its description is too long.")
            part = bytearray(65536)
            self.rest += part[: self._receive(memoryview(part))]
        line, _, self.rest = self.rest.partition(b"\n")
        return bytes(line)

    def _array(self, dtype: str, shape: list[int]) -> np.ndarray:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size > available_bytes():
            raise DataError(f"{self.where} cannot be read: it needs {readable_bytes(size)} of memory.")
        array = np.empty(shape, dtype)
        left = array.reshape(-1).view(np.uint8).data
        early = min(size, len(self.rest))
        left[:early], self.rest = self.rest[:early], self.rest[early:]
        left = left[early:]
        while left:
            left = left[self._receive(left) :]
        return array

    def _receive(self, view: memoryview) -> int:
        """Read some bytes into `view`, within the time limit."""
        if not select.select([self.child.stdout], [], [], self.time_limit)[0]:
            self.close()
            raise DataError(f"{self.where} took longer than {self.time_limit:g} s to read: it is most likely damaged.")
        count = self.child.stdout.readinto(view)
        if not count:
            raise EOFError
        return count


class ReaderPool:
    """Child processes for one object, started when needed and used again. A forked or unpickled copy starts anew."""

    def __init__(self) -> None:
        self.idle: list[ReaderProcess] = []
        self.owner = os.getpid()

    def __reduce__(self) -> tuple:
        return ReaderPool, ()

    def ask(self, what: str, path: str | os.PathLike, **arguments: Any) -> Iterator[Answer]:
        """As `ReaderProcess.ask`; several questions may be open at the same time."""
        if self.owner != os.getpid():
            self.idle, self.owner = [], os.getpid()
        try:
            process = self.idle.pop()
        except IndexError:  # several threads take from the list
            process = ReaderProcess()
        whole = False
        try:
            yield from process.ask(what, path, **arguments)
            whole = True
        except DataError:
            whole = process.child.poll() is None and process.close.alive
            raise
        finally:
            if whole:
                self.idle.append(process)
            else:  # the rest of its answer is not read
                process.close()

    def ask_once(self, what: str, path: str | os.PathLike, **arguments: Any) -> Answer:
        """The only answer to a question."""
        with contextlib.closing(self.ask(what, path, **arguments)) as answers:  # type: ignore[type-var]
            (answer,) = answers
        return answer


def _end(child: Any, owner: int) -> None:
    if os.getpid() == owner:  # a forked process has a copy, but not the child
        child.kill()
        child.communicate()


def _start() -> Any:
    environment = {
        **os.environ,
        "HDF5_PLUGIN_PRELOAD": "::",  # no plugins
        "HDF5_PLUGIN_PATH": os.devnull,
        "ARROW_DEFAULT_MEMORY_POOL": "system",  # the others reserve addresses, which the memory limit counts
        "MALLOC_ARENA_MAX": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    code = "import sys; sys.path.insert(0, sys.argv[1]); from diffusion_policy.storage.reader_child import serve; "
    child: Any = subprocess.Popen(
        [sys.executable, "-P", "-c", code + "serve()", str(pathlib.Path(__file__).resolve().parents[2])],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
    )
    with contextlib.suppress(OSError, AttributeError):  # the usual 64 KB mean many turns for a frame
        fcntl.fcntl(child.stdout.fileno(), fcntl.F_SETPIPE_SZ, 1 << 20)
    return child
