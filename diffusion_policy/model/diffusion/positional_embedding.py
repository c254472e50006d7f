"""Parameter-free embeddings of a diffusion step or time."""
import math

import torch
from torch import nn


class SinusoidalPosEmb(nn.Module):
    """e(t) = [sin(t w), cos(t w)] with w_i = 10000^(-i / (dim/2 - 1)), i = 0 .. dim/2 - 1."""

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B,) integers or floats -> (B, dim), in the float type of x."""
        half = self.dim // 2
        frequencies = torch.exp(torch.arange(half, device=x.device) * -(math.log(10000) / (half - 1)))
        angles = x[:, None] * frequencies
        embedding = torch.cat([angles.sin(), angles.cos()], dim=-1)
        return embedding.to(x.dtype) if x.is_floating_point() else embedding


def expand_timestep(timestep, sample: torch.Tensor) -> torch.Tensor:
    """A step or time given as a number, a 0-d tensor, (1,) or (B,) -> (B,) in the type of `sample` (B, ...)."""
    timestep = torch.as_tensor(timestep).to(sample)
    return timestep.reshape(-1).expand(sample.shape[0])
