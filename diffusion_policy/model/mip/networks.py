"""Networks of the MIP protocol: f(x, s, t, o) of an action sequence, two times and an encoded observation.

The default sizes are MIP's. `timestep` is t, in [0, 1] without rescaling; `start_time` is s, and equals t unless given.
The reference implementation also has a scalar head that it never trains. It is left out here, so parameter counts are
lower by that head.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.model.common.state_features import StateFeatures
from diffusion_policy.model.diffusion.conditional_unet1d import ConditionalUnet1D
from diffusion_policy.model.diffusion.positional_embedding import stack_times
from diffusion_policy.model.diffusion.transformer_for_diffusion import TransformerForDiffusion


class StateEncoder(nn.Module):
    """MLP over the concatenated observation steps, with one output token per step.

    features: computed from each observation step and given to the MLP in its place, such as `StateFeatures`.
    """

    edge_layers = ("mlp.0",)  # that read data

    def __init__(
        self,
        obs_dim: int,
        n_obs_steps: int = 2,
        emb_dim: int = 256,
        n_hidden_layers: int = 2,
        features: StateFeatures | None = None,
    ):
        super().__init__()
        if features is not None:
            self.features, obs_dim = features, features.output_dim
        self.n_obs_steps = n_obs_steps
        self.output_dim = emb_dim
        widths = [n_obs_steps * obs_dim] + [emb_dim] * n_hidden_layers
        hidden = [layer for i, o in pairwise(widths) for layer in (nn.Linear(i, o), nn.LeakyReLU())]
        self.mlp = nn.Sequential(*hidden, nn.Linear(widths[-1], n_obs_steps * emb_dim))

    def set_normalizer(self, field: Any) -> None:
        """Pass the observations' normalisation on to the features."""
        if hasattr(self, "features"):
            self.features.set_normalizer(field)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """obs: (B, To, obs_dim) -> (B, To, emb_dim)."""
        if hasattr(self, "features"):
            obs = self.features(obs)
        return self.mlp(obs.flatten(1)).view(-1, self.n_obs_steps, self.output_dim)


class TwoTimeEmbedding(nn.Module):
    """[e(s), e(t)], each of size m = dim / 2.

    e(t) = [cos(t w), sin(t w)] with w_k = 10000^(-k / (m/2)), k = 0 .. m/2 - 1.
    """

    frequencies: torch.Tensor

    def __init__(self, dim: int):
        super().__init__()
        if dim % 4:
            raise ConfigError(f"The embedding of two times needs a size divisible by 4 (sine and cosine), not {dim}.")
        n_frequency = dim // 4
        self.register_buffer("frequencies", 10000 ** (-torch.arange(n_frequency) / n_frequency), persistent=False)

    def forward(self, times: torch.Tensor) -> torch.Tensor:
        """times: (B, 2) = (s, t) -> (B, dim)."""
        angles = times[..., None] * self.frequencies  # (B, 2, dim / 4)
        return torch.cat([angles.cos(), angles.sin()], dim=-1).flatten(1)


class ChiTransformer(TransformerForDiffusion):
    """The diffusion transformer with one token for both times.

    `cond_dim` is the width of an observation token; by default n_emb.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        horizon: int,
        n_obs_steps: int = 2,
        cond_dim: int | None = None,
        n_layer: int = 8,
        n_head: int = 6,
        n_emb: int = 384,
        p_drop_emb: float = 0.0,
        p_drop_attn: float = 0.1,
        causal_attn: bool = True,
        n_cond_layers: int = 0,
    ):
        super().__init__(
            input_dim,
            output_dim,
            horizon,
            n_obs_steps,
            cond_dim or n_emb,
            n_layer=n_layer,
            n_head=n_head,
            n_emb=n_emb,
            p_drop_emb=p_drop_emb,
            p_drop_attn=p_drop_attn,
            causal_attn=causal_attn,
            n_cond_layers=n_cond_layers,
        )
        self.time_emb = TwoTimeEmbedding(n_emb)

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor | float,
        cond: torch.Tensor | None = None,
        start_time: torch.Tensor | float | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Predict a sequence (B, T, output_dim).

        sample: (B, T, input_dim); timestep, start_time: number, 0-d or (B,); cond: (B, To, cond_dim).
        """
        return self.denoise(sample, stack_times(timestep, start_time, sample), cond)


