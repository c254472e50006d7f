"""Behaviour cloning with the squared error."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from idp_workspace.flows import squared_error
from idp_workspace.policy.base import GeneratorPolicy


class RegressionPolicy(GeneratorPolicy):
    """L = scale mean N(f(o, 0, 0) - a*),    N(r) = sum_d r_d^2.    Acts with the same call, f(o, 0, 0)."""

    @dataclasses.dataclass(frozen=True)
    class Options:
        loss_scale: float = 0.1

    def training_input(self, actions: Tensor) -> Tensor:
        """What the generator is given in the place of an action, (B, H, D)."""
        return self.zeros(len(actions))

    def loss(self, cond: Tensor, actions: Tensor) -> Tensor:
        prediction = self.generator(cond, self.training_input(actions), 0.0)
        return self.options.loss_scale * squared_error(prediction - actions).mean()

    def sample(self, cond: Tensor, batch: int) -> Tensor:
        return self.generator(cond, self.zeros(batch), 0.0)
