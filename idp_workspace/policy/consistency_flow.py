"""FlowPolicy: consistency flow matching, one step."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import torch
from torch import Tensor

from idp_workspace.options import AtLeast, Between, Options
from idp_workspace.paths import broadcast, interpolate, uniform_times
from idp_workspace.policy.base import GeneratorPolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConsistencyFlowOptions(Options):
    """Options of FlowPolicy."""

    eps: Annotated[float, Between(0, 1)] = 0.01
    """First time."""
    delta: Annotated[float, Between(0, 1, open=True)] = 0.01
    """Distance between the two times that are compared."""
    segments: Annotated[int, AtLeast(1)] = 2
    alpha: float = 1e-5
    """Weight of the difference of velocities."""
    time_scale: float = 1.0
    """The network receives time_scale * t; the publication's network takes 99 t."""
    nfe: int = 1


class ConsistencyFlowPolicy(GeneratorPolicy):
    """A velocity whose straight continuation ends at the same point from anywhere on a path.

        x_t = (1 - t) z + t a*,    t ~ U(eps, 1),    r = min(t + delta, 1),  x_r on the same path
        F_t = x_t + (e - t) f(o, x_t, t),    F_r = x_r + (e - r) f(o, x_r, r),    e: end of the segment that holds t
        L = mean |F_t - F_r|^2 + alpha mean |f_t - f_r|^2        the second term where e - t > 1.01 delta
        act: x = z + f(o, z, eps),  z ~ N(0, I)

    Both sides are trained, without a stopped gradient or a slow copy. A constant network is no solution, because e - t
    vanishes at the end of a segment, where F is the path itself. `nfe` > 1 takes that many Euler steps from eps.
    """

    Options = ConsistencyFlowOptions
    options: ConsistencyFlowOptions

    def velocity(self, cond: Tensor, x: Tensor, t: float | Tensor) -> Tensor:
        return self.generator(cond, x, self.options.time_scale * t)

    def segment_end(self, t: Tensor) -> Tensor:
        """Return e (B,): the first of 1/K, 2/K, .., 1 that is not before t."""
        k = self.options.segments
        return (torch.ceil(t * k).clamp(min=1) / k).to(t)

    def loss(self, cond: Tensor, actions: Tensor) -> Tensor:
        o = self.options
        noise = torch.randn_like(actions)
        t = uniform_times(len(actions), o.eps, 1.0, like=actions)
        r = (t + o.delta).clamp(max=1.0)
        end = self.segment_end(t)
        (x_t, _), (x_r, _) = interpolate(noise, actions, t), interpolate(noise, actions, r)
        v_t, v_r = self.velocity(cond, x_t, t), self.velocity(cond, x_r, r)
        f_t, f_r = x_t + broadcast(end - t, x_t) * v_t, x_r + broadcast(end - r, x_r) * v_r
        inside = broadcast((end - t > 1.01 * o.delta).to(actions), actions)
        return (f_t - f_r).square().mean() + o.alpha * (inside * (v_t - v_r).square()).mean()

    def check_nfe(self, nfe: int) -> None:
        if nfe < 1:
            raise ValueError(f"nfe={nfe}: FlowPolicy acts with at least one step")

    def sample(self, cond: Tensor, batch: int) -> Tensor:
        o = self.options
        x = torch.randn_like(self.zeros(batch))
        for k in range(self.nfe):
            # Times run over [eps, 1] but the steps add up to 1, as published: at eps the path is taken to be the noise.
            x = x + self.velocity(cond, x, o.eps + (1 - o.eps) * k / self.nfe) / self.nfe
        return x
