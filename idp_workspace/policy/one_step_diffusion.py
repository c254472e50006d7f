"""One-Step Diffusion Policy (OneDP): a diffusion policy distilled into one network call by matching scores."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Literal, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from idp_workspace.options import Options
from idp_workspace.paths import broadcast
from idp_workspace.policy.diffusion import DDPMPolicy
from idp_workspace.policy.distilled import DistilledPolicy
from idp_workspace.teacher import TeacherError
from idp_workspace.upstream_arguments import UpstreamArguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneStepDiffusionOptions(Options):
    """Options of One-Step Diffusion Policy."""

    teacher_checkpoint: str | None = None
    mode: Literal["stochastic", "deterministic"] = "stochastic"
    noise_scheduler: Any = None
    """The teacher's."""
    time_scale: float = 1.0
    """The teacher's."""
    start_step: int = 65
    """k0"""
    k_min: int = 2
    k_max: int = 95
    score_weight: float = 1.0
    """Weight of psi's loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_scheduler is None:
            raise TypeError("OneStepDiffusionPolicy needs the noise_scheduler of its teacher")
        steps = self.noise_scheduler.config.num_train_timesteps
        if not 0 <= self.k_min <= self.k_max < steps or not 0 <= self.start_step < steps:
            raise ValueError(
                f"0 <= k_min={self.k_min} <= k_max={self.k_max} and start_step={self.start_step} must be below the "
                f"{steps} steps of the noise scheduler"
            )


class OneStepDiffusionPolicy(DistilledPolicy):
    """The teacher's noise predictor eps_phi becomes a generator whose noised chunks look like data to the teacher.

        A = (z - sigma_k0 f(o, z, k0)) / alpha_k0            z ~ N(0, I), or z = 0 if deterministic
        A_k = alpha_k A + sigma_k eps,   k ~ U{2 .. 95}       alpha_k^2 = abar_k, sigma_k^2 = 1 - abar_k
        L = mean sg[sigma_k (eps_phi(A_k, k) - eps_psi(A_k, k))] A_k  +  mean |eps_psi(sg A_k, k) - eps|^2

    The gradient of the first term with respect to A_k is sigma_k^2 (score_psi - score_phi): the gradient of the KL
    divergence, weighted by sigma_k^2. psi, the score of the generator's own chunks, is `score_model`. It and the
    generator start from the teacher and share one optimiser: the first term reaches only the generator, the second
    only psi (the published runs give psi 20 times the learning rate). `mode: deterministic` replaces eps_psi by the
    true eps and has no psi. Both scores see the observation through the teacher's encoder, the generator through its
    own, trained one.
    """

    teacher_kind = DDPMPolicy
    teacher_config = "train_diffusion_transformer_lowdim backbone=<the student's>"

    Options = OneStepDiffusionOptions
    options: OneStepDiffusionOptions

    def __init__(self, options: OneStepDiffusionOptions | None = None, **arguments: Unpack[UpstreamArguments]) -> None:
        super().__init__(options, **arguments)
        if self.options.mode == "stochastic":
            self.score_model = copy.deepcopy(self.model)
        self._last: tuple[Tensor, Tensor] | None = None  # for the log

    def levels(self, k: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return (alpha_k, sigma_k) for steps k (B,), in a shape that multiplies `like`."""
        cumulative = self.options.noise_scheduler.alphas_cumprod.to(like)[k]
        return broadcast(cumulative.sqrt(), like), broadcast((1 - cumulative).sqrt(), like)

    def generate(self, cond: Tensor, z: Tensor) -> Tensor:
        """Return A (B, H, D), the action that the noise predicted at step k0 implies."""
        k = torch.full((z.shape[0],), self.options.start_step, device=z.device)
        alpha, sigma = self.levels(k, z)
        return (z - sigma * self.generator(cond, z, self.options.time_scale * k)) / alpha

    def start(self, batch: int) -> Tensor:
        zeros = self.zeros(batch)
        return torch.randn_like(zeros) if self.options.mode == "stochastic" else zeros

    # ------------------------------------------------------------------ training
    def take_over(self, teacher: DDPMPolicy) -> None:
        mine, theirs = self.options.noise_scheduler, teacher.noise_scheduler
        if theirs.config.prediction_type != "epsilon":
            raise TeacherError(
                f"the teacher predicts {theirs.config.prediction_type}: train one with prediction_type=epsilon"
            )
        mine_levels, their_levels = mine.alphas_cumprod, theirs.alphas_cumprod
        if mine_levels.shape != their_levels.shape or not torch.allclose(mine_levels, their_levels):
            raise TeacherError("teacher and student have different noise levels: give both the same noise_scheduler")
        if self.options.time_scale != teacher.options.time_scale:
            raise TeacherError(
                f"the teacher was trained with time_scale={teacher.options.time_scale}, the student has "
                f"{self.options.time_scale}"
            )
        super().take_over(teacher)
        if self.options.mode == "stochastic":
            self.score_model.load_state_dict(teacher.model.state_dict())

    def distill(self, cond: Tensor, teacher_cond: Tensor, actions: Tensor) -> Tensor:
        o = self.options
        action = self.generate(cond, self.start(len(actions)))
        k = torch.randint(o.k_min, o.k_max + 1, (len(actions),), device=actions.device)
        alpha, sigma = self.levels(k, actions)
        noise = torch.randn_like(actions)
        noisy = alpha * action + sigma * noise
        own, score_loss = noise, torch.zeros(())
        if o.mode == "stochastic":
            scorer = dataclasses.replace(self.teacher.generator, model=self.score_model)
            prediction = scorer(teacher_cond, noisy.detach(), o.time_scale * k)
            own, score_loss = prediction.detach(), F.mse_loss(prediction, noise)
        with torch.no_grad():
            direction = sigma * (self.teacher.generator(teacher_cond, noisy, o.time_scale * k) - own)
        self._last = (direction.square().mean(), score_loss.detach())
        return (direction * noisy).mean() + o.score_weight * score_loss

    def metrics(self) -> dict[str, float]:
        """Return the mean square of the first term's direction: the term itself goes through zero."""
        if self._last is None:
            return {}
        direction, score_loss = self._last
        return {"score_gap": direction.item(), "score_loss": float(score_loss)}

    # ------------------------------------------------------------------ acting
    def sample(self, cond: Tensor, batch: int) -> Tensor:
        return self.generate(cond, self.start(batch)).clamp(-1, 1)
