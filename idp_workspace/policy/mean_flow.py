"""MeanFlow for policies: as in MP1, and as in MIP's code base."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from idp_workspace.options import Above, AtLeast, Options
from idp_workspace.paths import (
    adaptive_weight,
    broadcast,
    flow_steps,
    generator_jvp,
    interpolate,
    logit_normal_times,
    squared_error,
    uniform_times,
)
from idp_workspace.policy.base import GeneratorPolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanFlowOptions(Options):
    """Options of MeanFlow, with the values of MP1 as defaults."""

    variant: Literal["mp1", "mf"] = "mp1"
    """`mp1`: MP1's objective. `mf`: the one that MIP's code base has, see `MeanFlowPolicy`."""
    nfe: int = 1
    """Steps of the sampler; `mp1`: 1."""
    time_mean: float = -0.4
    """Mean of the logit of MeanFlow's times."""
    time_std: Annotated[float, Above(0)] = 1.0
    flow_ratio: Annotated[float, AtLeast(0)] = 0.5
    """Share of the batch with s = t. MeanFlow for images: 0.75."""
    guidance: float = 2.0
    """w; 1 is the velocity itself."""
    adaptive_p: float = 0.5
    """MeanFlow for images: 1."""
    dispersive: Annotated[float, AtLeast(0)] = 0.5
    """Weight of the dispersive term; 0 is MP1 without it ("MP")."""
    time_scale: float = 1.0
    """The network receives both times multiplied by this; see `average_velocity`."""
    loss_scale: float = 0.1
    """Of `mf`, as are the next two."""
    interval_from: Annotated[float, AtLeast(0)] = 0.2
    """Share of the training up to which intervals are empty; they grow to full length at `interval_until`."""
    interval_until: float = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.flow_ratio > 1:
            raise ValueError(f"flow_ratio={self.flow_ratio} must be in [0, 1]")
        if not self.interval_from < self.interval_until:
            raise ValueError(
                f"interval_until={self.interval_until} must be larger than interval_from={self.interval_from}"
            )


