"""A policy whose prediction is an exported graph. It acts as the policy that it was exported from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.export.signature import Field, Signature


class GraphPolicy:
    """Calls a graph with raw observations, and with noise that torch's generator draws if the graph takes any.

    The numbers are drawn as the exported policy drew them, so that a seeded evaluation sees the same. It runs on the
    CPU.
    """

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, signature: Signature, call: Callable[[dict[str, np.ndarray]], list[np.ndarray]]):
        self.signature, self._call = signature, call
        self.n_obs_steps, self.n_action_steps = signature.n_obs_steps, signature.n_action_steps
        self.action_start = signature.action_start
        self.horizon, self.action_dim = signature.outputs[1].shape
        observed = [field for field in signature.inputs if field.kind != "noise"]
        self.obs_dim = observed[0].shape[-1] if [field.name for field in observed] == ["obs"] else None

    @property
    def nfe(self) -> int:
        """Network calls in the graph."""
        return self.signature.nfe

    @nfe.setter
    def nfe(self, calls: int) -> None:
        if calls != self.nfe:
            raise ValueError(f"an exported graph makes {self.nfe} network call(s): export the checkpoint with --nfe")

    def reset(self) -> None:
        """Do nothing: a graph has no state."""

    def obs_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each entry of an observation at one step."""
        return {field.name: field.shape[1:] for field in self.signature.inputs if field.kind != "noise"}

    @property
    def rgb_keys(self) -> set[str]:
        """Entries of an observation that are images."""
        return {field.name for field in self.signature.inputs if field.kind == "image"}

    def predict_action(self, obs_dict: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """{key: (B, >=To, *shape)} -> {'action': (B, Ta, Da), 'action_pred': (B, T, Da)}, in the dataset's units.

        Images are bytes; floats in [0, 1] are rounded to bytes.
        """
        if not isinstance(obs_dict, Mapping):
            raise ConfigError(f"predict_action takes a dictionary of tensors, not a {type(obs_dict).__name__}")
        feeds = {f.name: observed(f, obs_dict) for f in self.signature.inputs if f.kind != "noise"}
        sizes = {len(value) for value in feeds.values()}
        if len(sizes) > 1:
            raise ConfigError(f"the entries of an observation must have one batch size, got {sorted(sizes)}")
        for field in self.signature.inputs:
            if field.kind == "noise":
                feeds[field.name] = drawn(field, sizes.pop())
        action, prediction = self._call(feeds)
        if not np.isfinite(prediction).all():
            raise ConfigError(
                "the predicted actions are not finite: the observation is far outside the dataset, or the exported "
                "weights are broken"
            )
        return {"action": torch.from_numpy(action), "action_pred": torch.from_numpy(prediction)}


def observed(field: Field, obs_dict: Mapping[str, Any]) -> np.ndarray:
    """Return an entry of an observation as the graph takes it; ConfigError if it does not fit."""
    if field.name not in obs_dict:
        names = ", ".join(map(str, obs_dict)) or "none"
        raise ConfigError(f"the observation has no entry {field.name!r} (it has: {names})")
    value = torch.as_tensor(obs_dict[field.name])
    shape, (steps, *rest) = value.shape, field.shape
    if len(shape) != 1 + len(field.shape) or not shape[0] or shape[1] < steps or [*shape[2:]] != rest:
        expected = f"(batch, at least {steps} steps, {', '.join(map(str, rest))})"
        raise ConfigError(f"{field.name} must have shape {expected}, got {tuple(shape)}")
    if field.kind == "image":
        return as_bytes(field.name, value[:, :steps]).contiguous().numpy()
    if value.dtype == torch.bool or value.dtype.is_complex:
        raise ConfigError(f"{field.name} must be real numbers, got {value.dtype}")
    out = np.ascontiguousarray(value.to(torch.float32).numpy()[:, :steps])  # numpy's slices cost less than torch's
    if not np.isfinite(out).all():
        raise ConfigError(f"{field.name} must be finite, got NaN or infinity")
    return out


def as_bytes(name: str, image: torch.Tensor) -> torch.Tensor:
    """Return an image as uint8, from bytes or floats in [0, 1]."""
    if image.dtype == torch.uint8:
        return image
    if not image.is_floating_point() or not bool(((image >= -1e-3) & (image <= 1 + 1e-3)).all()):
        raise ConfigError(f"{name} must be uint8 (0 to 255) or floats (0 to 1), got {image.dtype}")
    return (image * 255).round().clamp(0, 255).to(torch.uint8)


def drawn(field: Field, batch: int) -> np.ndarray:
    """Draw the noise of a batch, one draw of the policy after the other."""
    draws, *shape = field.shape
    return torch.stack([torch.randn(batch, *shape) for _ in range(draws)], dim=1).numpy()
