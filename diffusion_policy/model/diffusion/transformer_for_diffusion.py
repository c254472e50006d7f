"""Transformer over the tokens of an action sequence.

The layers are pre-norm transformer layers with torch's parameter names. They are written out because torch's own stacks
inspect mask values to pick a kernel, and the fused kernels have neither forward-mode derivatives nor a stable export.
At these lengths (tens of tokens) plain matrix products are as fast.
"""

import copy
import math
from typing import Any

import torch
from einops import rearrange
from torch import nn
from torch.nn import functional as F

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.model.common.module_attr_mixin import ModuleAttrMixin
from diffusion_policy.model.diffusion.positional_embedding import SinusoidalPosEmb, expand_timestep, stack_times


class MultiHeadAttention(nn.Module):
    """softmax(Q K^T / sqrt(d) + mask) V over heads of size d = n_emb / n_head.

    The parameters are those of nn.MultiheadAttention.
    """

    def __init__(self, n_emb: int, n_head: int, dropout: float):
        super().__init__()
        if n_emb % n_head:
            raise ConfigError(f"n_emb = {n_emb} cannot be split evenly over n_head = {n_head} heads.")
        self.n_head = n_head
        self.dropout = dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * n_emb, n_emb))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * n_emb))
        self.out_proj = nn.Linear(n_emb, n_emb)
        nn.init.zeros_(self.out_proj.bias)
        nn.init.xavier_uniform_(self.in_proj_weight)

    def forward(self, query: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """query: (B, T, E), memory: (B, S, E), mask: (T, S) of 0 and -inf -> (B, T, E)."""
        n_emb = query.shape[-1]
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if query is memory:  # self-attention: one product for all three
            q, k, v = F.linear(query, weight, bias).chunk(3, dim=-1)
        else:
            q = F.linear(query, weight[:n_emb], bias[:n_emb])
            k, v = F.linear(memory, weight[n_emb:], bias[n_emb:]).chunk(2, dim=-1)
        q, k, v = (rearrange(x, "b t (h d) -> b h t d", h=self.n_head) for x in (q, k, v))

        logits = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)  # (B, n_head, T, S)
        if mask is not None:
            logits = logits + mask
        weights = F.dropout(logits.softmax(dim=-1), self.dropout, self.training)
        return self.out_proj(rearrange(weights @ v, "b h t d -> b t (h d)"))


