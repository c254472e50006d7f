"""Consistency Policy: one-step trajectory models, distilled from an EDM teacher or trained without one."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, Unpack

import torch
from torch import Tensor

from idp_workspace import edm
from idp_workspace.policy.distilled import DistilledPolicy
from idp_workspace.policy.edm_teacher import EDMOptions, EDMPolicy, EDMTeacherPolicy
from idp_workspace.target import fixed_parameters
from idp_workspace.teacher import TeacherError
from idp_workspace.upstream_arguments import UpstreamArguments

#: Share of the Karras schedule, from sigma_max down, from which the denoising term draws half of its noise levels.
DSM_SHARE = 0.7


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConsistencyTrainingOptions(EDMOptions):
    """Options of consistency training."""

    consistency_weight: float = 1.0
    denoising_weight: float = 1.0
    nfe: int = 1
    start: Literal["sigma_max", "unit"] = "sigma_max"
    """`unit` starts from N(0, I), as the released code of Consistency Policy does: nearly deterministic."""


class ConsistencyTrainingPolicy(EDMPolicy):
    """Consistency trajectory model without a teacher.

        G(x, t, s) = (s/t) x + (1 - s/t) g(x, t, s)             from noise t to noise s; G(x, t, t) = x
        x_t = a + t eps,   u the next lower bin edge after t,   x_u = a + u eps      (the same eps)
        L = huber( G-(G(x_t, t, s), s, min) - G-(sg G(x_u, u, s), s, min) )  +  weight(t') huber( G(x_t', t', min) - a )

    t and s <= u are bin edges (t = s is trivial). G- has fixed parameters: the gradient passes through it to its
    input, not into its weights. The second term denoises, half of t' log-normal and half from the upper 70 % of the
    Karras schedule. The target network is the network itself, an EMA of decay zero.

    Acts with G(x, sigma_max, sigma_min), x ~ N(0, sigma_max^2), clipped to [-1, 1]; further calls noise the chunk
    again to lower edges.
    """

    Options = ConsistencyTrainingOptions
    options: ConsistencyTrainingOptions

    def check_nfe(self, nfe: int) -> None:
        if not 1 <= nfe <= self.options.bins:
            raise ValueError(f"nfe={nfe} must be between 1 and the number of bins, {self.options.bins}")

    def jump(self, cond: Tensor, x: Tensor, sigma: Tensor, stop: Tensor) -> Tensor:
        """Return G(x, sigma, stop) (B, H, D)."""
        keep = edm.over(stop / sigma, x)
        return keep * x + (1 - keep) * self.precondition(cond, x, sigma, stop)

    # ------------------------------------------------------------------ training
    def lower_neighbour(
        self, x: Tensor, sigma: Tensor, to: Tensor, actions: Tensor, noise: Tensor, cond: Tensor
    ) -> Tensor:
        """Return the point at noise `to` on the path of x: the same action and noise."""
        return actions + edm.over(to, x) * noise

    def loss(self, cond: Tensor, actions: Tensor) -> Tensor:
        return self.consistency_loss(cond, cond, actions)

    def consistency_loss(self, cond: Tensor, teacher_cond: Tensor, actions: Tensor) -> Tensor:
        o = self.options
        trajectory = self.trajectory_term(cond, teacher_cond, actions)
        return o.consistency_weight * trajectory + o.denoising_weight * self.denoising_term(cond, actions)

    def trajectory_term(self, cond: Tensor, teacher_cond: Tensor, actions: Tensor) -> Tensor:
        t, u, s = self.draw_edges(len(actions), actions.device)
        noise = torch.randn_like(actions)
        x_t = actions + edm.over(t, actions) * noise
        low = torch.full_like(s, self.options.sigma_min)
        fixed_cond = cond.detach()
        with torch.no_grad():
            x_u = self.lower_neighbour(x_t, t, u, actions, noise, teacher_cond)
            target = self.jump(cond, self.jump(cond, x_u, u, s), s, low)
        prediction = self.jump(cond, x_t, t, s)
        with fixed_parameters(self.model):
            prediction = self.jump(fixed_cond, prediction, s, low)
        return edm.pseudo_huber(prediction - target, self.options.huber).mean()

    def draw_edges(self, count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Draw noise levels t > u >= s (count,) at bin edges: t uniform, s uniform below it, u the edge after t."""
        t = torch.randint(0, self.options.bins, (count,), device=device)
        s = t + 1 + (torch.rand(count, device=device) * (self.options.bins - t)).long()
        return self.sigmas[t], self.sigmas[t + 1], self.sigmas[s.clamp(max=self.options.bins)]

    def denoising_term(self, cond: Tensor, actions: Tensor) -> Tensor:
        o = self.options
        sigma = edm.log_normal(len(actions), actions, o.sigma_min, o.sigma_max)
        half = len(actions) // 2
        sigma[:half] = edm.karras(DSM_SHARE * torch.rand_like(sigma[:half]), o.sigma_min, o.sigma_max, o.rho)
        noisy = actions + edm.over(sigma, actions) * torch.randn_like(actions)
        return self.weighted_huber(self.jump(cond, noisy, sigma, torch.full_like(sigma, o.sigma_min)) - actions, sigma)

    # ------------------------------------------------------------------ acting
    def sample(self, cond: Tensor, batch: int) -> Tensor:
        o = self.options
        low = self.sigmas[-1].expand(batch)
        x = torch.randn_like(self.zeros(batch)) * (o.sigma_max if o.start == "sigma_max" else 1.0)
        action = self.jump(cond, x, self.sigmas[0].expand(batch), low).clamp(-1, 1)
        for i in range(1, self.nfe):
            sigma = self.sigmas[math.ceil(i * o.bins / self.nfe)].expand(batch)
            noisy = action + edm.over(sigma, action) * torch.randn_like(action)
            action = self.jump(cond, noisy, sigma, low).clamp(-1, 1)
        return action


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConsistencyOptions(ConsistencyTrainingOptions):
    """Options of Consistency Policy."""

    teacher_checkpoint: str | None = None
    freeze_encoder: bool = True


class ConsistencyPolicy(DistilledPolicy, ConsistencyTrainingPolicy):
    """The student of Consistency Policy: as above, with x_u one Heun step of a frozen EDM teacher's ODE away from x_t.

    It starts from the teacher's weights, with which G(x, t, sigma_min) mixes x with the teacher's denoised chunk, and
    keeps the teacher's observation encoder unchanged.
    """

    teacher_kind = EDMTeacherPolicy
    teacher_config = "train_consistency_training_transformer_lowdim objective=edm_teacher backbone=<the student's>"

    Options = ConsistencyOptions
    options: ConsistencyOptions

    def __init__(self, options: ConsistencyOptions | None = None, **arguments: Unpack[UpstreamArguments]) -> None:
        super().__init__(options, **arguments)
        if self.options.freeze_encoder and self.obs_encoder is not None:
            self.obs_encoder.requires_grad_(False)

    def take_over(self, teacher: EDMTeacherPolicy) -> None:
        for field in ("sigma_min", "sigma_max", "sigma_data", "time_scale"):
            mine, theirs = getattr(self.options, field), getattr(teacher.options, field)
            if mine != theirs:
                raise TeacherError(f"the teacher has {field}={theirs}, the student {mine}: set policy.{field}={theirs}")
        super().take_over(teacher)

    def lower_neighbour(
        self, x: Tensor, sigma: Tensor, to: Tensor, actions: Tensor, noise: Tensor, cond: Tensor
    ) -> Tensor:
        return edm.heun_step(
            lambda x, level: self.teacher.denoise(cond, x, level), x, sigma, to, self.options.sigma_min
        )

    def distill(self, cond: Tensor, teacher_cond: Tensor, actions: Tensor) -> Tensor:
        return self.consistency_loss(cond, teacher_cond, actions)
