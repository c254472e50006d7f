"""Exported weights: a folder with `model.safetensors` (the policy's parameters) and `config.json` (how to build it).

Neither file can hold code. The folder has what a robot needs and no more: no optimiser state, no second set of weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from typing import Any

import safetensors
import safetensors.torch
import torch

from diffusion_policy.common.errors import CheckpointError
from diffusion_policy.storage import atomic, checkpoint_io

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
MAX_CONFIG_BYTES = 4_000_000


def acting_weights(payload: dict[str, Any]) -> str:
    """The name of the weights to act with: the averaged ones if the run kept an average."""
    training = payload["cfg"].get("training")
    use_ema = isinstance(training, dict) and training.get("use_ema", False)
    name = "ema_model" if use_ema else "model"
    if name not in payload["state_dicts"]:
        raise CheckpointError(
            f"the checkpoint has no {name} (it has: {', '.join(payload['state_dicts']) or 'nothing'})"
        )
    return name


def acting_config(cfg: dict[str, Any]) -> dict[str, Any]:
    """The part of a run's config that is needed to act, and the runner, which eval.py needs if there is one."""

    def part(section: str, names: tuple[str, ...]) -> dict[str, Any]:
        values = cfg.get(section)
        return {name: values[name] for name in names if name in values} if isinstance(values, dict) else {}

    out = {name: cfg[name] for name in ("name", "policy", "lerobot") if name in cfg}
    task = part("task", ("name", "env_runner", "representation"))
    return out | {"task": task, "training": part("training", ("seed", "use_ema"))}


def write(payload: dict[str, Any], folder: str | os.PathLike) -> pathlib.Path:
    """Export the weights of a loaded checkpoint; returns the folder."""
    folder = pathlib.Path(folder)
    name = acting_weights(payload)
    weights = payload["state_dicts"][name]
    odd = [key for key, value in weights.items() if not isinstance(value, torch.Tensor)]
    if odd:
        raise CheckpointError(f"the checkpoint's {name} cannot be exported: {odd[0]!r} is not a tensor")
    # Clone each tensor: the format does not allow two names for one.
    tensors = {key: value.clone().contiguous() for key, value in weights.items()}
    data = safetensors.torch.save(tensors)
    atomic.write_atomically(folder / WEIGHTS, lambda file: file.write(data))
    about = {
        "format": checkpoint_io.FORMAT,
        "weights": name,
        "sha256": hashlib.sha256(data).hexdigest(),
        "cfg": acting_config(payload["cfg"]),
        "attributes": {key: payload.get("attributes", {}).get(key) for key in ("global_step", "epoch", "dataset")},
        "versions": checkpoint_io.versions(),
    }
    # Last, so that a folder with a config is complete.
    atomic.write_text(folder / CONFIG, json.dumps(about, indent=2))
    return folder


def read(folder: pathlib.Path) -> dict[str, Any]:
    """The payload of an exported folder, with the keys of a checkpoint's."""
    for name in (WEIGHTS, CONFIG):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} is not a folder of exported weights: it has no {name}")
    if (folder / CONFIG).stat().st_size > MAX_CONFIG_BYTES:
        raise CheckpointError(f"{folder / CONFIG} is too large: it is not the config of exported weights")
    checkpoint_io.require_memory(folder / WEIGHTS)
    try:
        about = json.loads((folder / CONFIG).read_bytes())
        with open(folder / WEIGHTS, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != about["sha256"]:
            raise CheckpointError(
                f"{folder / WEIGHTS} has another checksum than {CONFIG} says: it is damaged or of another export"
            )
        tensors = safetensors.torch.load_file(folder / WEIGHTS)
        return {
            "format": about["format"],
            "cfg": about["cfg"],
            "state_dicts": {about["weights"]: tensors},
            "attributes": about.get("attributes", {}),
            "versions": about.get("versions", {}),
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{folder} cannot be read, it is not a folder of exported weights: {type(error).__name__}: {error}"
        ) from error
