"""Checkpoints: plain data, written atomically, and read without running code.

A checkpoint is one torch.save file of dicts, lists, numbers, strings and tensors:

    format, cfg, state_dicts {name: state}, attributes {name: value}, versions

Upstream's checkpoints are dill pickles, which run code when they are opened; they need trust=True. `load` also reads
exported weights, a folder with `model.safetensors` and `config.json` (see weights_io), exported graphs (onnx_io), and
checkpoints of LeRobot (lerobot_io).
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import pathlib
import pickle
import platform
import zipfile
from collections.abc import Sequence
from typing import Any

import torch
from omegaconf import OmegaConf

from diffusion_policy.common.errors import CheckpointError
from diffusion_policy.common.memory import available_bytes, readable_bytes
from diffusion_policy.storage.atomic import write_atomically
from diffusion_policy.storage.plain_config import plain_config, plain_data
from diffusion_policy.storage.safe_config import PLUGINS, checked_config

FORMAT = 1
#: States that are a policy's weights.
WEIGHTS = ("model", "ema_model")
#: Packages whose version can change a number.
PACKAGES = (
    "torch",
    "numpy",
    "gymnasium",
    "pymunk",
    "diffusers",
    "zarr",
    "hydra-core",
    "mujoco",
    "robosuite",
    "metaworld",
    "gymnasium-robotics",
    "fpsample",
)


def versions() -> dict[str, str]:
    """Versions of Python, of PACKAGES, and of the installed plugins."""
    out = {"python": platform.python_version()}
    for name in (*PACKAGES, *_plugins()):
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = "not installed"
    return out


def _plugins() -> list[str]:
    """Names of the distributions that register a plugin."""
    points = importlib.metadata.entry_points(group=PLUGINS)
    return sorted({point.dist.name for point in points if point.dist is not None})


def save(payload: dict[str, Any], path: str | os.PathLike, previous: str | os.PathLike | None = None) -> None:
    """Write a checkpoint atomically; `previous` keeps the one that it replaces."""

    def write(file: Any) -> None:
        try:
            torch.save({"format": FORMAT, "versions": versions(), **payload}, file)
        except RuntimeError as error:  # torch hides the OSError of file.write in its context
            cause = error.__context__ if isinstance(error.__context__, OSError) else OSError(errno.EIO, str(error))
            raise cause from error

    write_atomically(path, write, previous)


def load(
    path: str | os.PathLike, trust: bool = False, check_config: bool = True, sections: Sequence[str] | None = None
) -> dict[str, Any]:
    """The payload of a checkpoint, on the CPU, with `cfg` as plain dicts.

    Unless `trust`, no code from the file runs, and its config is plain data that may name only classes of allowed
    packages (see plain_config and safe_config). A caller that builds only some sections of the config names them: the
    classes of the others are then neither imported nor needed, and not in the payload. A caller that builds nothing
    from the config, such as a resumed run, can set check_config=False.

    Raises:
        CheckpointError: the file is missing, damaged, of a newer format, or not trusted.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        from diffusion_policy.storage import lerobot_io, weights_io

        payload = lerobot_io.read(path) if lerobot_io.is_checkpoint(path) else weights_io.read(path)
    elif path.is_file() and path.suffix == ".onnx":
        from diffusion_policy.storage import onnx_io

        payload = onnx_io.read(path)
    elif path.is_file():
        require_memory(path)
        payload = _read(path, trust)
    else:
        raise CheckpointError(f"there is no checkpoint at {path}")
    _check_payload(payload, path)
    if not trust:
        cfg, where = payload["cfg"], str(path)
        payload["cfg"] = checked_config(cfg, where, sections) if check_config else plain_config(cfg, where)
    return payload


