"""FlowPolicy: consistency flow matching, one step."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from idp_workspace.flows import broadcast, interpolate, uniform_times
from idp_workspace.policy.base import GeneratorPolicy


class ConsistencyFlowPolicy(GeneratorPolicy):
    """A velocity whose straight continuation ends at the same point from anywhere on a path:

        x_t = (1 - t) z + t a*,    t ~ U(eps, 1),    r = min(t + delta, 1),  x_r on the same path
        F_t = x_t + (e - t) f(o, x_t, t),    F_r = x_r + (e - r) f(o, x_r, r),    e: end of the segment of [0, 1] that holds t
        L = mean |F_t - F_r|^2 + alpha mean |f_t - f_r|^2        the second where e - t > 1.01 delta
        act: x = z + f(o, z, eps),  z ~ N(0, I)

    Both sides are trained: there is no stopped gradient and no slow copy. What keeps the network from any constant is that
    e - t vanishes at the end of a segment, where F is the path itself. `nfe` > 1 takes that many Euler steps from eps.
    """

    @dataclasses.dataclass(frozen=True)
    class Options:
        eps: float = 0.01
        delta: float = 0.01
        segments: int = 2
        alpha: float = 1e-5
        time_scale: float = 1.0  # time as the network sees it; the publication's network takes 99 t
        nfe: int = 1

        def __post_init__(self):
            if not (0 <= self.eps < 1 and 0 < self.delta < 1):
                raise ValueError(f"eps={self.eps} must lie in [0, 1) and delta={self.delta} in (0, 1)")
            if self.segments < 1 or self.nfe < 1:
                raise ValueError(f"segments={self.segments} and nfe={self.nfe} must be at least 1")

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        self.nfe = self.options.nfe

    def velocity(self, cond: Tensor, x: Tensor, t: float | Tensor) -> Tensor:
        return self.generator(cond, x, self.options.time_scale * t)

    def segment_end(self, t: Tensor) -> Tensor:
        """e (B,): the first of 1/K, 2/K, .., 1 that is not before t."""
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

    def sample(self, cond: Tensor, batch: int) -> Tensor:
        o = self.options
        if self.nfe < 1:
            raise ValueError(f"nfe={self.nfe}: at least one step is needed to act")
        x = torch.randn_like(self.zeros(batch))
        for k in range(self.nfe):
            # Times run over [eps, 1] but the steps add up to 1, as published: at eps the path is taken to be the noise.
            x = x + self.velocity(cond, x, o.eps + (1 - o.eps) * k / self.nfe) / self.nfe
        return x
