"""TSD, MIP's two-step denoising: both stages see noise in training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from idp_workspace.flows import squared_error
from idp_workspace.policy.idp import paper_lambda
from idp_workspace.policy.mip import MIPPolicy
from idp_workspace.proposal import Proposal


class TSDPolicy(MIPPolicy):
    """A denoiser of two steps, the first from pure noise z to the noisy expert a~, the second from there to the expert:

        a~ = a* + (1 - t*) eps
        L = scale mean [ N((f(o, z, 0) - a~) / t*) + N((f(o, a~, t*) - a*) / (1 - t*)) ],    z, eps ~ N(0, I)

    It acts as MIP does, f(o, f(o, 0, 0), t*): from the mean of the noise and without drawing any.
    """

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        if self.options.proposal != Proposal():
            raise ValueError(
                "proposal: TSD's first stage is always trained from one noise sample; the switches of IDP's proposal have no meaning here"
            )

    def loss(self, cond: Tensor, actions: Tensor) -> Tensor:
        o = self.options
        noisy = actions + (1 - o.t_star) * torch.randn_like(actions)
        first = self.generator(cond, torch.randn_like(actions), 0.0)
        second = self.generator(cond, noisy, o.t_star)
        share = self.current_lambda() / paper_lambda(o.t_star)  # 1 unless lambda_prox is set or ramped
        loss = squared_error((first - noisy) / o.t_star) + share * squared_error((second - actions) / (1 - o.t_star))
        return o.loss_scale * loss.mean()
