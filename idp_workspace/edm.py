"""EDM: denoisers of x = a + sigma eps, their noise levels, and the ODE that they define. Pure functions.

Constants are those of Consistency Policy: sigma in [0.02, 80], rho = 7, 80 bins, sigma_data = 0.5. A sigma is a
tensor (B,) or (), samples are (B, H, D).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

SIGMA_MIN, SIGMA_MAX, SIGMA_DATA, RHO, BINS = 0.02, 80.0, 0.5, 7.0, 80
P_MEAN, P_STD = -1.2, 1.2
HUBER_PER_ROOT = 0.00054


def over(sigma: Tensor, x: Tensor) -> Tensor:
    """sigma (B,) as (B, 1, 1), to multiply x (B, H, D) with."""
    return sigma.reshape(-1, *[1] * (x.ndim - 1))


# ---------------------------------------------------------------------- the denoiser
def coefficients(
    sigma: Tensor, sigma_min: float = SIGMA_MIN, sigma_data: float = SIGMA_DATA
) -> tuple[Tensor, Tensor, Tensor]:
    """(c_skip, c_out, c_in) in the form with a boundary: c_skip(sigma_min) = 1 and c_out(sigma_min) = 0.

    c_skip = sd^2 / ((sigma - sigma_min)^2 + sd^2)     c_out = (sigma - sigma_min) sd / sqrt(sigma^2 + sd^2)
    c_in   = 1 / sqrt(sigma^2 + sd^2)
    """
    above = sigma - sigma_min
    norm = (sigma.square() + sigma_data**2).sqrt()
    return sigma_data**2 / (above.square() + sigma_data**2), above * sigma_data / norm, 1 / norm


def precondition(
    network: Callable[[Tensor], Tensor],
    x: Tensor,
    sigma: Tensor,
    sigma_min: float = SIGMA_MIN,
    sigma_data: float = SIGMA_DATA,
) -> Tensor:
    """D(x, sigma) = c_skip x + c_out F(c_in x), F being `network`."""
    c_skip, c_out, c_in = (over(c, x) for c in coefficients(sigma, sigma_min, sigma_data))
    return c_skip * x + c_out * network(c_in * x)


def loss_weight(sigma: Tensor, sigma_data: float = SIGMA_DATA) -> Tensor:
    """(sigma^2 + sd^2) / (sigma sd)^2."""
    return (sigma.square() + sigma_data**2) / (sigma * sigma_data).square()


def pseudo_huber(error: Tensor, form: str = "standard") -> Tensor:
    """sqrt(e^2 + delta^2) - delta for each element of e (B, H, D), delta = 0.00054 sqrt(H D).

    form "squared" has e^4 in place of e^2, as the released code of Consistency Policy has: its gradient vanishes with
    e^3, so that errors below sqrt(delta) are hardly corrected.
    """
    delta = HUBER_PER_ROOT * error[0].numel() ** 0.5
    power = {"standard": 2, "squared": 4}[form]
    return (error**power + delta**2).sqrt() - delta


# ---------------------------------------------------------------------- noise levels
def karras(xi: Tensor, sigma_min: float = SIGMA_MIN, sigma_max: float = SIGMA_MAX, rho: float = RHO) -> Tensor:
    """(sigma_max^(1/rho) + xi (sigma_min^(1/rho) - sigma_max^(1/rho)))^rho, falling from sigma_max to sigma_min."""
    high, low = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    return (high + xi * (low - high)) ** rho


def edges(bins: int = BINS, sigma_min: float = SIGMA_MIN, sigma_max: float = SIGMA_MAX, rho: float = RHO) -> Tensor:
    """The bins + 1 noise levels that bound the bins, falling, exact at both ends."""
    out = karras(torch.linspace(0, 1, bins + 1, dtype=torch.float64), sigma_min, sigma_max, rho)
    out[0], out[-1] = sigma_max, sigma_min
    return out.float()


def log_normal(count: int, like: Tensor, sigma_min: float = SIGMA_MIN, sigma_max: float = SIGMA_MAX) -> Tensor:
    """(count,) noise levels with ln sigma ~ N(-1.2, 1.2^2), kept in [sigma_min, sigma_max]."""
    draw = torch.randn(count, device=like.device, dtype=like.dtype)
    return (P_MEAN + P_STD * draw).exp().clamp(sigma_min, sigma_max)


# ---------------------------------------------------------------------- the ODE
def slope(denoise: Callable[[Tensor, Tensor], Tensor], x: Tensor, sigma: Tensor) -> Tensor:
    """dx/dsigma = (x - D(x, sigma)) / sigma."""
    return (x - denoise(x, sigma)) / over(sigma, x)


def heun_step(
    denoise: Callable[[Tensor, Tensor], Tensor], x: Tensor, sigma: Tensor, to: Tensor, sigma_min: float = SIGMA_MIN
) -> Tensor:
    """Return x at noise `to` from x at `sigma`, both (B,) or (): the mean of the slopes at both ends, two calls.

    Steps that end at sigma_min take the first slope alone: there D is the identity by construction and its slope,
    zero, is not the ODE's. If all of them do, the second call is not made.
    """
    first = slope(denoise, x, sigma)
    euler = x + over(to - sigma, x) * first
    last = to <= sigma_min
    if bool(last.all()):
        return euler
    second = slope(denoise, euler, to)
    heun = x + over(to - sigma, x) * (first + second) / 2
    return torch.where(over(last, x), euler, heun)


def heun(
    denoise: Callable[[Tensor, Tensor], Tensor], x: Tensor, levels: Tensor, sigma_min: float = SIGMA_MIN
) -> Tensor:
    """Follow the ODE through falling noise levels (n + 1,), with 2 n - 1 denoiser calls if the last is sigma_min."""
    for sigma, to in itertools.pairwise(levels):
        x = heun_step(denoise, x, sigma, to, sigma_min)
    return x
