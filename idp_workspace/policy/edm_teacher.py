"""EDM denoiser: the teacher of Consistency Policy."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal, Unpack

import torch
from torch import Tensor

from idp_workspace import edm
from idp_workspace.options import Above, AtLeast, Options
from idp_workspace.policy.base import GeneratorPolicy
from idp_workspace.upstream_arguments import UpstreamArguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class EDMOptions(Options):
    """Options of the teacher and its students; the defaults are Consistency Policy's."""

    sigma_min: Annotated[float, Above(0)] = edm.SIGMA_MIN
    sigma_max: Annotated[float, Above(0)] = edm.SIGMA_MAX
    sigma_data: Annotated[float, Above(0)] = edm.SIGMA_DATA
    rho: Annotated[float, Above(0)] = edm.RHO
    bins: Annotated[int, AtLeast(1)] = edm.BINS
    time_scale: float = 250.0
    """The network receives time_scale * ln sigma."""
    huber: Literal["standard", "squared"] = "standard"
    """See `edm.pseudo_huber`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sigma_min >= self.sigma_max:
            raise ValueError(f"sigma_min={self.sigma_min} must be below sigma_max={self.sigma_max}")


class EDMPolicy(GeneratorPolicy):
    """The preconditioned network g(x, sigma, stop) of teacher and students.

        g(x, sigma, stop) = c_skip(sigma) x + c_out(sigma) F(c_in(sigma) x; start ln sigma, end ln stop)

    The network's interval goes from the noise of x down to `stop`, the noise of the result; for a denoiser, sigma_min.
    """

    Options = EDMOptions
    two_times = True
    options: EDMOptions
    sigmas: Tensor

    def __init__(self, options: EDMOptions | None = None, **arguments: Unpack[UpstreamArguments]) -> None:
        super().__init__(options, **arguments)
        o = self.options
        self.register_buffer("sigmas", edm.edges(o.bins, o.sigma_min, o.sigma_max, o.rho), persistent=False)

    def precondition(self, cond: Tensor, x: Tensor, sigma: Tensor, stop: Tensor | float) -> Tensor:
        """Return g (B, H, D) at noise levels sigma (B,)."""
        o = self.options

        def time(level: Tensor | float) -> Tensor:
            return o.time_scale * torch.as_tensor(level, dtype=x.dtype, device=x.device).log()

        return edm.precondition(
            lambda scaled: self.generator(cond, scaled, time(stop), s=time(sigma)), x, sigma, o.sigma_min, o.sigma_data
        )

    def denoise(self, cond: Tensor, x: Tensor, sigma: Tensor) -> Tensor:
        """D(x, sigma) = g(x, sigma, sigma_min)."""
        return self.precondition(cond, x, sigma, self.options.sigma_min)

    def weighted_huber(self, error: Tensor, sigma: Tensor) -> Tensor:
        """Return the mean of (sigma^2 + sd^2) / (sigma sd)^2 * huber(error)."""
        weight = edm.over(edm.loss_weight(sigma, self.options.sigma_data), error)
        return (weight * edm.pseudo_huber(error, self.options.huber)).mean()


@dataclasses.dataclass(frozen=True, kw_only=True)
class EDMTeacherOptions(EDMOptions):
    """Options of the teacher."""

    nfe: int | None = None
    """Network calls; null is one Heun step per bin."""


class EDMTeacherPolicy(EDMPolicy):
    """Denoiser of all noise levels; acts by following its ODE with Heun's method.

        L = weight(sigma) huber(D(a + sigma eps, sigma) - a),    ln sigma ~ N(-1.2, 1.2^2)

    `nfe` network calls make (nfe + 1) / 2 steps. The chunk is clipped to [-1, 1], the range of normalised actions.
    """

    Options = EDMTeacherOptions
    options: EDMTeacherOptions

    def default_nfe(self) -> int:
        return 2 * self.options.bins - 1 if self.options.nfe is None else self.options.nfe

    def check_nfe(self, nfe: int) -> None:
        steps_of(nfe)

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
    """Return the number of Heun steps: two calls per step, and one in the last."""
    if nfe < 1 or nfe % 2 == 0:
        raise ValueError(f"nfe={nfe}: Heun's method makes an odd number of network calls, 2 per step and 1 in the last")
    return (nfe + 1) // 2
