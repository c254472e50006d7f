"""Policies whose networks use another representation than the recording: rotations as rotation_6d, relative actions."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from diffusion_policy.common.config_util import build
from diffusion_policy.common.representation import Representation
from diffusion_policy.policy.training_hooks import provide_hooks


class Represented:
    """Converts at the boundary of a policy, which stands after it among the base classes.

    Observations and actions are those of the recording on the outside: a robot gets absolute actions in its own units.
    """

    representation: Representation

    def compute_loss(self, batch: dict[str, Any]) -> torch.Tensor:
        obs, reference = self._encode(batch["obs"])
        action = self.representation.encode_action(batch["action"], reference)
        return super().compute_loss({**batch, "obs": obs, "action": action})  # type: ignore[misc]

    @torch.no_grad()
    def predict_action(self, obs_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        obs, reference = self._encode(obs_dict)
        return self._decode(super().predict_action(obs), reference)  # type: ignore[misc]

    def act_recorded(self, obs_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`predict_action` without the checks of values, if the policy has that, for a graph."""
        obs, reference = self._encode(obs_dict)
        act: Any = getattr(super(), "act", None) or super().predict_action  # type: ignore[misc]
        return self._decode(act(obs), reference)

    def _decode(self, result: dict[str, torch.Tensor], reference: torch.Tensor | float) -> dict[str, torch.Tensor]:
        actions = {key: result[key] for key in ("action", "action_pred") if key in result}
        return {
            **result,
            **{key: self.representation.decode_action(value, reference) for key, value in actions.items()},
        }

    def _encode(self, obs: Any) -> tuple[Any, torch.Tensor | float]:
        """The encoded observation, in the form it was given, and what actions are relative to."""
        named = obs if isinstance(obs, dict) else {"obs": obs}
        encoded = self.representation.encode_obs(named)
        reference = self.representation.reference(encoded, self.n_obs_steps - 1)  # type: ignore[attr-defined]
        return (encoded if isinstance(obs, dict) else encoded["obs"]), reference


def build_policy(cfg: DictConfig) -> Any:
    """Build cfg.policy, with the hooks of the training loop and the conversions of task.representation."""
    policy = build(cfg, "policy")
    if not isinstance(policy, torch.nn.Module):
        return policy
    provide_hooks(policy)
    task = cfg.get("task")  # acting needs none, and a file from elsewhere may have anything there
    section = task.get("representation") if OmegaConf.is_dict(task) else None
    if section is not None:
        kind = type(policy)
        # A subclass, not a wrapper: the keys of the weights stay, and so do all other methods.
        policy.__class__ = type(kind.__name__, (Represented, kind), {"__module__": kind.__module__})
        plain: Any = OmegaConf.to_container(section)
        object.__setattr__(policy, "representation", Representation.from_config(plain))
    return policy
