"""Behaviour cloning with the squared error."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from torch import Tensor

from idp_workspace.options import Above, Options
from idp_workspace.paths import raised, squared_error
from idp_workspace.policy.base import GeneratorPolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegressionOptions(Options):
    """Options of regression."""

    loss_scale: float = 0.1
    energy_power: Annotated[float, Above(0)] = 1.0
    """Exponent of the squared error at each chunk step: 0.5 is the distance. As IDP's, for fair comparisons."""


class RegressionPolicy(GeneratorPolicy):
    """L = scale mean N(f(o, 0, 0) - a*),    N(r) = sum_d r_d^2. Acts with the same call, f(o, 0, 0)."""

    Options = RegressionOptions
    options: RegressionOptions

    def training_input(self, actions: Tensor) -> Tensor:
        """Return what the generator receives in place of an action, (B, H, D)."""
        return self.zeros(len(actions))

    def loss(self, cond: Tensor, actions: Tensor) -> Tensor:
        prediction = self.generator(cond, self.training_input(actions), 0.0)
        error = raised(squared_error(prediction - actions), self.options.energy_power)
        return self.options.loss_scale * error.mean()

    def sample(self, cond: Tensor, batch: int) -> Tensor:
        return self.generator(cond, self.zeros(batch), 0.0)
