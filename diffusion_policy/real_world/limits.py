"""Limits on what is sent to a robot."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from diffusion_policy.common.errors import ConfigError


@dataclasses.dataclass
class ActionLimits:
    """Limits of every action, in its own units. A number stands for all dimensions; the defaults limit nothing.

    Args:
        low: smallest action, per dimension: the workspace.
        high: largest action.
        max_step: largest change from one control step to the next, per dimension. A larger one is shortened, with its
            direction kept.
    """

    low: Any = -np.inf
    high: Any = np.inf
    max_step: Any = np.inf

    def __post_init__(self) -> None:
        for name in ("low", "high", "max_step"):
            value = np.asarray(getattr(self, name), dtype=np.float64)
            if np.isnan(value).any():
                raise ConfigError(f"the limit {name} holds NaN")
            setattr(self, name, value)
        if not (self.max_step > 0).all():
            raise ConfigError(f"max_step must be positive, not {self.max_step}")
        if not (self.low <= self.high).all():
            raise ConfigError(f"the workspace is empty: low {self.low} is above high {self.high}")

    def apply(self, action: np.ndarray, before: np.ndarray | None) -> np.ndarray:
        """Return the action inside the workspace and not too far from the one `before`."""
        action = np.clip(action, self.low, self.high)
        if before is None:
            return action
        change = action - before
        share = float(np.max(np.abs(change) / self.max_step))
        return action if share <= 1 else before + change / share
