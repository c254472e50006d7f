"""Diffusion Policy's objective on a shared generator."""

from __future__ import annotations

import dataclasses
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from idp_workspace.options import Options
from idp_workspace.policy.base import GeneratorPolicy
from idp_workspace.upstream_arguments import UpstreamArguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class DDPMOptions(Options):
    """Options of denoising diffusion."""

    noise_scheduler: Any = None
    """A scheduler of `diffusers`, such as DDPMScheduler."""
    num_inference_steps: int | None = None
    """Network calls per action chunk; null: as many as in training."""
    time_scale: float = 1.0
    """The network receives time_scale * step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_scheduler is None:
            raise TypeError("DDPMPolicy needs a noise_scheduler, such as diffusers' DDPMScheduler")


class DDPMPolicy(GeneratorPolicy):
    """Denoising diffusion, with a scheduler of `diffusers`.

        x_k = sqrt(abar_k) a* + sqrt(1 - abar_k) eps,    k ~ U{0 .. K-1}
        L = mean |f(o, x_k, k) - target|^2,    target = eps or a*, as the scheduler's prediction_type says
        act: from N(0, I), `nfe` steps of the scheduler

    The network receives the integer step, as in Diffusion Policy. The scheduler is a plain attribute: replace it
    (DDPM by DDIM, for example) to act with fewer calls without training again. `num_inference_steps` is another name
    of `nfe`.
    """

    Options = DDPMOptions
    options: DDPMOptions

    def __init__(self, options: DDPMOptions | None = None, **arguments: Unpack[UpstreamArguments]) -> None:
        super().__init__(options, **arguments)
        self.noise_scheduler = self.options.noise_scheduler
        steps = self.options.num_inference_steps
        self.num_inference_steps = self.train_steps if steps is None else steps
        self.check()

    @property
    def train_steps(self) -> int:
        return self.noise_scheduler.config.num_train_timesteps

    @property
    def nfe(self) -> int:
        return self.num_inference_steps

    @nfe.setter
    def nfe(self, steps: int) -> None:
        self.num_inference_steps = steps

    def check(self) -> None:
        """Raise ValueError unless the scheduler, which may have been replaced, and the number of steps can be used."""
        kind = self.noise_scheduler.config.prediction_type
        if kind not in ("epsilon", "sample"):
            raise ValueError(f"prediction_type={kind!r} of the noise scheduler is not one of epsilon, sample")
        if not 1 <= self.nfe <= self.train_steps:
            raise ValueError(f"nfe={self.nfe}: the noise scheduler can take 1 to {self.train_steps} steps")

    def loss(self, cond: Tensor, actions: Tensor) -> Tensor:
        noise = torch.randn_like(actions)
        step = torch.randint(0, self.train_steps, (len(actions),), device=actions.device)
        noisy = self.noise_scheduler.add_noise(actions, noise, step)
        prediction = self.generator(cond, noisy, self.options.time_scale * step)
        target = noise if self.noise_scheduler.config.prediction_type == "epsilon" else actions
        return F.mse_loss(prediction, target)

    def sample(self, cond: Tensor, batch: int) -> Tensor:
        self.check()
        x = torch.randn_like(self.zeros(batch))
        self.noise_scheduler.set_timesteps(self.nfe)
        for step in self.noise_scheduler.timesteps:
            x = self.noise_scheduler.step(self.generator(cond, x, self.options.time_scale * step), step, x).prev_sample
        return x