class MeanFlowPolicy(GeneratorPolicy):
    """The generator is the average velocity u(x, s, t) of the flow over the interval from s to t.

        (t - s) u(x_s, s, t) = int_s^t v dt'
        u = v + (t - s) du/ds,   du/ds = (du/dx) v + (du/ds)             the same, differentiated along the flow
        x_s = (1 - s) eps + s a,   v = a - eps,   v~ = w v + (1 - w) sg u(x_s, s, s)
        target = sg[v~ + (t - s) JVP(u; (x_s, s, t), (v~, 1, 0))]
        L = mean_i  sg[(d2_i + c)^-p] d2_i,   d2_i = mean over the chunk of (u - target)^2

    Times are this project's: noise at 0, data at 1. MeanFlow's run the other way: t_MF = 1 - s, r_MF = 1 - t, and its
    velocity has the opposite sign. Two logit-normal draws are the ends of the interval; where s = t the target is v~.

    `dispersive` > 0 adds MP1's term that spreads the features z of the backbone's blocks, all but the last, over the
    batch: dispersive * sum_blocks log mean_ij exp(-|z_i - z_j|^2 / max_ij |z_i - z_j|^2). Acts with one call, eps +
    u(eps, 0, 1).

    variant='mf' is MIP's objective for the flow map X_{s,t}(x) = x + (t - s) u(x, s, t); both terms have the same eps:

        L = scale mean [N(u(x_r, r, r) - v) + N(dX_{s,t}/ds (x_s) + sg[(dX_{s,t}/dx)(x_s) v])],   N(r) = sum_d r_d^2
        r ~ U(0, 1);   s <= t from two uniform draws, then s <- max(s, t - delta)

    delta, the largest length of an interval, is 0 up to `interval_from` of the training and 1 from `interval_until` on.
    Acts from zero in `nfe` steps x <- x + (t - s) u(x, s, t); MIP reports 9, 3 and 1.
    """

    Options = MeanFlowOptions
    two_times = True
    options: MeanFlowOptions

    def draw_interval(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the start s and the end t >= s (B,); the first flow_ratio of the batch has t = s."""
        o = self.options
        first, second = (1 - logit_normal_times(len(actions), o.time_mean, o.time_std, like=actions) for _ in range(2))
        s, t = torch.minimum(first, second), torch.maximum(first, second)
        equal = torch.arange(len(s), device=s.device) < round(o.flow_ratio * len(s))
        return s, torch.where(equal, s, t)

    def average_velocity(self, cond: Tensor, x: Tensor, s: float | Tensor, t: float | Tensor) -> Tensor:
        """Return u(x, s, t). The loss differentiates in s: a network with fast time features needs slower times."""
        c = self.options.time_scale
        return self.generator(cond, x, c * t, s=c * s)

    @torch.no_grad()
    def target(self, cond: Tensor, x: Tensor, velocity: Tensor, s: Tensor, t: Tensor) -> Tensor:
        w, c = self.options.guidance, self.options.time_scale
        if w != 1:
            velocity = w * velocity + (1 - w) * self.average_velocity(cond, x, s, s)
        _, slope = generator_jvp(
            self.generator, cond, (x, c * s, c * t), (velocity, torch.full_like(s, c), torch.zeros_like(t))
        )
        return velocity + broadcast(t - s, x) * slope

    def loss(self, cond: Tensor, actions: Tensor) -> Tensor:
        return self.mp1_loss(cond, actions) if self.options.variant == "mp1" else self.mf_loss(cond, actions)

    def mp1_loss(self, cond: Tensor, actions: Tensor) -> Tensor:
        o = self.options
        s, t = self.draw_interval(actions)
        x, velocity = interpolate(torch.randn_like(actions), actions, s)
        # Separate from the JVP: features of the blocks cannot leave forward-mode differentiation.
        target = self.target(cond, x, velocity, s, t)
        with block_features(self.model, record=o.dispersive > 0) as features:
            u = self.average_velocity(cond, x, s, t)
        error = (u - target).square().mean(dim=(1, 2))
        loss = (adaptive_weight(error, o.adaptive_p) * error).mean()
        return loss + o.dispersive * sum(dispersion(z) for z in features)

    def longest_interval(self) -> float:
        """Return delta of `mf` at the present progress of the training; 1 if the training loop does not report it."""
        o = self.options
        if self.progress is None:
            return 1.0
        return min(1.0, max(0.0, (self.progress - o.interval_from) / (o.interval_until - o.interval_from)))

    def mf_loss(self, cond: Tensor, actions: Tensor) -> Tensor:
        c, noise = self.options.time_scale, torch.randn_like(actions)
        r = uniform_times(len(actions), like=actions)
        x, velocity = interpolate(noise, actions, r)
        flow = squared_error(self.average_velocity(cond, x, r, r) - velocity)

        first, second = (uniform_times(len(actions), like=actions) for _ in range(2))
        t = torch.maximum(first, second)
        s = torch.maximum(torch.minimum(first, second), t - self.longest_interval())
        x, velocity = interpolate(noise, actions, s)
        point, still = (x, c * s, c * t), torch.zeros_like(s)
        u, u_s = generator_jvp(self.generator, cond, point, (torch.zeros_like(x), torch.full_like(s, c), still))
        with torch.no_grad():
            _, u_x = generator_jvp(self.generator, cond, point, (velocity, still, still))
        length = broadcast(t - s, x)
        residual = (length * u_s - u) + (velocity + length * u_x)  # dX/ds + (dX/dx) v
        return self.options.loss_scale * (flow + squared_error(residual)).mean()

    def check_nfe(self, nfe: int) -> None:
        if nfe < 1 or (nfe > 1 and self.options.variant == "mp1"):
            calls = "one network call" if self.options.variant == "mp1" else "at least one step"
            raise ValueError(f"nfe={nfe}: MeanFlowPolicy with variant={self.options.variant} acts with {calls}")

    def sample(self, cond: Tensor, batch: int) -> Tensor:
        x = self.zeros(batch)
        if self.options.variant == "mp1":
            x = torch.randn_like(x)
        return flow_steps(lambda x, s, t: self.average_velocity(cond, x, s, t), x, self.nfe)


def dispersion(z: Tensor) -> Tensor:
    """log mean_ij exp(-d_ij / max d), d_ij = |z_i - z_j|^2, of features (B, ...): 0 if equal, lower if spread out."""
    z = z.flatten(1)
    norms = z.square().sum(1)
    distance = (norms[:, None] + norms - 2 * z @ z.T).clamp(min=0)
    return torch.exp(-distance / distance.max().clamp(min=1e-12)).mean().log()


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks whose outputs are features: the levels of a UNet on the way down, else the layers."""
    found: list[nn.Module] = []
    stack: Any = getattr(model, "decoder", None) or getattr(model, "encoder", None)
    net: Any = getattr(model, "net", None)
    if hasattr(model, "down_modules"):
        levels: Any = model.down_modules
        found = [level[1] for level in levels]  # the second residual block, before the resolution is halved
    elif hasattr(stack, "layers"):
        found = list(stack.layers)
    elif isinstance(net, nn.Sequential):
        found = [layer for layer in net if isinstance(layer, nn.Sequential)]
    if not found:
        raise ValueError(
            f"the dispersive term does not know the blocks of {type(model).__name__}: set policy.dispersive=0"
        )
    return found


@contextlib.contextmanager
def block_features(model: nn.Module, record: bool = True) -> Iterator[list[Tensor]]:
    """Yield a list that collects the outputs of all blocks but the last; it stays empty without `record`."""
    features: list[Tensor] = []
    watched = blocks(model)[:-1] if record else []
    handles = [block.register_forward_hook(lambda module, args, out: features.append(out)) for block in watched]
    try:
        yield features
    finally:
        for handle in handles:
            handle.remove()
