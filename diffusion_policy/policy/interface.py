"""What a policy expects and returns, and a policy as a function on numpy arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from diffusion_policy.common.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of an observation at one step: numbers of this shape, or an image (C, H, W)."""

    shape: tuple[int, ...]
    rgb: bool = False


@dataclasses.dataclass(frozen=True)
class PolicyInterface:
    """Entries of an observation, how many steps of them a policy sees, and the actions it returns for execution."""

    observation: Mapping[str, Entry]
    n_obs_steps: int
    n_action_steps: int
    action_dim: int


def interface_of(policy: Any) -> PolicyInterface:
    """Read the interface of a policy: from its method `obs_shapes` and its `rgb_keys`, or else from `obs_dim`."""
    if hasattr(policy, "obs_shapes"):
        rgb = getattr(policy, "rgb_keys", ())
        entries = {key: Entry(tuple(shape), key in rgb) for key, shape in policy.obs_shapes().items()}
    elif getattr(policy, "obs_dim", None) is not None:
        entries = {"obs": Entry((int(policy.obs_dim),))}
    else:
        raise ConfigError(
            f"{type(policy).__name__} does not describe its observations: give it a method obs_shapes() that returns "
            "{key: shape at one step}, and the set rgb_keys"
        )
    action_dim = int(policy.action_dim)
    if hasattr(policy, "representation"):  # its network uses another representation than the recording
        recorded = policy.representation.obs
        entries = {key: Entry((recorded[key].width,)) if key in recorded else entry for key, entry in entries.items()}
        action_dim = policy.representation.action.width
    return PolicyInterface(entries, int(policy.n_obs_steps), int(policy.n_action_steps), action_dim)


class ChunkPredictor:
    """A policy from observation histories to action chunks, as numpy arrays in the units of the dataset."""

    def __init__(self, policy: Any):
        self.policy = policy
        self.interface = interface_of(policy)

    def __call__(self, history: Mapping[str, np.ndarray]) -> np.ndarray:
        """{key: (To, ...)} -> (T, Da): every predicted action from the step of the last observation on."""
        return self.whole({key: value[None] for key, value in history.items()})[0]

    def whole(self, histories: Mapping[str, np.ndarray]) -> np.ndarray:
        """{key: (B, To, ...)} -> (B, T, Da), as `__call__`."""
        result = self._predict(histories)
        action, prediction = result["action"], result.get("action_pred", result["action"])
        if prediction.shape[1] > action.shape[1]:  # it starts at the first observation
            action = prediction[:, self.interface.n_obs_steps - 1 :]
        elif self._starts_late():
            action = torch.cat([action[:, :1], action], dim=1)
        return action.to("cpu", torch.float64).numpy()

    def executed(self, histories: Mapping[str, np.ndarray]) -> np.ndarray:
        """{key: (B, To, ...)} -> (B, Ta, Da) float32: the actions that the policy is meant to execute."""
        return self._predict(histories)["action"].to("cpu", torch.float32).numpy()

    def _starts_late(self) -> bool:
        """Whether the executed actions start one step after the last observation."""
        convention = getattr(self.policy, "oa_step_convention", True)
        default = self.interface.n_obs_steps - bool(convention)
        return getattr(self.policy, "action_start", default) >= self.interface.n_obs_steps

    @torch.no_grad()
    def _predict(self, histories: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        return self.policy.predict_action({key: self._tensor(value) for key, value in histories.items()})

    def _tensor(self, value: np.ndarray) -> torch.Tensor:
        dtype = np.uint8 if value.dtype == np.uint8 else np.float32
        return torch.from_numpy(np.require(value, dtype, ("C", "W"))).to(self.policy.device)
