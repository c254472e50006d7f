"""The identity of a dataset: what every result says about the data it was trained on."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from diffusion_policy.common.errors import DataError
from diffusion_policy.dataset.base_dataset import WindowedDataset


def dataset_identity(dataset: Any, section: Mapping[str, Any]) -> dict[str, Any]:
    """Return {name, sha256, warning} of the dataset that the config's `section` describes.

    The name is that of its file or folder. The checksum covers name, type, shape and values of every array that was
    loaded (observations, actions, episode ends), however the file stores them, but no images. Of a dataset that is not
    a WindowedDataset it covers the actions, or is None if that does not provide them. The warning is the one that
    loading the data gave.
    """
    given = (section.get(key) for key in ("zarr_path", "dataset_path", "dataset_dir"))
    path = getattr(dataset, "source", None) or next((path for path in given if path), None)
    name = os.path.basename(os.path.normpath(path)) if path else type(dataset).__name__
    return {"name": name, "sha256": _checksum(dataset), "warning": getattr(dataset, "source_warning", None)}


def check_same(before: Any, now: Mapping[str, Any]) -> None:
    """Raise DataError if a run that was trained on `before` would continue on other data.

    Checkpoints of earlier versions do not say what their run was trained on.
    """
    if before and isinstance(before, dict) and before.get("sha256") != now["sha256"]:
        raise DataError(
            f"this run was trained on {before.get('name')} (sha256 {str(before.get('sha256'))[:12]}), but the dataset "
            f"is now {now['name']} (sha256 {str(now['sha256'])[:12]}). Give the first one (task.dataset.zarr_path or "
            "task.dataset.dataset_path), or start another run with another hydra.run.dir"
        )


def _checksum(dataset: Any) -> str | None:
    if isinstance(dataset, WindowedDataset):
        buffer = dataset.replay_buffer
        return _sha256([*sorted(buffer.items()), ("episode_ends", buffer.episode_ends)])
    try:
        return _sha256([("action", dataset.get_all_actions().cpu().numpy())])
    except (AttributeError, NotImplementedError):
        return None


def _sha256(arrays: Iterable[tuple[str, Any]]) -> str:
    digest = hashlib.sha256()
    for name, array in arrays:
        values = np.asarray(array[:])
        values = np.ascontiguousarray(values.astype(values.dtype.newbyteorder("<"), copy=False))
        digest.update(f"{name} {values.dtype.str} {values.shape}\n".encode())
        digest.update(values.data)
    return digest.hexdigest()
