"""TSD, MIP's two-step denoising: both stages see noise in training."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from idp_workspace.padding import kept
from idp_workspace.paths import raised, squared_error
from idp_workspace.policy.idp_options import PAPER_PROPOSAL, paper_lambda
from idp_workspace.policy.mip import MIPOptions, MIPPolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class TSDOptions(MIPOptions):
    """Options of TSD: those of MIP."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.proposal != PAPER_PROPOSAL:
            raise ValueError(
                "proposal: TSD trains its first stage from one noise sample; IDP's proposal does not apply"
            )


class TSDPolicy(MIPPolicy):
    """A denoiser of two steps, from pure noise z to the noisy expert a~, and from there to the expert.

        a~ = a* + (1 - t*) eps
        L = scale mean [ N((f(o, z, 0) - a~) / t*) + N((f(o, a~, t*) - a*) / (1 - t*)) ],    z, eps ~ N(0, I)

    It acts as MIP does, f(o, f(o, 0, 0), t*): from the mean of the noise, without drawing any.
    """

    Options = TSDOptions

    def loss(self, cond: Tensor, actions: Tensor, mask: Tensor | None = None) -> Tensor:
        o = self.options
        noisy = actions + (1 - o.t_star) * torch.randn_like(actions)
        first = self.generator(cond, torch.randn_like(actions), 0.0)
        second = self.generator(cond, noisy, o.t_star)
        share = (
            self.current_lambda() / paper_lambda(o.t_star) ** o.energy_power
        )  # 1 unless lambda_prox is set or ramped
        first = raised(squared_error((first - noisy) / o.t_star), o.energy_power)
        second = raised(squared_error((second - actions) / (1 - o.t_star)), o.energy_power)
        return o.loss_scale * kept(first + share * second, mask).mean()
