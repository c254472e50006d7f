"""Flow matching."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from idp_workspace.flows import euler, interpolate, squared_error, uniform_times
from idp_workspace.options import check_choices
from idp_workspace.policy.base import GeneratorPolicy


class FlowMatchingPolicy(GeneratorPolicy):
    """The generator is the velocity that carries noise to the expert along straight lines:

        x_t = (1 - t) z + t a*,    t ~ U(0, 1),  z ~ N(0, I)
        L = scale mean N(f(o, x_t, t) - (a* - z)),    N(r) = sum_d r_d^2
        act: dx/dt = f(o, x, t) from t = 0 to 1 in `nfe` Euler steps

    `start: zero`, MIP's protocol, integrates from the mean of the noise: deterministic. `gaussian` draws from the learnt distribution.
    """

    @dataclasses.dataclass(frozen=True)
    class Options:
        loss_scale: float = 0.1
        nfe: int = 9
        start: str = "zero"

        def __post_init__(self):
            check_choices({"start": self.start}, {"start": ("zero", "gaussian")})
            if self.nfe < 1:
                raise ValueError(f"nfe={self.nfe}: flow matching acts with at least one Euler step")

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        self.nfe = self.options.nfe

    def loss(self, cond: Tensor, actions: Tensor) -> Tensor:
        t = uniform_times(len(actions), like=actions)
        x, velocity = interpolate(torch.randn_like(actions), actions, t)
        return self.options.loss_scale * squared_error(self.generator(cond, x, t) - velocity).mean()

    def sample(self, cond: Tensor, batch: int) -> Tensor:
        x = self.zeros(batch)
        if self.options.start == "gaussian":
            x = torch.randn_like(x)
        return euler(lambda x, t: self.generator(cond, x, t), x, self.nfe)
