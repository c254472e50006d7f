"""Optional methods of a policy that the training loop and eval.py call."""

from __future__ import annotations

import types
from typing import Protocol

from torch import nn


class TrainingHooks(Protocol):
    """Optional methods of a policy, with defaults that do nothing."""

    nfe: int = 0
    """Network calls per action chunk, 0 if fixed and unknown; setting an impossible number raises ValueError."""

    def set_progress(self, fraction: float) -> None:
        """Receive the share of training that is done, in [0, 1]; called before every step and every evaluation."""
        return

    def metrics(self) -> dict[str, float]:
        """Numbers about the last batch to write to the log; called at the log interval."""
        return {}

    def on_train_start(self) -> None:
        """Load what only training needs, such as a teacher; called once, after set_normalizer."""
        return

    def set_average(self, policy: nn.Module | None) -> None:
        """Receive the policy with the averaged weights, None without averaging; called once, after on_train_start."""
        return


def provide_hooks(policy: nn.Module) -> None:
    """Give a policy that does not inherit TrainingHooks the default of every hook it does not define.

    A policy written for upstream's base classes, which have no hooks, then trains here without further checks.
    """
    for name, default in (
        ("nfe", TrainingHooks.nfe),
        ("set_progress", types.MethodType(TrainingHooks.set_progress, policy)),
        ("metrics", types.MethodType(TrainingHooks.metrics, policy)),
        ("on_train_start", types.MethodType(TrainingHooks.on_train_start, policy)),
        ("set_average", types.MethodType(TrainingHooks.set_average, policy)),
    ):
        if not hasattr(policy, name):
            setattr(policy, name, default)