class ChiUnet(ConditionalUnet1D):
    """The conditional UNet with GELU, two times, and a linear projection of the encoded observation.

    `global_cond_dim` is To * emb, the flattened observation tokens; they are projected to `cond_embed_dim`.
    """

    def __init__(
        self,
        input_dim: int,
        global_cond_dim: int = 512,
        cond_embed_dim: int = 256,
        diffusion_step_embed_dim: int = 256,
        down_dims: Sequence[int] = (128, 256, 512),
        kernel_size: int = 5,
        n_groups: int = 8,
        cond_predict_scale: bool = True,
    ):
        super().__init__(
            input_dim,
            global_cond_dim=cond_embed_dim,
            diffusion_step_embed_dim=diffusion_step_embed_dim,
            down_dims=down_dims,
            kernel_size=kernel_size,
            n_groups=n_groups,
            cond_predict_scale=cond_predict_scale,
            activation=nn.GELU,
        )
        self.diffusion_step_encoder[0] = TwoTimeEmbedding(diffusion_step_embed_dim)
        self.global_cond_proj = nn.Linear(global_cond_dim, cond_embed_dim)

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor | float,
        local_cond: torch.Tensor | None = None,
        global_cond: torch.Tensor | None = None,
        start_time: torch.Tensor | float | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Predict a sequence of the shape of `sample`.

        sample: (B, T, input_dim); timestep, start_time: number, 0-d or (B,); global_cond: (B, To * emb).
        """
        times = stack_times(timestep, start_time, sample)
        return self.denoise(sample, times, local_cond, self.global_cond_proj(global_cond))


class ResidualBlock(nn.Sequential):
    """x + drop(W2 norm(drop(gelu(W1 norm(x)))))."""

    def __init__(self, dim: int, hidden_dim: int, dropout: float):
        super().__init__(
            nn.LayerNorm(dim),
            nn.Linear(dim, hidden_dim),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.LayerNorm(hidden_dim),
            nn.Linear(hidden_dim, dim),
            nn.Dropout(dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class ResidualMLP(nn.Module):
    """Residual MLP on the concatenation [x, tau(s), tau(t), o], each flattened.

    tau(t) = [sin(t w), cos(t w)] with w evenly spaced over [0, 100].
    """

    frequencies: torch.Tensor

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        horizon: int,
        n_obs_steps: int = 2,
        cond_dim: int | None = None,
        n_layer: int = 8,
        n_emb: int = 512,
        p_drop: float = 0.1,
        expansion: int = 4,
        time_embed_dim: int = 128,
    ):
        super().__init__()
        if time_embed_dim % 2:
            raise ConfigError(f"time_embed_dim = {time_embed_dim} must be even: half sines, half cosines.")
        self.horizon = horizon
        self.output_dim = output_dim
        cond_dim = cond_dim or n_emb
        self.register_buffer("frequencies", torch.linspace(0, 100, time_embed_dim // 2), persistent=False)
        self.net = nn.Sequential(
            nn.Linear(horizon * input_dim + 2 * time_embed_dim + n_obs_steps * cond_dim, n_emb),
            nn.LayerNorm(n_emb),
            nn.GELU(),
            *[ResidualBlock(n_emb, expansion * n_emb, p_drop) for _ in range(n_layer)],
            nn.LayerNorm(n_emb),
            nn.Linear(n_emb, horizon * output_dim),
        )
        self.edge_layers = ("net.0", f"net.{len(self.net) - 1}")  # that read data or write actions
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor | float,
        cond: torch.Tensor,
        start_time: torch.Tensor | float | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Predict a sequence (B, T, output_dim).

        sample: (B, T, input_dim); timestep, start_time: number, 0-d or (B,); cond: (B, To, cond_dim).
        """
        angles = stack_times(timestep, start_time, sample)[..., None] * self.frequencies  # (B, 2, time_embed_dim / 2)
        tau = torch.cat([angles.sin(), angles.cos()], dim=-1)
        x = self.net(torch.cat([sample.flatten(1), tau.flatten(1), cond.flatten(1)], dim=-1))
        return x.view(-1, self.horizon, self.output_dim)
