"""Checkpoints on disk: complete or absent, and plain data that loading cannot run.

A checkpoint is one torch.save file of dicts, lists, numbers, strings and tensors:
    format, cfg, state_dicts {name: state}, attributes {name: value}, versions
Upstream's checkpoints are dill pickles, that is programs; they are opened only with trust=True.
"""
from __future__ import annotations

import importlib.metadata
import os
import pathlib
import pickle
import platform
import zipfile
from typing import Any

import torch
from omegaconf import OmegaConf

from diffusion_policy.common.errors import CheckpointError

FORMAT = 1
PACKAGES = ("torch", "numpy", "gymnasium", "pymunk", "diffusers", "zarr", "hydra-core")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change a number."""
    out = {"python": platform.python_version()}
    for name in (*PACKAGES, "implicit-drifting-policy"):
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = "not installed"
    return out


def write_atomically(path: str | os.PathLike, write) -> None:
    """Call write(file) on a temporary file beside `path`, flush it to disk, and rename it: never a half-written `path`."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save(payload: dict[str, Any], path: str | os.PathLike) -> None:
    write_atomically(path, lambda file: torch.save({"format": FORMAT, "versions": versions(), **payload}, file))


def load(path: str | os.PathLike, trust: bool = False) -> dict[str, Any]:
    """The payload of a checkpoint, on the CPU, with `cfg` as plain dicts. Raises CheckpointError that says what to do."""
    path = pathlib.Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint at {path}")
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not zipfile.is_zipfile(path):
            raise CheckpointError(f"{path} is not a checkpoint, or it is truncated") from error
        if not trust:
            raise CheckpointError(
                f"{path} holds pickled Python objects, as upstream's checkpoints do; opening it runs code from the file. If you trust "
                "where it comes from, pass --trust-checkpoint"
            ) from error
        payload = _load_pickled(path)
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read, it is truncated or not a checkpoint: {error}") from error
    if not isinstance(payload, dict) or not {"cfg", "state_dicts"} <= payload.keys():
        raise CheckpointError(f"{path} is a torch file but not a checkpoint of a training run (no cfg and state_dicts)")
    if payload.get("format", FORMAT) > FORMAT:
        raise CheckpointError(f"{path} was written in format {payload['format']}, by a newer version of this code; update to read it")
    return payload


def _load_pickled(path: pathlib.Path) -> dict[str, Any]:
    """An upstream checkpoint, in the shape of ours. Runs code from the file."""
    import dill

    payload = torch.load(path, map_location="cpu", pickle_module=dill, weights_only=False)
    return {
        "cfg": OmegaConf.to_container(payload["cfg"], resolve=True),
        "state_dicts": payload["state_dicts"],
        "attributes": {name: dill.loads(value) for name, value in payload.get("pickles", {}).items()},
    }
