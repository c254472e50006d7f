"""robomimic's hdf5 files: `data/demo_<i>/<key>`, i = 0, 1, ..., read in a process of their own.

libhdf5 is C code that was not written for hostile files: a few changed bytes can make it crash, loop, or allocate without end. Here it
runs in a child process with a limit on time and memory that imports neither torch nor zarr, and what it read comes back as plain .npy
files; whatever happens to the child is a DataError. The child also refuses what would read other files or load code (links, external
storage, plugins), and looks for what libhdf5 passes over: values that were never written, which it reads as zeros, chunks that decode to
too little, which it fills with what lies in memory, and addresses that point into other data.

Pictures are many times larger than the rest: the child appends them to a file, one demonstration after the other, so that no process
ever holds more than one demonstration of them.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import math
import os
import pathlib
import select
import shutil
import subprocess
import sys
import tempfile
import time
import zlib

from diffusion_policy.common.errors import DataError, DataNotFoundError
from diffusion_policy.common.memory import available_bytes, readable_bytes

TIME_LIMIT = 600.0  # seconds without an answer or progress; the largest low-dimensional files take a few
OPENING_BYTES = 512e6  # what libhdf5 may allocate beside the arrays: its caches, and metadata that is yet unknown
FILTERS = {1: "gzip", 2: "shuffle", 3: "fletcher32", 4: "szip", 32000: "lzf"}
GZIP, FLETCHER32, SZIP, LZF = 1, 3, 4, 32000


@dataclasses.dataclass
class Demos:
    """arrays: {key: (steps, ...)}, end to end; episode_ends: (demos,) int64; env_args: what the file says of its environment.

    frames: (steps, bytes) uint8, the pictures of a step side by side, unless they were written to a file.
    """

    arrays: dict
    episode_ends: object
    env_args: dict | None
    frames: object = None


def read_demos(path, keys, frames=None, into=None, progress=None, time_limit: float = TIME_LIMIT) -> Demos:
    """The arrays `keys` (such as 'actions', 'obs/object') of every demonstration. Raises DataError for anything else than good data.

    frames: {key: (H, W, C)}, pictures of bytes to read as well. into: a file to append their bytes to, those of a step side by side,
    instead of returning them; an OSError says that it cannot be written. progress(done, total) is called while they are read.
    """
    with Hdf5Process(time_limit) as process:
        return process.read(path, keys, frames, into, progress)


class Hdf5Process:
    """A child that reads hdf5 files, one after the other. It is started when there is something to read, and again if it died."""

    def __init__(self, time_limit: float = TIME_LIMIT):
        self.time_limit = time_limit
        self.child = None

    def __enter__(self) -> Hdf5Process:
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        if self.child is not None:
            self.child.kill()
            self.child.communicate()
            self.child = None

    def read(self, path, keys, frames=None, into=None, progress=None) -> Demos:
        """As `read_demos`."""
        import numpy as np

        path = os.path.abspath(os.path.expanduser(path))
        if not os.path.exists(path):
            raise DataNotFoundError(
                f"There is no dataset at {path}. Get one of robomimic's with `python -m diffusion_policy.scripts.download robomimic`."
            )
        if not os.path.isfile(path):
            raise DataError(f"{path} is not a file, so it is not an HDF5 dataset.")
        frames = {key: list(shape) for key, shape in (frames or {}).items()}
        with tempfile.TemporaryDirectory(prefix="hdf5_") as folder:
            file = os.path.abspath(into) if into is not None else os.path.join(folder, "frames")
            # A third: the child's array, its file where /tmp is memory, and the parent's array.
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
            pictures = (
                np.fromfile(file, np.uint8).reshape(answer["episode_ends"][-1], -1) if frames and into is None else None
            )
        return Demos(arrays, np.array(answer["episode_ends"], dtype=np.int64), answer["env_args"], pictures)

    def _ask(self, question: dict, progress=None) -> dict:
        """The child's answer, one line of JSON after any number of lines of progress; a child that gives none is replaced."""
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
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from diffusion_policy.storage.hdf5_reader import _serve; _serve()"
    )
    environment = {
        **os.environ,
        "HDF5_PLUGIN_PRELOAD": "::",
        "HDF5_PLUGIN_PATH": os.devnull,  # '::' turns plugins off
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


# In the child


class _MissingError(DataError):
    """A member that is not there."""


class _WriteError(Exception):
    """`into` cannot be written: the file that is read is not to blame."""


def _serve():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer

    def say(what: dict):
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    for line in sys.stdin:
        question = json.loads(line)
        path = question["path"]
        try:
            answer = _read(**question, report=lambda done, total: say({"progress": [done, total]}))
        except DataError as error:
            answer = {"error": str(error)}
        except _WriteError as error:
            answer = {"errno": error.args[0]}
        except MemoryError:
            answer = {"error": f"{path} cannot be read: it is damaged, or needs more memory than is free here."}
        except ImportError as error:
            answer = {"error": f"{path} is an HDF5 file, and reading it needs h5py (pip install h5py): {error}"}
        except Exception as error:  # h5py turns libhdf5's errors into exceptions of every kind
            answer = {
                "error": f"{path} cannot be read, it is not an HDF5 file or it is damaged: {type(error).__name__}: {str(error)[:200]}"
            }
        _limit_memory(float("inf"))
        say(answer)


def _limit_memory(more: float):
    """Let this process allocate at most `more` bytes from now on, where the system can enforce it."""
    try:
        import resource

        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        soft = (
            hard
            if math.isinf(more)
            else int(now + more)
            if hard == resource.RLIM_INFINITY
            else min(hard, int(now + more))
        )
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    except (ImportError, OSError, ValueError):
        pass


def _read(
    path: str, keys: list, folder: str, memory: float, frames: dict, into: str, frames_stay: bool, report
) -> dict:
    """Write the array of keys[i] to folder/i.npy, and append the pictures `frames` to `into`.

    frames_stay: the parent holds the pictures in memory, too. report(done, total): how far it has come with pictures.
    """
    import h5py
    import numpy as np

    _limit_memory(OPENING_BYTES)
    with h5py.File(path, "r", locking=False) as file:
        data = _member(file, "data", h5py.Group, path)
        demos = _demos(data, path)
        env_args = _env_args(data, path)
        extents, columns = [], {key: [] for key in (*keys, *frames)}
        for number, demo in enumerate(demos):
            where = f"{path}: data/{demo}"
            for key, column in columns.items():
                column.append(
                    _pictures(data[demo], key, frames[key], where, extents)
                    if key in frames
                    else _dataset(data[demo], key, where, extents)
                )
            _check_lengths(data[demo], {key: column[-1] for key, column in columns.items()}, where)
            if frames:
                report(number + 1, 2 * len(demos))
        _check_extents(extents, path)
        sizes = {
            key: sum(math.prod(dataset.shape) * dataset.dtype.itemsize for dataset in column)
            for key, column in columns.items()
        }
        held = sum(size for key, size in sizes.items() if frames_stay or key not in frames)
        if held > memory:
            raise DataError(
                f"{path} says that its arrays have {readable_bytes(held)}, but only {readable_bytes(memory)} of "
                f"memory can be used for them here."
            )
        lengths = [dataset.shape[0] for dataset in columns[keys[0]]]
        ends = list(itertools.accumulate(lengths))
        for number, key in enumerate(keys):
            column = columns[key]
            _limit_memory(OPENING_BYTES + 3 * sizes[key])
            values = np.empty((ends[-1], *column[0].shape[1:]), column[0].dtype.newbyteorder("="))
            for demo, dataset, start, end in zip(demos, column, [0, *ends], ends):
                if (dataset.shape[1:], dataset.dtype) != (column[0].shape[1:], column[0].dtype):
                    raise DataError(
                        f"{path}: data/{demo}/{key} holds steps of shape {dataset.shape[1:]}, {dataset.dtype}, but in "
                        f"{demos[0]} they are {column[0].shape[1:]}, {column[0].dtype}."
                    )
                dataset.read_direct(values[start:end])
                if not np.isfinite(values[start:end]).all():
                    step = int((~np.isfinite(values[start:end])).reshape(end - start, -1).any(axis=1).argmax())
                    raise DataError(
                        f"{path}: data/{demo}/{key} holds NaN or infinity, first at step {step}. Leave this demonstration out."
                    )
            np.save(os.path.join(folder, f"{number}.npy"), values, allow_pickle=False)
        if frames:
            demos_of_frames = list(zip(*(columns[key] for key in frames)))
            largest = max(lengths) * sum(map(math.prod, frames.values()))
            if largest > memory:
                raise DataError(
                    f"{path} has a demonstration with {readable_bytes(largest)} of pictures, but only {readable_bytes(memory)} of "
                    f"memory can be used for them here."
                )
            _limit_memory(OPENING_BYTES + 3 * largest)
            _append(demos_of_frames, into, sum(sizes[key] for key in frames), report)
    return {"episode_ends": ends, "env_args": env_args}


def _pictures(demo, key: str, shape: list, where: str, extents: list):
    """As `_dataset`, for steps that are pictures (H, W, C) of bytes."""
    import numpy as np

    try:
        dataset = _dataset(demo, key, where, extents)
    except _MissingError as error:
        raise DataError(f"{error} (Files named low_dim*.hdf5 hold no pictures, those named image*.hdf5 do.)") from None
    if list(dataset.shape[1:]) != shape or dataset.dtype != np.uint8:
        raise DataError(
            f"{where}/{key} holds steps of shape {dataset.shape[1:]}, {dataset.dtype}, but pictures of shape {tuple(shape)}, uint8, "
            f"are asked for (shape_meta has them as (C, H, W))."
        )
    return dataset


def _append(demos: list, into: str, size: int, report):
    """Append the pictures of `demos`, a tuple of datasets each, to the file `into`, those of a step side by side."""
    import numpy as np

    try:
        if size > shutil.disk_usage(os.path.dirname(into)).free:
            raise OSError(errno.ENOSPC, "")
        with open(into, "ab") as out:
            for number, datasets in enumerate(demos):
                try:
                    values = np.concatenate([dataset[:].reshape(len(dataset), -1) for dataset in datasets], axis=1)
                except OSError as error:  # libhdf5's, not the disk's
                    raise DataError(
                        f"{datasets[0].file.filename} cannot be read, it is damaged: {str(error)[:200]}"
                    ) from None
                out.write(values.data)
                out.flush()
                report(len(demos) + number + 1, 2 * len(demos))
    except OSError as error:
        raise _WriteError(error.errno or errno.EIO) from None


def _member(group, name: str, kind: type, where: str):
    """group[name], which is in this file and of this kind."""
    import h5py

    try:
        link = group.id.links.get_info(name.encode())
    except (KeyError, RuntimeError):  # RuntimeError: what h5py makes of a name that is not there
        raise _MissingError(
            f"{where} has no {name!r}; it has: {', '.join(itertools.islice(group, 20)) or 'nothing'}."
        ) from None
    if link.type != h5py.h5l.TYPE_HARD:
        raise DataError(
            f"{where}/{name} is a link to another place, and links are not followed. `h5copy -f soft -f ext` copies what they "
            f"point to."
        )
    member = group[name]
    if not isinstance(member, kind):
        raise DataError(f"{where}/{name} is no {kind.__name__.lower()}.")
    return member


def _demos(data, path: str) -> list:
    """['demo_0', 'demo_1', ...]: all of them, without a gap."""
    import h5py

    names = list(data)
    if not names:
        raise DataError(f"{path}: data has no demonstrations.")
    demos = [f"demo_{i}" for i in range(len(names))]
    if set(names) != set(demos):
        missing, odd = sorted(set(demos) - set(names), key=lambda name: int(name[5:])), sorted(set(names) - set(demos))
        raise DataError(
            f"{path}: data has {len(names)} members, which should be demo_0 to demo_{len(names) - 1}, but {missing[0]} is "
            f"missing and {odd[0]!r} is there. Number the demonstrations from 0 without a gap."
        )
    for demo in demos:
        _member(data, demo, h5py.Group, f"{path}: data")
    return demos


def _env_args(data, path: str) -> dict | None:
    """The attribute `env_args`, which is JSON text and is never read as anything else."""
    if "env_args" not in data.attrs:
        return None
    text = data.attrs["env_args"]
    try:
        value = json.loads(text if isinstance(text, (str, bytes)) else "")
        if isinstance(value, dict):
            return value
    except (ValueError, RecursionError):
        pass
    raise DataError(f"{path}: the attribute env_args of data is not a JSON object: {str(text)[:60]!r}.")


def _dataset(demo, key: str, where: str, extents: list):
    """The dataset demo[key], once nothing is odd about it; its places in the file are added to `extents`."""
    import h5py

    *groups, name = key.split("/")
    for group in groups:
        demo, where = _member(demo, group, h5py.Group, where), f"{where}/{group}"
    dataset, where = _member(demo, name, h5py.Dataset, where), f"{where}/{name}"
    if dataset.id.get_type().get_class() not in (h5py.h5t.INTEGER, h5py.h5t.FLOAT) or dataset.dtype.itemsize not in (
        1,
        2,
        4,
        8,
    ):
        raise DataError(f"{where} has dtype {dataset.dtype}: only arrays of plain numbers are read.")
    if dataset.ndim == 0 or 0 in dataset.shape:
        raise DataError(f"{where} has shape {dataset.shape}: it has no steps or no numbers in them.")
    plist = dataset.id.get_create_plist()
    layout, size = plist.get_layout(), math.prod(dataset.shape) * dataset.dtype.itemsize
    if layout == h5py.h5d.VIRTUAL or plist.get_external_count():
        raise DataError(
            f"{where} keeps its values in other files, which are not followed. `h5repack` writes them into one."
        )
    filters = [plist.get_filter(i)[0] for i in range(plist.get_nfilters())]
    if not set(filters) <= FILTERS.keys():
        raise DataError(
            f"{where} is encoded with filter {next(f for f in filters if f not in FILTERS)}; read are "
            f"{', '.join(FILTERS.values())}. `h5repack -f GZIP=1` encodes it anew."
        )
    file_size, address = os.stat(dataset.file.filename).st_size, h5py.h5o.get_info(dataset.id).addr
    if layout == h5py.h5d.COMPACT:
        extents.append((address, address + 1, where))  # the values are in the object's header
    elif layout == h5py.h5d.CONTIGUOUS:
        offset = dataset.id.get_offset()
        if offset is None or dataset.id.get_storage_size() != size or offset + size > file_size:
            raise DataError(
                f"{where} has {dataset.id.get_storage_size()} of {size} bytes in the file: it was never written, or it is "
                f"damaged."
            )
        extents.append((offset, offset + size, where))
    else:
        chunk = math.prod(dataset.chunks) * dataset.dtype.itemsize
        expected = math.prod(math.ceil(length / part) for length, part in zip(dataset.shape, dataset.chunks))
        if (
            size > 1000 * file_size + OPENING_BYTES or chunk > 4 * size + OPENING_BYTES / 8
        ):  # gzip makes zeros a thousand times smaller
            raise DataError(
                f"{where} says that it has shape {dataset.shape}, {readable_bytes(size)}, in chunks of {readable_bytes(chunk)}, "
                f"but the file has {readable_bytes(file_size)}."
            )
        found = dataset.id.get_num_chunks()
        if found != expected:
            raise DataError(
                f"{where}: {found} of {expected} chunks are in the file: not all of it was written, or it is damaged."
            )
        chunks = []
        dataset.id.chunk_iter(chunks.append)
        for info in chunks:
            problem = _chunk_problem(dataset, info, chunk, filters, file_size)
            if problem:
                raise DataError(f"{where}: its chunk {info.chunk_offset} is damaged: {problem}.")
            extents.append((info.byte_offset, info.byte_offset + info.size, where))
    return dataset


def _chunk_problem(dataset, info, chunk: int, filters: list, file_size: int) -> str | None:
    """What is wrong with a stored chunk that is to become `chunk` bytes. libhdf5 takes whatever it decodes to, and reads on past its end.

    Bit i of filter_mask says that filter i was left out, as compression is when it would make the chunk larger.
    """
    if info.byte_offset is None or info.byte_offset + info.size > file_size:
        return f"it has {info.size} bytes at {info.byte_offset}, and the file {file_size}"
    used = [name for i, name in enumerate(filters) if not info.filter_mask >> i & 1]
    packing = [name for name in used if name in (GZIP, SZIP, LZF)]
    if len(packing) > 1:
        return "it is compressed twice"
    before = used[: used.index(packing[0])] if packing else used
    plain = chunk + 4 * before.count(FLETCHER32)
    if not packing:
        return None if info.size == plain else f"it has {info.size} bytes instead of {plain}"
    if info.size > 2 * plain + 1024:
        return f"it has {info.size} bytes, but decodes to {plain}"
    _, data = dataset.id.read_direct_chunk(info.chunk_offset)
    data = data[: len(data) - 4 * (used.count(FLETCHER32) - before.count(FLETCHER32))]
    if packing[0] == GZIP:
        decompressor = zlib.decompressobj()
        found = len(decompressor.decompress(data, plain + 1))
        whole = decompressor.eof and not decompressor.unused_data
    else:
        found, whole = int.from_bytes(data[:4], "little") if packing[0] == SZIP else _lzf_size(data), True
    return None if whole and found == plain else f"it decodes to {found} bytes instead of {plain}"


def _lzf_size(data: bytes) -> int:
    """What LZF data decode to: runs of up to 32 bytes, and copies whose length is in three bits or, if these are full, one more byte."""
    size = position = 0
    while position < len(data):
        control = data[position]
        if control < 32:
            size, position = size + control + 1, position + control + 2
        else:
            long = control >> 5 == 7 and position + 1 < len(data)
            size, position = size + (control >> 5) + 2 + (data[position + 1] if long else 0), position + 2 + long
    return size


def _check_extents(extents: list, path: str):
    """Raise if two pieces of data are in the same place."""
    extents.sort()
    for (_, end, first), (start, _, second) in itertools.pairwise(extents):
        if start < end:
            raise DataError(
                f"{second} and {first.removeprefix(path + ': ')} are in the same place of the file: it is damaged."
            )


def _check_lengths(demo, datasets: dict, where: str):
    lengths = {key: dataset.shape[0] for key, dataset in datasets.items()}
    if "num_samples" in demo.attrs:
        lengths["attribute num_samples"] = int(demo.attrs["num_samples"])
    if len(set(lengths.values())) != 1:
        raise DataError(f"{where}: its arrays do not have the same number of steps: {lengths}.")
