"""Flow matching."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from idp_workspace.options import Options
from idp_workspace.paths import euler, interpolate, squared_error, uniform_times
from idp_workspace.policy.base import GeneratorPolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlowMatchingOptions(Options):
    """Options of flow matching."""

    loss_scale: float = 0.1
    nfe: int = 9
    """Euler steps."""
    start: Literal["zero", "gaussian"] = "zero"
    """`zero`, MIP's protocol, integrates from the mean of the noise; `gaussian` samples the learnt distribution."""


class FlowMatchingPolicy(GeneratorPolicy):
    """The generator is the velocity that carries noise to the expert along straight lines.

    x_t = (1 - t) z + t a*,    t ~ U(0, 1),  z ~ N(0, I)
    L = scale mean N(f(o, x_t, t) - (a* - z)),    N(r) = sum_d r_d^2
    act: dx/dt = f(o, x, t) from t = 0 to 1 in `nfe` Euler steps
    """

    Options = FlowMatchingOptions
    options: FlowMatchingOptions

    def loss(self, cond: Tensor, actions: Tensor) -> Tensor:
        t = uniform_times(len(actions), like=actions)
        x, velocity = interpolate(torch.randn_like(actions), actions, t)
        return self.options.loss_scale * squared_error(self.generator(cond, x, t) - velocity).mean()

    def check_nfe(self, nfe: int) -> None:
        if nfe < 1:
            raise ValueError(f"nfe={nfe}: flow matching acts with at least one Euler step")

    def sample(self, cond: Tensor, batch: int) -> Tensor:
        x = self.zeros(batch)
        if self.options.start == "gaussian":
            x = torch.randn_like(x)
        return euler(lambda x, t: self.generator(cond, x, t), x, self.nfe)
