"""The child process of hdf5_reader: the only code that calls libhdf5 on a file from an unknown source.

It refuses what would read other files or load code (links, external storage, plugins). It also looks for defects that
libhdf5 does not report: values that were never written, which it reads as zeros; chunks that decode to too little,
which leave memory unwritten; and addresses that point into other data. It imports neither torch nor zarr, so that it
starts fast.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

from diffusion_policy.common.errors import DataError
from diffusion_policy.common.memory import readable_bytes
from diffusion_policy.storage.compressed_size import inflated_size, lzf_size

OPENING_BYTES = 512e6  # what libhdf5 may allocate beside the arrays: its caches, and metadata of unknown size
FILTERS = {1: "gzip", 2: "shuffle", 3: "fletcher32", 32000: "lzf"}
GZIP, FLETCHER32, LZF = 1, 3, 32000


class _MissingError(DataError):
    """A missing member of a group."""


class _WriteError(Exception):
    """The output file cannot be written; the HDF5 file is not at fault."""


def serve() -> None:
    """Answer questions, one line of JSON each, until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print: keep that out of the answers

    def say(what: dict[str, Any]) -> None:
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
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            answer = {"error": f"{path} cannot be read, it is not an HDF5 file or it is damaged: {reason}"}
        _limit_memory(float("inf"))
        say(answer)


def _limit_memory(more: float) -> None:
    """Limit this process to `more` additional bytes from now on, if the system can enforce it."""
    try:
        import resource

        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        soft = hard
        if not math.isinf(more):
            soft = int(now + more) if hard == resource.RLIM_INFINITY else min(hard, int(now + more))
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    except (ImportError, OSError, ValueError):
        pass


def _read(
    path: str,
    keys: list[str],
    folder: str,
    memory: float,
    frames: dict[str, list[int]],
    into: str,
    frames_stay: bool,
    report: Callable[[int, int], Any],
) -> dict[str, Any]:
    """Write the array of keys[i] to folder/i.npy, and append the images `frames` to `into`.

    frames_stay: the parent will hold the images in memory, too. report(done, total): progress with images.
    """
    import h5py
    import numpy as np

    _limit_memory(OPENING_BYTES)
    with h5py.File(path, "r", locking=False) as file:
        data = _member(file, "data", h5py.Group, path)
        demos = _demos(data, path)
        env_args = _env_args(data, path)
        extents: list = []
        columns: dict[str, list] = {key: [] for key in (*keys, *frames)}
        for number, demo in enumerate(demos):
            where = f"{path}: data/{demo}"
            for key, column in columns.items():
                column.append(
                    _images(data[demo], key, frames[key], where, extents)
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
                f"{path} declares arrays of {readable_bytes(held)}, but only {readable_bytes(memory)} of "
                f"memory can be used for them here."
            )
        lengths = [dataset.shape[0] for dataset in columns[keys[0]]]
        ends = list(itertools.accumulate(lengths))
        for number, key in enumerate(keys):
            column = columns[key]
            _limit_memory(OPENING_BYTES + 3 * sizes[key])
            values = np.empty((ends[-1], *column[0].shape[1:]), column[0].dtype.newbyteorder("="))
            for demo, dataset, start, end in zip(demos, column, [0, *ends[:-1]], ends, strict=True):
                if (dataset.shape[1:], dataset.dtype) != (column[0].shape[1:], column[0].dtype):
                    raise DataError(
                        f"{path}: data/{demo}/{key} holds steps of shape {dataset.shape[1:]}, {dataset.dtype}, but in "
                        f"{demos[0]} they are {column[0].shape[1:]}, {column[0].dtype}."
                    )
                dataset.read_direct(values[start:end])
                if not np.isfinite(values[start:end]).all():
                    step = int((~np.isfinite(values[start:end])).reshape(end - start, -1).any(axis=1).argmax())
                    raise DataError(
                        f"{path}: data/{demo}/{key} holds NaN or infinity, first at step {step}. Remove this "
                        "demonstration."
                    )
            np.save(os.path.join(folder, f"{number}.npy"), values, allow_pickle=False)
        if frames:
            demos_of_frames = list(zip(*(columns[key] for key in frames), strict=True))
            largest = max(lengths) * sum(map(math.prod, frames.values()))
            if largest > memory:
                raise DataError(
                    f"{path} has a demonstration with {readable_bytes(largest)} of images, but only "
                    f"{readable_bytes(memory)} of memory can be used for them here."
                )
            _limit_memory(OPENING_BYTES + 3 * largest)
            _append(demos_of_frames, into, sum(sizes[key] for key in frames), report)
    return {"episode_ends": ends, "env_args": env_args}


def _images(demo: Any, key: str, shape: list[int], where: str, extents: list) -> Any:
    """As `_dataset`, for uint8 images (H, W, C)."""
    import numpy as np

    try:
        dataset = _dataset(demo, key, where, extents)
    except _MissingError as error:
        raise DataError(f"{error} (Files named low_dim*.hdf5 hold no images, those named image*.hdf5 do.)") from None
    if list(dataset.shape[1:]) != shape or dataset.dtype != np.uint8:
        raise DataError(
            f"{where}/{key} holds steps of shape {dataset.shape[1:]}, {dataset.dtype}, but images of shape "
            f"{tuple(shape)}, uint8, are expected (shape_meta gives them as (C, H, W))."
        )
    return dataset


