"""Parameter-free embeddings of a diffusion step or time."""

import math

import torch
from torch import nn


class SinusoidalPosEmb(nn.Module):
    """e(t) = [sin(t w), cos(t w)] with w_i = 10000^(-i / (dim/2 - 1)), i = 0 .. dim/2 - 1.

    For two times (s, t), even frequencies use t and odd ones s. This adds no parameter, and e(t, t) = e(t) to the bit.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B,) integers or floats, or (B, 2) = (s, t) -> (B, dim), in the dtype of a floating x."""
        half = self.dim // 2
        frequencies = torch.exp(torch.arange(half, device=x.device) * -(math.log(10000) / (half - 1)))
        if x.ndim == 2:
            times = torch.where(torch.arange(half, device=x.device) % 2 == 0, x[:, 1:], x[:, :1])  # (B, dim / 2)
        else:
            times = x[:, None]
        angles = times * frequencies
        embedding = torch.cat([angles.sin(), angles.cos()], dim=-1)
        return embedding.to(x.dtype) if x.is_floating_point() else embedding


def expand_timestep(timestep: torch.Tensor | float, sample: torch.Tensor) -> torch.Tensor:
    """Expand a number, a 0-d tensor, (1,) or (B,) to (B,) in the dtype of `sample` (B, ...)."""
    timestep = torch.as_tensor(timestep).to(sample)
    return timestep.reshape(-1).expand(sample.shape[0])


def stack_times(
    timestep: torch.Tensor | float, start_time: torch.Tensor | float | None, sample: torch.Tensor
) -> torch.Tensor:
    """Stack (s, t) as (B, 2); s = t if `start_time` is None."""
    end = expand_timestep(timestep, sample)
    start = end if start_time is None else expand_timestep(start_time, sample)
    return torch.stack([start, end], dim=-1)