def _read(path: pathlib.Path, trust: bool) -> Any:
    _check_archive(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not trust:
            raise CheckpointError(
                f"{path} holds pickled Python objects, as upstream's checkpoints do; opening it runs code from the "
                "file. If you trust its source, pass --trust-checkpoint, or convert it once to a safe file with "
                "python -m diffusion_policy.scripts.convert_checkpoint"
            ) from error
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle can raise any exception
        raise CheckpointError(
            f"{path} cannot be read, it is not a checkpoint: {type(error).__name__}: {error}"
        ) from error
    return _load_pickled(path)


def _check_archive(path: pathlib.Path) -> None:
    """Check sizes and checksums of the records of a torch file; torch itself does not compare them."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                raise CheckpointError(f"{path} is not a checkpoint: its records are compressed, which torch never does")
            if sum(record.file_size for record in records) > path.stat().st_size:
                raise CheckpointError(f"{path} is damaged: its records claim to be larger than the file")
            if min((record.header_offset for record in records), default=0) != 0:
                # zipfile skips bytes before the archive, torch does not: the two would read different data.
                raise CheckpointError(f"{path} is damaged: there are bytes before its first record")
            damaged = archive.testzip()
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # zipfile raises exceptions of many kinds for a damaged file
        raise CheckpointError(f"{path} is not a checkpoint, or it is truncated or damaged: {error}") from error
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: its record {damaged} does not match its checksum")


def _check_payload(payload: Any, path: pathlib.Path) -> None:
    if not isinstance(payload, dict) or not {"cfg", "state_dicts"} <= payload.keys():
        raise CheckpointError(f"{path} is a torch file but not a checkpoint of a training run (no cfg and state_dicts)")
    for name in ("cfg", "state_dicts", "attributes"):
        value = payload.get(name, {})
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise CheckpointError(f"{path} is not a checkpoint: its {name} is not a mapping with names")
    for name, state in payload["state_dicts"].items():
        if not isinstance(state, dict):
            raise CheckpointError(f"{path} is not a checkpoint: the state of {name} is a {type(state).__name__}")
        _check_tensors(state, f"{path}: the state of {name}")
        if name in WEIGHTS:
            _check_weights(state, f"{path}: the state of {name}")
    for name in ("global_step", "epoch"):
        value = payload.get("attributes", {}).get(name)
        if value is not None and not (isinstance(value, int) and 0 <= value < 2**63):
            raise CheckpointError(f"{path} is not a checkpoint: its {name} is not a count")
    dataset = payload.get("attributes", {}).get("dataset")  # it is shown and written to results
    if dataset is not None and not isinstance(plain_data(dataset, f"{path}: its attribute dataset"), dict):
        raise CheckpointError(f"{path} is not a checkpoint: its dataset is not a mapping")
    number = payload.get("format", FORMAT)
    if not isinstance(number, int) or number > FORMAT:
        raise CheckpointError(f"{path} was written in a newer format than {FORMAT}; update this code to read it")


def _check_weights(state: dict, where: str) -> None:
    """Raise unless a policy's state is tensors with names; a module may also keep `_extra_state` of any kind."""
    for key, value in state.items():
        if not isinstance(key, str):
            raise CheckpointError(f"{where} has a key that is a {type(key).__name__}, not a name")
        if not isinstance(value, torch.Tensor) and not key.endswith("_extra_state"):
            raise CheckpointError(f"{where} has a {type(value).__name__} at {key[:100]!r}, not a tensor")


def _check_tensors(state: Any, where: str) -> None:
    """Raise unless every tensor is an ordinary one whose values are all in the file.

    A tensor can be a small piece of memory with a large shape (stride 0), sparse, or without values at all: it would be
    read, and fail or fill the memory later.
    """
    nodes, seen = [state], set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, torch.Tensor):
            ordinary = node.layout == torch.strided and node.device.type == "cpu"
            odd = node.is_quantized or node.is_complex() or node.is_nested
            if not ordinary or odd or node.numel() * node.element_size() > node.untyped_storage().nbytes():
                raise CheckpointError(f"{where} holds a tensor of shape {tuple(node.shape)} without all its values")
        elif isinstance(node, (dict, list, tuple)) and id(node) not in seen:  # a pickle can share or nest itself
            seen.add(id(node))
            nodes += node.values() if isinstance(node, dict) else node


def require_memory(path: pathlib.Path) -> None:
    """Raise unless a file can be read into memory; a sparse file may claim any size."""
    size, free = path.stat().st_size, available_bytes()
    if 2 * size > free:
        raise CheckpointError(
            f"{path} has {readable_bytes(size)}, too much to read into the {readable_bytes(free)} of memory that are "
            "free: it is damaged, or not a checkpoint of a policy"
        )


def _load_pickled(path: pathlib.Path) -> dict[str, Any]:
    """An upstream checkpoint, converted to our layout. Runs code from the file."""
    import dill

    try:
        payload = torch.load(path, map_location="cpu", pickle_module=dill, weights_only=False)
        return {
            "cfg": OmegaConf.to_container(payload["cfg"], resolve=True),
            "state_dicts": _plain(payload["state_dicts"]),
            "attributes": {name: dill.loads(value) for name, value in payload.get("pickles", {}).items()},
        }
    except MemoryError:
        raise
    except Exception as error:  # a pickle is a program and can raise anything
        raise CheckpointError(
            f"{path} is not a checkpoint as upstream writes them: {type(error).__name__}: {error}"
        ) from error


def _plain(value: Any) -> Any:
    """`value` with the containers of OmegaConf, which upstream's UNet optimisers keep as their betas, as plain ones."""
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value
