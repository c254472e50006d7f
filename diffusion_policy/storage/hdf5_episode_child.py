"""HDF5 files of any layout in the child process of reader_process, checked as those of robomimic (see hdf5_child)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from diffusion_policy.common.errors import DataError
from diffusion_policy.storage.hdf5_child import _check_extents, _dataset

MAX_MEMBERS = 200_000
MAX_DEPTH = 6
MAX_TEXT = 100_000


def load() -> None:
    """Import what the questions need, before memory is limited."""
    import h5py  # noqa: F401
    import numpy  # noqa: F401


def hdf5_members(path: str, leave_out: list[str]) -> Iterator[tuple[dict, dict]]:
    """{datasets: {name: [shape, dtype]}, attributes}: all arrays of numbers, those of linked places excepted."""
    import h5py

    datasets: dict[str, list] = {}

    def walk(group: Any, prefix: str, depth: int) -> None:
        for name in group:
            if name in leave_out or group.id.links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
                continue
            member = group[name]
            if isinstance(member, h5py.Group) and depth < MAX_DEPTH:
                walk(member, f"{prefix}{name}/", depth + 1)
            elif isinstance(member, h5py.Dataset) and member.dtype.kind in "iuf":
                datasets[prefix + name] = [list(member.shape), member.dtype.str]
            if len(datasets) > MAX_MEMBERS:
                raise DataError(f"{path} has more than {MAX_MEMBERS} arrays.")

    with h5py.File(path, "r", locking=False) as file:
        walk(file, "", 0)
        groups = [file, file["data"]] if any(name.startswith("data/") for name in datasets) else [file]
        attributes = {
            key: str(value)[:MAX_TEXT]
            for group in groups
            for key, value in group.attrs.items()
            if isinstance(value, str)
        }
        yield {"datasets": datasets, "attributes": attributes}, {}


def hdf5_arrays(path: str, group: str, keys: list[str]) -> Iterator[tuple[dict, dict]]:
    """The arrays `keys` of one group."""
    import h5py
    import numpy as np

    extents: list = []
    with h5py.File(path, "r", locking=False) as file:
        found = {key: _dataset(file, group + key, path, extents) for key in keys}
        _check_extents(extents, path)
        arrays = {key: np.ascontiguousarray(dataset[:]) for key, dataset in found.items()}
        yield {}, {key: array.astype(array.dtype.newbyteorder("=")) for key, array in arrays.items()}


def hdf5_images(
    path: str, key: str, shape: list[int], count: int, block: int, encoded: bool = False
) -> Iterator[tuple[dict, dict]]:
    """Images (N, H, W, 3) of one array, `block` at a time; with `encoded`, a row is a JPEG or PNG, then zeros."""
    import h5py
    import numpy as np

    from diffusion_policy.storage.images_child import decoded

    extents: list = []
    with h5py.File(path, "r", locking=False) as file:
        dataset = _dataset(file, key, path, extents)
        _check_extents(extents, path)
        if dataset.dtype != np.uint8 or len(dataset) < count or (not encoded and list(dataset.shape[1:]) != shape):
            raise DataError(f"{path}: {key} holds {dataset.shape}, {dataset.dtype}: not {count} images of {shape}.")
        for start in range(0, count, block):
            rows = dataset[start : min(start + block, count)]
            if encoded:  # their colours are in the order of the encoded array, which OpenCV takes for BGR
                rows = decoded(list(rows), shape, f"{path}: {key}, step", start, swap=False)
            yield {}, {"frames": np.ascontiguousarray(rows)}


def hdf5_image_size(path: str, key: str) -> Iterator[tuple[dict, dict]]:
    """{height, width} of the first encoded image of an array."""
    import h5py

    from diffusion_policy.storage.images_child import image_size

    extents: list = []
    with h5py.File(path, "r", locking=False) as file:
        dataset = _dataset(file, key, path, extents)
        size = image_size(dataset[0].tobytes()) if dataset.ndim == 2 and dataset.dtype.str == "|u1" else None
    if size is None:
        raise DataError(f"{path}: {key} holds no images, neither raw nor JPEG or PNG.")
    yield {"height": size[0], "width": size[1]}, {}
