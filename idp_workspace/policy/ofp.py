"""One-step flow policy with self-consistency and self-guidance (OFP)."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Unpack

import torch
from torch import Tensor

from idp_workspace.generator import Generator
from idp_workspace.options import Between, Options
from idp_workspace.paths import broadcast, flow_steps, interpolate, uniform_times
from idp_workspace.policy.base import GeneratorPolicy
from idp_workspace.target import TargetNetwork
from idp_workspace.upstream_arguments import UpstreamArguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class OFPOptions(Options):
    """Options of OFP."""

    lambda_consistency: float = 1.0
    lambda_guidance: float = 0.01
    """Small: g is taken at the network's own chunk and can amplify itself."""
    p_drop: Annotated[float, Between(0, 1)] = 0.1
    """Share of samples without an observation."""
    target_rate: Annotated[float, Between(0, 1)] = 0.999
    """Rate of the moving average u-."""
    min_interval: Annotated[float, Between(0, 1, open=True)] = 0.05
    """Least t - s in the consistency term, which divides by it."""
    full_ratio: Annotated[float, Between(0, 1)] = 0.5
    """Share of the consistency term's intervals that end at t = 1, where the policy jumps to."""
    time_scale: float = 1.0
    """The network receives both times multiplied by this."""
    warm_start: Annotated[float, Between(0, 1)] = 0.0
    """0 always starts from noise; the published best is 0.15."""


class OFPPolicy(GeneratorPolicy):
    """The generator is the average velocity u(z, s, t | o) of the flow from s to t, and teaches itself.

        z_s = (1 - s) eps + s a
        L = |u(z_s, s, s) - (a - eps)|^2
          + lambda_consistency |u(z_s, s, t) - sg (z^_t - z_s) / (t - s)|^2
          + lambda_guidance    |y - sg[y + g]|^2                           means over batch and chunk

        z^_t = z_m + (t - m) u-(z_m, m, t),   m ~ U[s, s + rho (t - s)]    u-: moving average of u
        y = u(z_s, s, 1),   a^ = z_s + (1 - s) y,   z~ = (1 - t') eps' + t' a^
        g = u-(z~, t', t' | o) - u-(z~, t', t' | no observation)

    rho falls from 1 to 0 over training: the first targets are points of the data's path, the last ones the network's
    own jumps. `no observation` is a condition of zeros, given to a share p_drop of the samples in the first two
    terms. The publication leaves both lambdas, p_drop, the average's rate, the times and the form of rho open.

    Acts with one call, eps + u(eps, 0, 1). With `warm_start` = t_w > 0 and a previous chunk it starts from
    z = (1 - t_w) eps + t_w (previous chunk shifted by the executed steps), and adds (1 - t_w) u(z, t_w, 1).
    """

    Options = OFPOptions
    two_times = True
    options: OFPOptions
    updates: Tensor

    def __init__(self, options: OFPOptions | None = None, **arguments: Unpack[UpstreamArguments]) -> None:
        super().__init__(options, **arguments)
        self.target = TargetNetwork(self)
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))  # of the average
        self.warm_start = self.options.warm_start
        self.previous: Tensor | None = None  # normalised chunk of the last prediction

    def velocity(self, generator: Generator, cond: Tensor, z: Tensor, s: float | Tensor, t: float | Tensor) -> Tensor:
        """Return u(z, s, t | cond) of the network or of its average."""
        c = self.options.time_scale
        return generator(cond, z, c * t, s=c * s)

    # ------------------------------------------------------------------ training
    def update_target(self) -> None:
        """Update the average once per loss; faster at first, so that it forgets the untrained network."""
        n = int(self.updates)
        self.target.update(min(self.options.target_rate, (1 + n) / (10 + n)))
        self.updates += 1

    def loss_of(self, obs: Tensor | dict[str, Tensor], actions: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.update_target()
        with torch.no_grad():
            slow_cond = self.target.generator.encode(obs)
        return self.terms(self.generator.encode(obs), slow_cond, actions)

    def terms(self, cond: Tensor, slow_cond: Tensor, actions: Tensor) -> Tensor:
        """Return the weighted sum of the terms, given the observation as the network and as its average see it."""
        o = self.options
        noise = torch.randn_like(actions)
        keep = broadcast((torch.rand(len(actions), device=actions.device) >= o.p_drop).to(cond), cond)
        loss = self.flow_term(keep * cond, actions, noise)
        if o.lambda_consistency:
            loss = loss + o.lambda_consistency * self.consistency_term(keep * cond, keep * slow_cond, actions, noise)
        if o.lambda_guidance:
            loss = loss + o.lambda_guidance * self.guidance_term(cond, slow_cond, actions, noise)
        return loss

    def flow_term(self, cond: Tensor, actions: Tensor, noise: Tensor) -> Tensor:
        s = uniform_times(len(actions), like=actions)
        z, velocity = interpolate(noise, actions, s)
        return (self.velocity(self.generator, cond, z, s, s) - velocity).square().mean()

    def consistency_term(self, cond: Tensor, slow_cond: Tensor, actions: Tensor, noise: Tensor) -> Tensor:
        o = self.options
        s = uniform_times(len(actions), 0.0, 1 - o.min_interval, like=actions)
        t = s + o.min_interval + (1 - s - o.min_interval) * torch.rand_like(s)
        t = torch.where(torch.rand_like(s) < o.full_ratio, torch.ones_like(t), t)
        m = s + (1 - (self.progress or 0.0)) * (t - s) * torch.rand_like(s)
        z_s, _ = interpolate(noise, actions, s)
        with torch.no_grad():
            z_m, _ = interpolate(noise, actions, m)
            z_t = z_m + broadcast(t - m, z_m) * self.velocity(self.target.generator, slow_cond, z_m, m, t)
            velocity = (z_t - z_s) / broadcast(t - s, z_s)
        return (self.velocity(self.generator, cond, z_s, s, t) - velocity).square().mean()

    def guidance_term(self, cond: Tensor, slow_cond: Tensor, actions: Tensor, noise: Tensor) -> Tensor:
        s = uniform_times(len(actions), like=actions)
        z, _ = interpolate(noise, actions, s)
        y = self.velocity(self.generator, cond, z, s, torch.ones_like(s))
        with torch.no_grad():
            again = uniform_times(len(actions), like=actions)
            z, _ = interpolate(torch.randn_like(actions), z + broadcast(1 - s, z) * y, again)
            slow = self.target.generator
            conditional = self.velocity(slow, slow_cond, z, again, again)
            unconditional = self.velocity(slow, torch.zeros_like(slow_cond), z, again, again)
            target = y + (conditional - unconditional)
        return (y - target).square().mean()

    # ------------------------------------------------------------------ acting
    def sample(self, cond: Tensor, batch: int) -> Tensor:
        z, start = torch.randn_like(self.zeros(batch)), 0.0
        if self.warm_start > 0 and self.previous is not None and self.previous.shape == z.shape:
            start = self.warm_start
            z = (1 - start) * z + start * moved_up(self.previous, self.n_action_steps)
        action = flow_steps(lambda z, s, t: self.velocity(self.generator, cond, z, s, t), z, 1, t0=start)
        self.previous = action.clone() if self.warm_start > 0 else None
        return action

    def reset(self) -> None:
        """Forget the previous chunk at the start of an episode."""
        self.previous = None


def moved_up(chunk: Tensor, steps: int) -> Tensor:
    """Return chunk (B, H, D) without its first `steps` steps, the last one repeated to the full length."""
    index = torch.arange(steps, steps + chunk.shape[1], device=chunk.device).clamp(max=chunk.shape[1] - 1)
    return chunk[:, index]
