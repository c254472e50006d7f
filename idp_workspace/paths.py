"""Functions of objectives with a time: the path from noise to data, times, errors, steps along a flow.

t = 0 is noise and t = 1 is data; an interval goes from its start s to its end t. Chunks are (B, H, D), times (B,).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from idp_workspace.generator import Generator


# ------------------------------------------------------------------ the path
def broadcast(t: Tensor, x: Tensor) -> Tensor:
    """Return times (B,) in a shape that multiplies x (B, ...): (B, 1, ..., 1)."""
    return t.view(-1, *[1] * (x.ndim - 1))


def interpolate(noise: Tensor, action: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Return x_t = (1 - t) noise + t action and its velocity, action - noise."""
    t = broadcast(t, action)
    return (1 - t) * noise + t * action, action - noise


# ------------------------------------------------------------------ times
def uniform_times(n: int, low: float = 0.0, high: float = 1.0, *, like: Tensor) -> Tensor:
    """Draw (n,) uniform on [low, high), on the device and in the type of `like`."""
    return low + (high - low) * torch.rand(n, device=like.device, dtype=like.dtype)


def logit_normal_times(n: int, mean: float, std: float, *, like: Tensor) -> Tensor:
    """Draw (n,) with logit(t) ~ N(mean, std^2), on the device and in the type of `like`."""
    return torch.sigmoid(mean + std * torch.randn(n, device=like.device, dtype=like.dtype))


# ------------------------------------------------------------------ errors
def squared_error(residual: Tensor) -> Tensor:
    """N(r) = sum_d r_d^2 at each chunk step: (B, H). Losses under MIP's protocol take its mean over B and H."""
    return residual.square().sum(-1)


def raised(energy: Tensor, power: float) -> Tensor:
    """energy^power; the constant keeps the gradient of a root finite where the energy is zero."""
    return energy if power == 1 else (energy + 1e-12) ** power


def adaptive_weight(delta2: Tensor, p: float, c: float = 1e-3) -> Tensor:
    """w = (delta2 + c)^-p without gradient, for a loss w delta2: p = 1 is nearly a log, p = 0.5 nearly a root."""
    return (delta2.detach() + c) ** -p


# ------------------------------------------------------------------ steps
def flow_steps(
    average_velocity: Callable[[Tensor, float, float], Tensor], x: Tensor, steps: int, t0: float = 0.0, t1: float = 1.0
) -> Tensor:
    """x <- x + (t - s) u(x, s, t) over `steps` equal intervals [s, t] of [t0, t1], with their average velocity u."""
    grid = [t0 + (t1 - t0) * k / steps for k in range(steps + 1)]
    for s, t in itertools.pairwise(grid):
        x = x + (t - s) * average_velocity(x, s, t)
    return x


def euler(velocity: Callable[[Tensor, float], Tensor], x: Tensor, steps: int) -> Tensor:
    """x <- x + (t_{k+1} - t_k) v(x, t_k): Euler's method from t = 0 to t = 1."""
    return flow_steps(lambda x, s, t: velocity(x, s), x, steps)


# ------------------------------------------------------------------ derivatives
def generator_jvp(
    generator: Generator,
    cond: Tensor,
    point: tuple[Tensor, Tensor, Tensor],
    direction: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Return u = f(o, x, s, t) and du = (df/dx) dx + (df/ds) ds + (df/dt) dt along a direction (dx, ds, dt).

    One forward pass computes both, so they share dropout masks. Gradients of both reach the parameters; detach du where
    it is a target.
    """
    return torch.func.jvp(lambda x, s, t: generator(cond, x, t, s=s), point, direction)  # type: ignore[return-value]