class TransformerLayer(nn.Module):
    """x + self_attention(norm(x)), then x + feed_forward(norm(x)).

    With `cross_attention`, x + attention(norm(x), memory) comes between the two.
    """

    def __init__(self, n_emb: int, n_head: int, dropout: float, cross_attention: bool = False):
        super().__init__()
        self.self_attn = MultiHeadAttention(n_emb, n_head, dropout)
        self.multihead_attn = MultiHeadAttention(n_emb, n_head, dropout) if cross_attention else None
        self.linear1 = nn.Linear(n_emb, 4 * n_emb)
        self.linear2 = nn.Linear(4 * n_emb, n_emb)
        self.norm1 = nn.LayerNorm(n_emb)
        self.norm2 = nn.LayerNorm(n_emb)
        self.norm3 = nn.LayerNorm(n_emb) if cross_attention else None
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        memory: torch.Tensor | None = None,
        memory_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x: (B, T, E), mask: (T, T), memory: (B, S, E), memory_mask: (T, S) -> (B, T, E)."""
        y = self.norm1(x)
        x = x + self.dropout(self.self_attn(y, y, mask))
        if self.multihead_attn is None:
            y = self.norm2(x)
        else:
            x = x + self.dropout(self.multihead_attn(self.norm2(x), memory, memory_mask))
            y = self.norm3(x)  # type: ignore[misc]
        return x + self.dropout(self.linear2(self.dropout(F.gelu(self.linear1(y)))))


class LayerStack(nn.Module):
    """`n_layer` copies of a layer in sequence."""

    def __init__(self, layer: nn.Module, n_layer: int):
        super().__init__()
        self.layers = nn.ModuleList([copy.deepcopy(layer) for _ in range(n_layer)])

    def forward(self, x: torch.Tensor, *args: torch.Tensor | None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, *args)
        return x


class TransformerForDiffusion(ModuleAttrMixin):
    """Transformer denoiser of action sequences.

    With `time_as_cond` (the usual form), action tokens are decoded against condition tokens [time, obs_1 .. obs_To].
    Without it, the time token is put in front of the action tokens and the model is a single encoder. With
    `causal_attn`, action t attends to actions up to t, the time token, and observations up to t. Observations are
    condition tokens exactly when `cond_dim` > 0. The argument `obs_as_cond` is accepted for existing configs and
    ignored.
    """

    edge_layers = ("input_emb", "cond_obs_emb", "head")  # that read data or write actions

    mask: torch.Tensor | None
    memory_mask: torch.Tensor | None
    time_emb: nn.Module
    encoder: nn.Module
    # None in some forms, in which they are not used
    decoder: nn.Module
    cond_obs_emb: nn.Module
    cond_pos_emb: nn.Parameter

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        horizon: int,
        n_obs_steps: int | None = None,
        cond_dim: int = 0,
        n_layer: int = 12,
        n_head: int = 12,
        n_emb: int = 768,
        p_drop_emb: float = 0.1,
        p_drop_attn: float = 0.1,
        causal_attn: bool = False,
        time_as_cond: bool = True,
        obs_as_cond: bool = False,
        n_cond_layers: int = 0,
    ):
        super().__init__()
        obs_as_cond = cond_dim > 0
        if obs_as_cond and not time_as_cond:
            raise ConfigError(
                "cond_dim > 0 needs time_as_cond=True: observations are condition tokens beside the time token."
            )
        n_obs_steps = horizon if n_obs_steps is None else n_obs_steps
        self.T = horizon if time_as_cond else horizon + 1
        self.T_cond = int(time_as_cond) + (n_obs_steps if obs_as_cond else 0)
        self.horizon = horizon
        self.time_as_cond = time_as_cond
        self.obs_as_cond = obs_as_cond
        self.encoder_only = not time_as_cond

        self.input_emb = nn.Linear(input_dim, n_emb)
        self.pos_emb = nn.Parameter(torch.zeros(1, self.T, n_emb))
        self.drop = nn.Dropout(p_drop_emb)
        self.time_emb = SinusoidalPosEmb(n_emb)
        self.cond_obs_emb = nn.Linear(cond_dim, n_emb) if obs_as_cond else None  # type: ignore[assignment]
        if self.encoder_only:
            self.cond_pos_emb = None  # type: ignore[assignment]
            self.encoder = LayerStack(TransformerLayer(n_emb, n_head, p_drop_attn), n_layer)
            self.decoder = None  # type: ignore[assignment]
        else:
            self.cond_pos_emb = nn.Parameter(torch.zeros(1, self.T_cond, n_emb))
            if n_cond_layers > 0:
                self.encoder = LayerStack(TransformerLayer(n_emb, n_head, p_drop_attn), n_cond_layers)
            else:
                self.encoder = nn.Sequential(nn.Linear(n_emb, 4 * n_emb), nn.Mish(), nn.Linear(4 * n_emb, n_emb))
            self.decoder = LayerStack(TransformerLayer(n_emb, n_head, p_drop_attn, cross_attention=True), n_layer)
        self.n_cond_layers = n_cond_layers

        mask = memory_mask = None
        if causal_attn:
            step = torch.arange(self.T)[:, None]
            mask = _additive_mask(step >= torch.arange(self.T))
            if obs_as_cond:
                memory_mask = _additive_mask(step >= torch.arange(self.T_cond) - 1)
        self.register_buffer("mask", mask)
        self.register_buffer("memory_mask", memory_mask)

        self.ln_f = nn.LayerNorm(n_emb)
        self.head = nn.Linear(n_emb, output_dim)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        """Draw weights and positions from N(0, 0.02), set biases to 0.

        Without observation tokens, the positions of the condition stay 0.
        """
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        elif isinstance(module, MultiHeadAttention):
            nn.init.normal_(module.in_proj_weight, std=0.02)
            nn.init.zeros_(module.in_proj_bias)
        elif isinstance(module, TransformerForDiffusion):
            nn.init.normal_(module.pos_emb, std=0.02)
            if module.cond_obs_emb is not None:
                nn.init.normal_(module.cond_pos_emb, std=0.02)

    def get_optim_groups(self, weight_decay: float = 1e-3) -> list[dict]:
        """Split the parameters: weights of linear and attention layers decay; biases, norms and positions do not."""
        decay: list[str] = []
        no_decay: list[str] = []
        for module_name, module in self.named_modules():
            for name, _ in module.named_parameters(recurse=False):
                full_name = f"{module_name}.{name}" if module_name else name
                is_weight = isinstance(module, (nn.Linear, MultiHeadAttention)) and name.endswith("weight")
                (decay if is_weight else no_decay).append(full_name)
        parameters = dict(self.named_parameters())
        # Sorted by name: a saved optimiser state refers to parameters by their index.
        return [
            {"params": [parameters[name] for name in sorted(names)], "weight_decay": value}
            for names, value in ((decay, weight_decay), (no_decay, 0.0))
        ]

    def configure_optimizers(
        self, learning_rate: float = 1e-4, weight_decay: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95)
    ) -> torch.optim.AdamW:
        """AdamW over `get_optim_groups`."""
        return torch.optim.AdamW(self.get_optim_groups(weight_decay), lr=learning_rate, betas=(betas[0], betas[1]))

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor | float,
        cond: torch.Tensor | None = None,
        start_time: torch.Tensor | float | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Predict a sequence (B, T, output_dim); objectives with two times, f(x, s, t), give `start_time`.

        sample: (B, T, input_dim); timestep, start_time: number, 0-d or (B,); cond: (B, To, cond_dim).
        """
        time = expand_timestep(timestep, sample) if start_time is None else stack_times(timestep, start_time, sample)
        return self.denoise(sample, time, cond)

    def denoise(self, sample: torch.Tensor, time: torch.Tensor, cond: torch.Tensor | None) -> torch.Tensor:
        """Run `forward` with `time` as `time_emb` takes it: (B,), or (B, 2) = (s, t)."""
        n_step = sample.shape[1]
        if n_step > self.horizon or (self.mask is not None and n_step != self.horizon):
            raise ConfigError(
                f"The sequence has {n_step} steps, but this transformer was built for horizon {self.horizon}."
            )
        if self.obs_as_cond and cond is None:
            raise ConfigError(
                "This transformer was built with cond_dim > 0 and needs observations as `cond`; "
                "in a policy, set obs_as_cond=True."
            )

        time_token = self.time_emb(time).unsqueeze(1)  # (B, 1, E)
        tokens = self.input_emb(sample)  # (B, T, E)
        if self.encoder_only:
            tokens = torch.cat([time_token, tokens], dim=1)
            x = self.drop(tokens + self.pos_emb[:, : tokens.shape[1]])
            x = self.encoder(x, self.mask)[:, 1:]
        else:
            cond_tokens = time_token
            if self.obs_as_cond:
                cond_tokens = torch.cat([time_token, self.cond_obs_emb(cond)], dim=1)
            memory = self.drop(cond_tokens + self.cond_pos_emb[:, : cond_tokens.shape[1]])
            memory = self.encoder(memory, None) if self.n_cond_layers > 0 else self.encoder(memory)
            x = self.drop(tokens + self.pos_emb[:, :n_step])
            x = self.decoder(x, self.mask, memory, self.memory_mask)
        return self.head(self.ln_f(x))


def _additive_mask(allowed: torch.Tensor) -> torch.Tensor:
    """Convert a bool mask to 0 where allowed and -inf elsewhere."""
    return torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
