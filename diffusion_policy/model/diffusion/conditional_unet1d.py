"""UNet over the time axis of an action sequence, conditioned by FiLM."""

from collections.abc import Sequence

import torch
from torch import nn

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.model.diffusion.conv1d_components import Conv1dBlock, Downsample1d, Upsample1d
from diffusion_policy.model.diffusion.positional_embedding import SinusoidalPosEmb, expand_timestep, stack_times


class ConditionalResidualBlock1D(nn.Module):
    """y = conv2(a(c) * conv1(x) + b(c)) + skip(x), where (a, b) = Linear(act(c)); without `cond_predict_scale`, a = 1."""

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
        film = self.cond_encoder(cond).unsqueeze(-1)
        if self.cond_predict_scale:
            scale, bias = film.chunk(2, dim=1)
            out = scale * out + bias
        else:
            out = out + film
        return self.blocks[1](out) + self.residual_conv(x)


class ConditionalUnet1D(nn.Module):
    """eps(x, k, c): a denoiser of action sequences whose length is a multiple of 2^(len(down_dims) - 1).

    Trained checkpoints fix the order in which modules are made (random numbers) and registered (state-dict keys and
    optimiser indices), and these properties, which look like oversights but cannot change without invalidating them:
    the skip connection of the first level is not used, the second local-condition block is never evaluated, every up
    level doubles the length, and the last convolution always has 8 groups. DP3's small variant has one block a level.
    """

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
            raise ConfigError(
                f"a level of the UNet needs at least one block, not blocks_per_level = {blocks_per_level}"
            )
        dims = [input_dim, *down_dims]
        levels = list(zip(dims[:-1], dims[1:]))
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
        timestep,
        local_cond: torch.Tensor | None = None,
        global_cond: torch.Tensor | None = None,
        start_time=None,
        **kwargs,
    ) -> torch.Tensor:
        """Predict from a noisy sequence; `start_time` is given by objectives with two times, f(x, s, t).

        sample: (B, T, input_dim); timestep, start_time: number, 0-d or (B,); local_cond: (B, T, local_cond_dim);
        global_cond: (B, global_cond_dim) -> (B, T, input_dim).
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
        """As `forward`, with `time` in the form that the step encoder takes: (B,), or (B, 2) = (s, t)."""
        divisor = 2 ** (len(self.down_modules) - 1)
        if sample.shape[1] % divisor:
            raise ConfigError(
                f"This UNet halves the sequence {len(self.down_modules) - 1} times, so the horizon T must be a multiple of "
                f"{divisor}, but T = {sample.shape[1]}. Change the horizon, or use fewer down_dims."
            )

        cond = self.diffusion_step_encoder(time)
        if global_cond is not None:
            cond = torch.cat([cond, global_cond], dim=-1)

        x = sample.transpose(1, 2)  # (B, input_dim, T)
        skips = []
        for i, (*blocks, downsample) in enumerate(self.down_modules):
            x = blocks[0](x, cond)
            if i == 0 and local_cond is not None:
                x = x + self.local_cond_encoder[0](local_cond.transpose(1, 2), cond)
            for block in blocks[1:]:
                x = block(x, cond)
            skips.append(x)
            x = downsample(x)

        for block in self.mid_modules:
            x = block(x, cond)

        for *blocks, upsample in self.up_modules:
            x = torch.cat([x, skips.pop()], dim=1)
            for block in blocks:
                x = block(x, cond)
            x = upsample(x)

        return self.final_conv(x).transpose(1, 2)