def _append(demos: list[tuple], into: str, size: int, report: Callable[[int, int], Any]) -> None:
    """Append the images of `demos`, a tuple of datasets each, to the file `into`, those of a step side by side."""
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


def _member(group: Any, name: str, kind: type, where: str) -> Any:
    """group[name], which must be in this file and of this kind."""
    import h5py

    try:
        link = group.id.links.get_info(name.encode())
    except (KeyError, RuntimeError):  # h5py raises RuntimeError for a missing name
        raise _MissingError(
            f"{where} has no {name!r}; it has: {', '.join(itertools.islice(group, 20)) or 'nothing'}."
        ) from None
    if link.type != h5py.h5l.TYPE_HARD:
        raise DataError(
            f"{where}/{name} is a link to another place, and links are not followed. `h5copy -f soft -f ext` copies "
            f"their targets."
        )
    member = group[name]
    if not isinstance(member, kind):
        raise DataError(f"{where}/{name} is not a {kind.__name__.lower()}.")
    return member


def _demos(data: Any, path: str) -> list[str]:
    """['demo_0', 'demo_1', ...]: all of them, without a gap."""
    import h5py

    names = list(data)
    if not names:
        raise DataError(f"{path}: data has no demonstrations.")
    demos = [f"demo_{i}" for i in range(len(names))]
    if set(names) != set(demos):
        missing, odd = sorted(set(demos) - set(names), key=lambda name: int(name[5:])), sorted(set(names) - set(demos))
        raise DataError(
            f"{path}: data has {len(names)} members, which should be demo_0 to demo_{len(names) - 1}, but {missing[0]} "
            f"is missing and {odd[0]!r} is there. Number the demonstrations from 0 without a gap."
        )
    for demo in demos:
        _member(data, demo, h5py.Group, f"{path}: data")
    return demos


def _env_args(data: Any, path: str) -> dict | None:
    """The attribute `env_args`, which must be JSON text."""
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


def _dataset(demo: Any, key: str, where: str, extents: list) -> Any:
    """The dataset demo[key], checked; its places in the file are added to `extents`."""
    import h5py

    *groups, name = key.split("/")
    for group in groups:
        demo, where = _member(demo, group, h5py.Group, where), f"{where}/{group}"
    dataset, where = _member(demo, name, h5py.Dataset, where), f"{where}/{name}"
    kind, width = dataset.id.get_type().get_class(), dataset.dtype.itemsize
    if kind not in (h5py.h5t.INTEGER, h5py.h5t.FLOAT) or width not in (1, 2, 4, 8):
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
                f"{where} has {dataset.id.get_storage_size()} of {size} bytes in the file: it was never written, or it "
                f"is damaged."
            )
        extents.append((offset, offset + size, where))
    else:
        chunk = math.prod(dataset.chunks) * dataset.dtype.itemsize
        expected = math.prod(
            math.ceil(length / part) for length, part in zip(dataset.shape, dataset.chunks, strict=True)
        )
        # gzip makes zeros a thousand times smaller, but not more.
        if size > 1000 * file_size + OPENING_BYTES or chunk > 4 * size + OPENING_BYTES / 8:
            raise DataError(
                f"{where} declares shape {dataset.shape}, {readable_bytes(size)}, in chunks of "
                f"{readable_bytes(chunk)}, but the file has {readable_bytes(file_size)}."
            )
        found = dataset.id.get_num_chunks()
        if found != expected:
            raise DataError(
                f"{where}: {found} of {expected} chunks are in the file: not all of it was written, or it is damaged."
            )
        chunks: list[Any] = []
        dataset.id.chunk_iter(chunks.append)
        for info in chunks:
            problem = _chunk_problem(dataset, info, chunk, filters, file_size)
            if problem:
                raise DataError(f"{where}: its chunk {info.chunk_offset} is damaged: {problem}.")
            extents.append((info.byte_offset, info.byte_offset + info.size, where))
    return dataset


def _chunk_problem(dataset: Any, info: Any, chunk: int, filters: list[int], file_size: int) -> str | None:
    """What is wrong with a stored chunk that must decode to `chunk` bytes; None if nothing is.

    libhdf5 accepts any decoded size, and reads past the end. A set bit i of filter_mask means that filter i was not
    applied, as happens when compression would make the chunk larger.
    """
    if info.byte_offset is None or info.byte_offset + info.size > file_size:
        return f"it has {info.size} bytes at {info.byte_offset}, and the file {file_size}"
    used = [name for i, name in enumerate(filters) if not info.filter_mask >> i & 1]
    packing = [name for name in used if name in (GZIP, LZF)]
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
    found = inflated_size("zlib", data, plain) if packing[0] == GZIP else lzf_size(data)
    return None if found == plain else f"it decodes to {found} bytes instead of {plain}"


def _check_extents(extents: list, path: str) -> None:
    """Raise if two pieces of data are in the same place."""
    extents.sort()
    for (_, end, first), (start, _, second) in itertools.pairwise(extents):
        if start < end:
            raise DataError(
                f"{second} and {first.removeprefix(path + ': ')} are in the same place of the file: it is damaged."
            )


def _check_lengths(demo: Any, datasets: dict[str, Any], where: str) -> None:
    lengths = {key: dataset.shape[0] for key, dataset in datasets.items()}
    if "num_samples" in demo.attrs:
        lengths["attribute num_samples"] = int(demo.attrs["num_samples"])
    if len(set(lengths.values())) != 1:
        raise DataError(f"{where}: its arrays do not have the same number of steps: {lengths}.")
