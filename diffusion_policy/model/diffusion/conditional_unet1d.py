"""UNet over the time axis of an action sequence, conditioned by FiLM."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from einops import rearrange
from torch import nn

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.model.diffusion.conv1d_components import Conv1dBlock, Downsample1d, Upsample1d
from diffusion_policy.model.diffusion.positional_embedding import SinusoidalPosEmb, expand_timestep, stack_times


class ConditionalResidualBlock1D(nn.Module):
    """y = conv2(a(c) * conv1(x) + b(c)) + skip(x), with (a, b) = Linear(act(c)); a = 1 without `cond_predict_scale`."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        cond_dim: int,
        kernel_size: int = 3,
        n_groups: int = 8,
        cond_predict_scale: bool = False,
        activation: type[nn.Module] = nn.Mish,
    ):
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                Conv1dBlock(in_channels, out_channels, kernel_size, n_groups, activation),
                Conv1dBlock(out_channels, out_channels, kernel_size, n_groups, activation),
            ]
        )
        self.cond_predict_scale = cond_predict_scale
        self.out_channels = out_channels
        self.cond_encoder = nn.Sequential(
            activation(), nn.Linear(cond_dim, out_channels * (2 if cond_predict_scale else 1))
        )
        self.residual_conv = nn.Conv1d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()

    def forward(self, x: torch.Tensor, cond: torch.Tensor) -> torch.Tensor:
        """x: (B, in_channels, T), cond: (B, cond_dim) -> (B, out_channels, T)."""
        out = self.blocks[0](x)
        film = rearrange(self.cond_encoder(cond), "b c -> b c 1")
        if self.cond_predict_scale:
            scale, bias = film.chunk(2, dim=1)
            out = scale * out + bias
        else:
            out = out + film
        return self.blocks[1](out) + self.residual_conv(x)


class ConditionalUnet1D(nn.Module):
    """UNet denoiser eps(x, k, c) of action sequences whose length is a multiple of 2^(len(down_dims) - 1).

    Trained checkpoints fix the order in which modules are made (random numbers) and registered (state-dict keys and
    optimiser indices). They also fix these properties, which look like oversights: the skip connection of the first
    level is not used, the second local-condition block is never evaluated, every up level doubles the length, and the
    last convolution always has 8 groups. DP3's small variant has one block per level.
    """

    # that read data or write actions
    edge_layers = ("down_modules.0.0.blocks.0", "down_modules.0.0.residual_conv", "local_cond_encoder", "final_conv.1")

    def __init__(
        self,
        input_dim: int,
        local_cond_dim: int | None = None,
        global_cond_dim: int | None = None,
        diffusion_step_embed_dim: int = 256,
        down_dims: Sequence[int] = (256, 512, 1024),
        kernel_size: int = 3,
        n_groups: int = 8,
        cond_predict_scale: bool = False,
        activation: type[nn.Module] = nn.Mish,
        blocks_per_level: int = 2,
    ):
        super().__init__()
        if blocks_per_level < 1:
            raise ConfigError(f"blocks_per_level = {blocks_per_level} must be at least 1.")
        dims = [input_dim, *down_dims]
        levels = list(pairwise(dims))
        cond_dim = diffusion_step_embed_dim + (global_cond_dim or 0)

        def residual(dim_in: int, dim_out: int) -> ConditionalResidualBlock1D:
            return ConditionalResidualBlock1D(
                dim_in, dim_out, cond_dim, kernel_size, n_groups, cond_predict_scale, activation
            )

        def level(dim_in: int, dim_out: int) -> list[nn.Module]:
            return [residual(dim_in, dim_out), *(residual(dim_out, dim_out) for _ in range(blocks_per_level - 1))]

        diffusion_step_encoder = nn.Sequential(
            SinusoidalPosEmb(diffusion_step_embed_dim),
            nn.Linear(diffusion_step_embed_dim, 4 * diffusion_step_embed_dim),
            activation(),
            nn.Linear(4 * diffusion_step_embed_dim, diffusion_step_embed_dim),
        )
        local_cond_encoder = None
        if local_cond_dim is not None:
            local_cond_encoder = nn.ModuleList([residual(local_cond_dim, dims[1]), residual(local_cond_dim, dims[1])])
        mid_modules = nn.ModuleList(level(dims[-1], dims[-1]))
        down_modules = nn.ModuleList(
            [
                nn.ModuleList(
                    [*level(dim_in, dim_out), Downsample1d(dim_out) if i < len(levels) - 1 else nn.Identity()]
                )
                for i, (dim_in, dim_out) in enumerate(levels)
            ]
        )
        up_modules = nn.ModuleList(
            [
                nn.ModuleList([*level(2 * dim_out, dim_in), Upsample1d(dim_in)])
                for dim_in, dim_out in reversed(levels[1:])
            ]
        )
        final_conv = nn.Sequential(
            Conv1dBlock(dims[1], dims[1], kernel_size, activation=activation),
            nn.Conv1d(dims[1], input_dim, 1),
        )

        self.mid_modules = mid_modules
        self.diffusion_step_encoder = diffusion_step_encoder
        self.local_cond_encoder = local_cond_encoder
        self.up_modules = up_modules
        self.down_modules = down_modules
        self.final_conv = final_conv

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor | float,
        local_cond: torch.Tensor | None = None,
        global_cond: torch.Tensor | None = None,
        start_time: torch.Tensor | float | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Predict a sequence (B, T, input_dim); objectives with two times, f(x, s, t), give `start_time`.

        sample: (B, T, input_dim); timestep, start_time: number, 0-d or (B,); local_cond: (B, T, local_cond_dim);
        global_cond: (B, global_cond_dim).
        """
        time = expand_timestep(timestep, sample) if start_time is None else stack_times(timestep, start_time, sample)
        return self.denoise(sample, time, local_cond, global_cond)

    def denoise(
        self,
        sample: torch.Tensor,
        time: torch.Tensor,
        local_cond: torch.Tensor | None,
        global_cond: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run `forward` with `time` as the step encoder takes it: (B,), or (B, 2) = (s, t)."""
        divisor = 2 ** (len(self.down_modules) - 1)
        if sample.shape[1] % divisor:
            raise ConfigError(
                f"This UNet halves the sequence {len(self.down_modules) - 1} times, so the horizon T must be a "
                f"multiple of {divisor}, but T = {sample.shape[1]}. Change the horizon, or use fewer down_dims."
            )

        cond = self.diffusion_step_encoder(time)
        if global_cond is not None:
            cond = torch.cat([cond, global_cond], dim=-1)

        x = rearrange(sample, "b t d -> b d t")
        skips = []
        for i, level in enumerate(self.down_modules):
            *blocks, downsample = level.children()
            x = blocks[0](x, cond)
            if i == 0 and local_cond is not None:
                x = x + self.local_cond_encoder[0](rearrange(local_cond, "b t d -> b d t"), cond)  # type: ignore[index]
            for block in blocks[1:]:
                x = block(x, cond)
            skips.append(x)
            x = downsample(x)

        for block in self.mid_modules:
            x = block(x, cond)

        for level in self.up_modules:
            *blocks, upsample = level.children()
            x = torch.cat([x, skips.pop()], dim=1)
            for block in blocks:
                x = block(x, cond)
            x = upsample(x)

        return rearrange(self.final_conv(x), "b d t -> b t d")
