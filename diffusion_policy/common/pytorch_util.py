"""Small helpers for dicts of tensors, modules and optimisers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def dict_apply(x: dict, func: Callable) -> dict:
    """The nested dict `x` with `func` applied to every leaf."""
    return {key: dict_apply(value, func) if isinstance(value, dict) else func(value) for key, value in x.items()}


def dict_apply_split(x: dict, split_func: Callable[[torch.Tensor], dict]) -> dict:
    """{key: v} with split_func(v) = {part: w} becomes {part: {key: w}}."""
    result: dict[str, dict] = {}
    for key, value in x.items():
        for part, piece in split_func(value).items():
            result.setdefault(part, {})[key] = piece
    return result


def dict_apply_reduce(x: list[dict], reduce_func: Callable[[list], torch.Tensor]) -> dict:
    """Merge dicts with the same keys: each value is `reduce_func` of the list of values."""
    return {key: reduce_func([entry[key] for entry in x]) for key in x[0]}


def pad_remaining_dims(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Reshape x (A, B) to (A, B, 1, ...), to broadcast against a target (A, B, ...)."""
    if x.shape != target.shape[: x.ndim]:
        raise ValueError(f"x has shape {tuple(x.shape)}, with which {tuple(target.shape)} does not start")
    return x.reshape(x.shape + (1,) * (target.ndim - x.ndim))


def replace_submodules(
    root_module: nn.Module, predicate: Callable[[nn.Module], bool], func: Callable[[nn.Module], nn.Module]
) -> nn.Module:
    """Replace every submodule m with `predicate(m)` by `func(m)`; returns the root, which may itself be replaced.

    A module registered under several names is replaced by the same module under all of them.
    """
    if predicate(root_module):
        return func(root_module)
    replacements: dict[nn.Module, nn.Module] = {}
    for parent in list(root_module.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and predicate(child):
                if child not in replacements:
                    replacements[child] = func(child)
                setattr(parent, name, replacements[child])
    return root_module


def optimizer_to(optimizer: torch.optim.Optimizer, device: Any) -> torch.optim.Optimizer:
    """Move the optimiser's state to `device`.

    `step` counters stay on the CPU unless the optimiser reads them on the device: every update would otherwise wait for
    a counter to be copied back.
    """
    for group in optimizer.param_groups:
        move_step = group.get("capturable") or group.get("fused")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and (key != "step" or move_step):
                    state[key] = value.to(device)
    return optimizer
