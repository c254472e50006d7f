"""Checkpoints of the host: this repository's, or upstream's own tree."""

from __future__ import annotations

import os
from typing import Any

import hydra
import torch

from diffusion_policy.workspace.base_workspace import BaseWorkspace

try:
    from diffusion_policy.storage import checkpoint_io
except ImportError:  # upstream's own tree
    checkpoint_io = None  # type: ignore[assignment]


def load_workspace(path: str | os.PathLike[str], trust: bool = False) -> Any:
    """Return the workspace that wrote `path`, with its states.

    `trust` allows a pickle, which runs code from the file. In upstream's tree every checkpoint is a pickle, and opening
    one is as safe as with its `eval.py`.

    Raises:
        RuntimeError: the file cannot be read, or does not fit its config.
    """
    if checkpoint_io is not None:
        return BaseWorkspace.create_from_checkpoint(str(path), trust=trust)
    # Upstream's create_from_checkpoint makes an instance of the class it is called on, not of the one in the file.
    import dill

    try:
        payload = torch.load(path, map_location="cpu", pickle_module=dill, weights_only=False)
        workspace = hydra.utils.get_class(payload["cfg"]._target_)(payload["cfg"])
        workspace.load_payload(payload)
    except Exception as error:  # a pickle can raise anything
        raise RuntimeError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    return workspace
