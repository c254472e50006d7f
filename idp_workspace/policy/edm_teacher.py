"""EDM denoiser: the teacher of Consistency Policy."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from idp_workspace import edm
from idp_workspace.options import check_choices
from idp_workspace.policy.base import GeneratorPolicy


@dataclasses.dataclass(frozen=True)
class EDMOptions:
    """What the teacher and its students share; the defaults are Consistency Policy's."""

    sigma_min: float = edm.SIGMA_MIN
    sigma_max: float = edm.SIGMA_MAX
    sigma_data: float = edm.SIGMA_DATA
    rho: float = edm.RHO
    bins: int = edm.BINS
    time_scale: float = 250.0  # the network is told time_scale * ln sigma
    huber: str = "standard"  # standard | squared, see edm.pseudo_huber

    def __post_init__(self):
        check_choices({"huber": self.huber}, {"huber": ("standard", "squared")})
        if not 0 < self.sigma_min < self.sigma_max or self.sigma_data <= 0 or self.rho <= 0 or self.bins < 1:
            raise ValueError(
                f"0 < sigma_min < sigma_max, sigma_data > 0, rho > 0 and bins >= 1 are needed, got sigma_min={self.sigma_min}, "
                f"sigma_max={self.sigma_max}, sigma_data={self.sigma_data}, rho={self.rho}, bins={self.bins}"
            )


class EDMPolicy(GeneratorPolicy):
    """The preconditioned network g(x, sigma, stop), in one place for teacher and students.

        g(x, sigma, stop) = c_skip(sigma) x + c_out(sigma) F(c_in(sigma) x; start ln sigma, end ln stop)

    The network's interval goes from the noise of x down to `stop`, the noise of what is asked for; a denoiser asks for sigma_min.
    """

    Options = EDMOptions

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        o = self.options
        self.register_buffer("sigmas", edm.edges(o.bins, o.sigma_min, o.sigma_max, o.rho), persistent=False)

    def precondition(self, cond: Tensor, x: Tensor, sigma: Tensor, stop: Tensor | float) -> Tensor:
        """g, (B, H, D), at noise levels sigma (B,)."""
        o = self.options
        time = lambda level: o.time_scale * torch.as_tensor(level, dtype=x.dtype, device=x.device).log()
        return edm.precondition(
            lambda scaled: self.generator(cond, scaled, time(stop), s=time(sigma)), x, sigma, o.sigma_min, o.sigma_data
        )

    def denoise(self, cond: Tensor, x: Tensor, sigma: Tensor) -> Tensor:
        """D(x, sigma) = g(x, sigma, sigma_min)."""
        return self.precondition(cond, x, sigma, self.options.sigma_min)

    def weighted_huber(self, error: Tensor, sigma: Tensor) -> Tensor:
        """mean of (sigma^2 + sd^2) / (sigma sd)^2 * huber(error)."""
        return (
            edm.over(edm.loss_weight(sigma, self.options.sigma_data), error)
            * edm.pseudo_huber(error, self.options.huber)
        ).mean()


class EDMTeacherPolicy(EDMPolicy):
    """Denoiser of all noise levels; acts by following its ODE with Heun's method.

        L = weight(sigma) huber(D(a + sigma eps, sigma) - a),    ln sigma ~ N(-1.2, 1.2^2)

    `nfe` network calls make (nfe + 1) / 2 steps; null is one step a bin. The chunk is clipped to [-1, 1], the range of the
    normalised actions.
    """

    @dataclasses.dataclass(frozen=True)
    class Options(EDMOptions):
        nfe: int | None = None

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        self.nfe = 2 * self.options.bins - 1 if self.options.nfe is None else self.options.nfe
        steps_of(self.nfe)

    def loss(self, cond: Tensor, actions: Tensor) -> Tensor:
        o = self.options
        sigma = edm.log_normal(len(actions), actions, o.sigma_min, o.sigma_max)
        noisy = actions + edm.over(sigma, actions) * torch.randn_like(actions)
        return self.weighted_huber(self.denoise(cond, noisy, sigma) - actions, sigma)

    def sample(self, cond: Tensor, batch: int) -> Tensor:
        o = self.options
        levels = edm.edges(steps_of(self.nfe), o.sigma_min, o.sigma_max, o.rho).to(self.sigmas)
        noise = o.sigma_max * torch.randn_like(self.zeros(batch))
        return edm.heun(lambda x, sigma: self.denoise(cond, x, sigma), noise, levels, o.sigma_min).clamp(-1, 1)


def steps_of(nfe: int) -> int:
    """Heun's method makes two calls a step, but one in the last."""
    if nfe < 1 or nfe % 2 == 0:
        raise ValueError(
            f"nfe={nfe}: Heun's method makes an odd number of network calls, two a step and one in the last"
        )
    return (nfe + 1) // 2
