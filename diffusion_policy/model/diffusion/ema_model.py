"""Exponential moving average of a model's weights."""

import torch
from torch import nn

from diffusion_policy.common.errors import ConfigError


class EMAModel:
    """ema <- d_n ema + (1 - d_n) p after every step n = 0, 1, ...

    d_n = clamp(1 - (1 + s / inv_gamma)^-power, min_value, max_value) with s = n - update_after_step - 1, and 0 while
    s <= 0; or the constant `rate`, if given. Parameters without gradient and those of batch norm are copied. So are
    buffers: at their first value they would pair averaged weights with the statistics of an untrained network.
    """

    def __init__(
        self,
        model: nn.Module,
        update_after_step: int = 0,
        inv_gamma: float = 1.0,
        power: float = 2 / 3,
        min_value: float = 0.0,
        max_value: float = 0.9999,
        rate: float | None = None,
    ):
        if rate is not None and not 0 <= rate < 1:
            raise ConfigError(f"ema.rate = {rate} must be in [0, 1); to train without EMA, set training.use_ema=False.")
        self.averaged_model = model.eval().requires_grad_(False)
        self.update_after_step = update_after_step
        self.inv_gamma = inv_gamma
        self.power = power
        self.min_value = min_value
        self.max_value = max_value
        self.rate = rate
        self.decay = 0.0
        self.optimization_step = 0

    def get_decay(self, optimization_step: int) -> float:
        """d_n at step n."""
        if self.rate is not None:
            return self.rate
        step = optimization_step - self.update_after_step - 1
        if step <= 0:
            return 0.0
        return max(self.min_value, min(1 - (1 + step / self.inv_gamma) ** -self.power, self.max_value))

    @torch.no_grad()
    def step(self, new_model: nn.Module) -> None:
        """Update the average with the weights of `new_model`, which has the same architecture."""
        self.decay = self.get_decay(self.optimization_step)
        averaged: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        copies: list[torch.Tensor] = []
        copy_sources: list[torch.Tensor] = []
        for ema_module, module in zip(self.averaged_model.modules(), new_model.modules(), strict=True):
            is_batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
            for ema, new in zip(ema_module.parameters(recurse=False), module.parameters(recurse=False), strict=True):
                if is_batch_norm or not new.requires_grad:
                    copies.append(ema)
                    copy_sources.append(new)
                elif new.numel() > 0:
                    averaged.append(ema)
                    sources.append(new)
            copies.extend(ema_module.buffers(recurse=False))
            copy_sources.extend(module.buffers(recurse=False))

        # One fused call for all tensors: a loop over hundreds of small ones costs more than the arithmetic.
        if averaged:
            torch._foreach_lerp_(averaged, sources, 1 - self.decay)
        for target, source in zip(copies, copy_sources, strict=True):
            target.copy_(source)
        self.optimization_step += 1

    def state_dict(self) -> dict:
        """The counter and decay. The averaged model is saved separately, with its weights."""
        return {"optimization_step": self.optimization_step, "decay": self.decay}

    def load_state_dict(self, state_dict: dict) -> None:
        self.optimization_step = state_dict["optimization_step"]
        self.decay = state_dict["decay"]
