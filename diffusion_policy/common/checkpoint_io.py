"""Checkpoints on disk: complete or absent, and plain data that loading cannot run.

A checkpoint is one torch.save file of dicts, lists, numbers, strings and tensors:
    format, cfg, state_dicts {name: state}, attributes {name: value}, versions
Upstream's checkpoints are dill pickles, that is programs; they are opened only with trust=True. Exported weights, a folder of
`model.safetensors` and `config.json`, are read by the same `load` (see weights_io).
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import pathlib
import pickle
import platform
import shutil
import zipfile
from collections.abc import Callable
from typing import Any

import torch
from omegaconf import OmegaConf

from diffusion_policy.common.errors import CheckpointError, StorageError
from diffusion_policy.common.safe_config import checked_config

FORMAT = 1
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
TEMPORARY = ".{name}.{pid}.tmp"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change a number."""
    out = {"python": platform.python_version()}
    for name in (*PACKAGES, "implicit-drifting-policy"):
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = "not installed"
    return out


# ---------------------------------------------------------------------- writing
def write_atomically(
    path: str | os.PathLike, write: Callable[[Any], Any], previous: str | os.PathLike | None = None
) -> None:
    """Call write(file) on a temporary file beside `path`, flush it to disk, and rename it: never a half-written `path`.

    What `path` held before is kept as `previous` if that is given. Raises StorageError; `path` is then as it was.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(TEMPORARY.format(name=path.name, pid=os.getpid()))
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            _keep(path, pathlib.Path(previous))
        os.replace(temporary, path)
        _flush_folder(path.parent)
    except OSError as error:
        raise StorageError(
            f"{path} could not be written: {reason(error)}. What was there before is untouched"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _keep(path: pathlib.Path, previous: pathlib.Path) -> None:
    """Make `previous` another name of the file at `path`, which stays where it is for whoever reads it meanwhile."""
    spare = path.with_name(TEMPORARY.format(name=previous.name, pid=os.getpid()))
    try:
        os.link(path, spare)
        os.replace(spare, previous)
    except OSError:  # a file system without hard links
        os.replace(path, previous)


def _flush_folder(folder: pathlib.Path) -> None:
    """A rename survives a power failure once its folder is on the disk; not every system can flush one."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def reason(error: OSError) -> str:
    """What kept a file from being written, in words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full, or its quota is used up"
    return error.strerror or str(error)


def remove_leftovers(folder: pathlib.Path) -> None:
    """Delete the temporary files of processes that were killed while they wrote."""
    for path in folder.glob(TEMPORARY.format(name="*", pid="[0-9]*")):
        path.unlink(missing_ok=True)


def save(payload: dict[str, Any], path: str | os.PathLike, previous: str | os.PathLike | None = None) -> None:
    def write(file: Any) -> None:
        try:
            torch.save({"format": FORMAT, "versions": versions(), **payload}, file)
        except RuntimeError as error:  # torch's way to say that file.write failed
            cause = error.__context__ if isinstance(error.__context__, OSError) else OSError(errno.EIO, str(error))
            raise cause from error

    write_atomically(path, write, previous)


def copy(source: str | os.PathLike, path: str | os.PathLike) -> None:
    with open(source, "rb") as original:
        write_atomically(path, lambda file: shutil.copyfileobj(original, file))


# ---------------------------------------------------------------------- reading
def load(path: str | os.PathLike, trust: bool = False, check_config: bool = True) -> dict[str, Any]:
    """The payload of a checkpoint, on the CPU, with `cfg` as plain dicts. Raises CheckpointError that says what to do.

    Unless `trust`, nothing in the file can run, and its config names only classes of allowed packages (see safe_config). A caller
    that builds nothing from the config, such as a resumed run, which has its own, need not have that checked.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        from diffusion_policy.common import weights_io

        payload = weights_io.read(path)
    elif path.is_file():
        payload = _read(path, trust)
    else:
        raise CheckpointError(f"there is no checkpoint at {path}")
    _check_payload(payload, path)
    if check_config and not trust:
        payload["cfg"] = checked_config(payload["cfg"], str(path))
    return payload


def _read(path: pathlib.Path, trust: bool) -> Any:
    _check_archive(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not trust:
            raise CheckpointError(
                f"{path} holds pickled Python objects, as upstream's checkpoints do; opening it runs code from the file. If you trust "
                "where it comes from, pass --trust-checkpoint, or make a safe file of it once: python -m "
                "diffusion_policy.scripts.convert_checkpoint"
            ) from error
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle can fail in every way there is
        raise CheckpointError(
            f"{path} cannot be read, it is not a checkpoint: {type(error).__name__}: {error}"
        ) from error
    return _load_pickled(path)


def _check_archive(path: pathlib.Path) -> None:
    """Sizes and checksums of the records of a torch file, which torch itself does not compare."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                raise CheckpointError(f"{path} is not a checkpoint: its records are compressed, which torch never does")
            if sum(record.file_size for record in records) > path.stat().st_size:
                raise CheckpointError(f"{path} is damaged: its records claim to be larger than the file")
            if min((record.header_offset for record in records), default=0) != 0:
                # Python's reader steps over what stands before an archive, torch's then reads other bytes.
                raise CheckpointError(f"{path} is damaged: something stands before its first record")
            damaged = archive.testzip()
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # zipfile has many ways to stumble over a damaged file
        raise CheckpointError(f"{path} is not a checkpoint, or it is truncated or damaged: {error}") from error
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: its record {damaged} does not have the checksum it was written with")


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
    number = payload.get("format", FORMAT)
    if not isinstance(number, int) or number > FORMAT:
        raise CheckpointError(
            f"{path} was written in format {number}, by a newer version of this code; update to read it"
        )


def _load_pickled(path: pathlib.Path) -> dict[str, Any]:
    """An upstream checkpoint, in the shape of ours. Runs code from the file."""
    import dill

    try:
        payload = torch.load(path, map_location="cpu", pickle_module=dill, weights_only=False)
        return {
            "cfg": OmegaConf.to_container(payload["cfg"], resolve=True),
            "state_dicts": payload["state_dicts"],
            "attributes": {name: dill.loads(value) for name, value in payload.get("pickles", {}).items()},
        }
    except MemoryError:
        raise
    except Exception as error:  # it is a program: anything can happen
        raise CheckpointError(
            f"{path} is not a checkpoint as upstream writes them: {type(error).__name__}: {error}"
        ) from error
