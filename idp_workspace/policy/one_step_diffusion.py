"""One-Step Diffusion Policy (OneDP): a diffusion policy distilled into one network call by matching scores."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from idp_workspace.flows import broadcast
from idp_workspace.options import check_choices
from idp_workspace.policy.diffusion import DDPMPolicy
from idp_workspace.policy.distilled import DistilledPolicy
from idp_workspace.teacher import TeacherError


class OneStepDiffusionPolicy(DistilledPolicy):
    """The teacher's noise predictor eps_phi at one step k0 becomes a generator theta whose noised chunks look to the teacher like data.

        A = (z - sigma_k0 f(o, z, k0)) / alpha_k0            z ~ N(0, I), or z = 0 if deterministic
        A_k = alpha_k A + sigma_k eps,   k ~ U{2 .. 95}       alpha_k^2 = abar_k, sigma_k^2 = 1 - abar_k
        L = mean sg[sigma_k (eps_phi(A_k, k) - eps_psi(A_k, k))] A_k  +  mean |eps_psi(sg A_k, k) - eps|^2

    The gradient of the first term with respect to A_k is sigma_k^2 (score_psi - score_phi), the KL divergence's with weight
    sigma_k^2. psi, the score of the generator's own chunks, is `score_model`; it and the generator start from the teacher and are
    trained by one optimiser in one step: the first term reaches the generator alone, the second psi alone (the published runs give
    psi 20 times the learning rate). `mode: deterministic` puts the true eps in place of eps_psi and has no psi.
    Both scores see the observation through the teacher's encoder, the generator through its own, which is trained with it.
    """

    teacher_kind = DDPMPolicy
    teacher_config = "train_diffusion_transformer_lowdim backbone=<the student's>"

    @dataclasses.dataclass(frozen=True)
    class Options:
        teacher_checkpoint: str | None = None
        mode: str = "stochastic"
        noise_scheduler: Any = None  # the teacher's
        time_scale: float = 1.0  # the teacher's
        start_step: int = 65  # k0
        k_min: int = 2
        k_max: int = 95
        score_weight: float = 1.0  # of psi's loss

        def __post_init__(self):
            check_choices({"mode": self.mode}, {"mode": ("stochastic", "deterministic")})
            if self.noise_scheduler is None:
                raise TypeError("OneStepDiffusionPolicy needs the noise_scheduler of its teacher")
            steps = self.noise_scheduler.config.num_train_timesteps
            if not 0 <= self.k_min <= self.k_max < steps or not 0 <= self.start_step < steps:
                raise ValueError(
                    f"0 <= k_min={self.k_min} <= k_max={self.k_max} and start_step={self.start_step} must be below the "
                    f"{steps} steps of the noise scheduler"
                )

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        if self.options.mode == "stochastic":
            self.score_model = copy.deepcopy(self.model)

    def levels(self, k: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """(alpha_k, sigma_k) for steps k (B,), in a shape that multiplies `like`."""
        cumulative = self.options.noise_scheduler.alphas_cumprod.to(like)[k]
        return broadcast(cumulative.sqrt(), like), broadcast((1 - cumulative).sqrt(), like)

    def generate(self, cond: Tensor, z: Tensor) -> Tensor:
        """A (B, H, D), the action that the noise predicted at step k0 implies."""
        k = torch.full((len(z),), self.options.start_step, device=z.device)
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
                f"the teacher predicts {theirs.config.prediction_type}; its noise is needed: train one with prediction_type=epsilon"
            )
        if mine.alphas_cumprod.shape != theirs.alphas_cumprod.shape or not torch.allclose(
            mine.alphas_cumprod, theirs.alphas_cumprod
        ):
            raise TeacherError(
                "the teacher's noise_scheduler has other noise levels than the student's: give both the same section"
            )
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
        own, score_loss = noise, 0.0
        if o.mode == "stochastic":
            scorer = dataclasses.replace(self.teacher.generator, model=self.score_model)
            prediction = scorer(teacher_cond, noisy.detach(), o.time_scale * k)
            own, score_loss = prediction.detach(), F.mse_loss(prediction, noise)
        with torch.no_grad():
            direction = sigma * (self.teacher.generator(teacher_cond, noisy, o.time_scale * k) - own)
        self._last = (direction.square().mean(), score_loss.detach() if o.mode == "stochastic" else 0.0)
        return (direction * noisy).mean() + o.score_weight * score_loss

    def metrics(self) -> dict[str, float]:
        """The first term is no measure of progress, its size goes through zero: the mean square of its direction is."""
        if not hasattr(self, "_last"):
            return {}
        direction, score_loss = self._last
        return {"score_gap": direction.item(), "score_loss": float(score_loss)}

    # ------------------------------------------------------------------ acting
    def sample(self, cond: Tensor, batch: int) -> Tensor:
        return self.generate(cond, self.start(batch)).clamp(-1, 1)
