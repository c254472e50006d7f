"""Arithmetic of a device: the precision of the networks, TF32, and torch.compile."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch

from diffusion_policy.workspace.settings import TrainingSettings

log = logging.getLogger(__name__)

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def set_up(device: torch.device, settings: TrainingSettings) -> None:
    """Prepare the device for `training.precision` and `training.compile`."""
    if device.type == "cuda" and not settings.compile:
        # TF32, as MIP sets it. The geometry turns it off for itself, which compiled code would not notice.
        torch.set_float32_matmul_precision("high")
    if settings.precision != "fp32" and device.type == "cpu":
        log.warning("training.precision=%s is for GPUs: on a CPU it is slower than fp32", settings.precision)


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager:
    """The context in which a loss is computed."""
    return torch.autocast(device.type, TYPES[precision]) if precision in TYPES else contextlib.nullcontext()


def make_scaler(device: torch.device, precision: str) -> Any:
    """The scaler that keeps small gradients from vanishing in float16; None for other types."""
    return torch.amp.GradScaler(device.type) if precision == "fp16" else None
