"""Implicit Drifting Policy."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from diffusion_policy.model.common.normalizer import LinearNormalizer
from idp_workspace import drifting, geometry
from idp_workspace.options import check_choices
from idp_workspace.policy.base import GeneratorPolicy
from idp_workspace.proposal import Proposal, assignment

EMA_REFERENCE_RATE = 0.99

#: Options that are handed to the geometry as they are.
GEOMETRY = (
    "granularity",
    "self_neighbor",
    "tau",
    "topk",
    "center",
    "reference",
    "excess",
    "weights",
    "matrix",
    "rel_floor",
    "m_clip",
)


def paper_lambda(t_star: float) -> float:
    """(t*/(1-t*))^2, the weight of the probe against the proposal: 81 at t* = 0.9."""
    return (t_star / (1 - t_star)) ** 2


def potential(residual: Tensor, m: Tensor | None) -> Tensor:
    """2 E = r^T (I + M) r at each step, summed over action dimensions: (B, H) from residuals (B, H, D).

    m is the diagonal of M (B, H, D), M itself (B, H, D, D), or None for M = 0.
    """
    if m is None:
        return residual.square().sum(-1)
    if m.ndim == 4:
        return residual.square().sum(-1) + torch.einsum("bhd,bhde,bhe->bh", residual, m, residual)
    return ((1 + m) * residual.square()).sum(-1)


class IDPPolicy(GeneratorPolicy):
    """One-step policy trained on a potential weighted by conditional expert geometry (paper, Section 4).

        E(x) = 1/2 sum_d (1 + m_d) (x_d - a*_d)^2           m from idp_workspace.geometry, without gradient
        y = f(o, 0, 0)                                      proposal: what is executed
        z = f(o, a* + (1 - t*) eps, t*)                     probe near the expert
        L = E(y) + lambda_prox E(z),  lambda_prox = (t*/(1 - t*))^2 = 81

    in the scaling of MIP: sum over action dimensions, mean over batch and horizon, residuals divided by t* and 1 - t*, times
    loss_scale. With geometry: false (m = 0) it is MIP's training loss. It acts with one network call, y, or with `nfe: 2` calls,
    f(o, y, t*). Going past the paper, `proposal` draws several samples from noise instead (see Proposal), and acting then draws one.
    """

    @dataclasses.dataclass(frozen=True)
    class Options:
        """The paper's values are the defaults. For the switches of the geometry see `geometry_excess`."""

        t_star: float = 0.9
        lambda_prox: float | None = None  # null: (t*/(1-t*))^2
        lambda_schedule: str = "constant"  # constant | ramp, see current_lambda
        lambda_start: float = 1.0  # of a ramp, which stays there until ramp_from and reaches lambda_prox at
        ramp_from: float = 0.5  # ramp_until, both as shares of the training
        ramp_until: float = 0.95
        loss_scale: float = 0.1
        nfe: int = 1
        geometry: bool = True  # false: m = 0
        geometry_on_probe: bool = True  # false: the probe's error is isotropic
        granularity: str = "per_step"
        self_neighbor: bool = True
        tau: float = 1.0
        topk: int | None = None
        center: str = "expert"
        reference: str = "batch"
        excess: str = "relative"
        weights: str = "softmax"
        matrix: str = "diag"
        rel_floor: float = 0.0
        m_clip: float | None = None
        proposal: Proposal = Proposal()  # or a mapping with its fields

        def __post_init__(self):
            object.__setattr__(self, "proposal", Proposal.of(self.proposal))
            check_choices({"lambda_schedule": self.lambda_schedule}, {"lambda_schedule": ("constant", "ramp")})
            geometry.check_switches(**{name: getattr(self, name) for name in GEOMETRY})
            if not 0 < self.t_star < 1:
                raise ValueError(f"t_star={self.t_star} must lie strictly between 0 and 1")
            if self.lambda_prox is not None and self.lambda_prox < 0:
                raise ValueError(f"lambda_prox={self.lambda_prox} must not be negative")
            if self.lambda_start <= 0 or not 0 <= self.ramp_from < self.ramp_until <= 1:
                raise ValueError(
                    f"a ramp needs lambda_start > 0 and 0 <= ramp_from < ramp_until <= 1, got lambda_start="
                    f"{self.lambda_start}, ramp_from={self.ramp_from}, ramp_until={self.ramp_until}"
                )
            check_nfe(self.nfe)

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        o = self.options
        self.nfe = o.nfe
        self.lambda_prox = paper_lambda(o.t_star) if o.lambda_prox is None else float(o.lambda_prox)
        self._last: tuple[Tensor, Tensor] | None = None  # features and m of the last batch
        if o.reference in ("ema", "dataset"):
            # Zero until seen: the first batch (ema) or the normaliser's statistics (dataset) fill it.
            self.register_buffer("reference_variance", torch.zeros(self.generator.horizon, self.action_dim))

    # ------------------------------------------------------------------ training
    def current_lambda(self) -> float:
        """The weight of the probe now.

        constant: lambda_prox. When steps are few, the gradient noise of a probe at 81 drowns the proposal; hence
        ramp:     lambda_start^(1-p) lambda_prox^p, p going from 0 at ramp_from to 1 at ramp_until: the weight grows while the
                  learning rate, and with it the harm that noise can do, falls.
        """
        o = self.options
        if o.lambda_schedule == "constant" or self.lambda_prox == 0:
            return self.lambda_prox
        p = min(1.0, max(0.0, (self.progress - o.ramp_from) / (o.ramp_until - o.ramp_from)))
        return o.lambda_start ** (1 - p) * self.lambda_prox**p

    def excess(self, cond: Tensor, actions: Tensor) -> Tensor | None:
        """m for a batch, or None for m = 0."""
        if not self.options.geometry:
            return None
        features = self.generator.embedding(cond)
        switches = {name: getattr(self.options, name) for name in GEOMETRY}
        if self.options.reference == "ema":
            self._update_reference(actions)
        if self.options.reference in ("ema", "dataset"):
            switches["v_ref"] = self.reference_variance
        m = geometry.geometry_excess(features, actions, **switches)
        self._last = (features, m)
        return m

    def loss(self, cond: Tensor, actions: Tensor) -> Tensor:
        o = self.options
        m = self.excess(cond, actions)
        loss = self.proposal_loss(cond, actions, m)
        # The divisors t* and 1 - t* already hold the paper's lambda_prox; another value enters as its share of that one.
        share = self.current_lambda() / paper_lambda(o.t_star)
        if share:
            z = self.generator(cond, actions + (1 - o.t_star) * torch.randn_like(actions), o.t_star)
            loss = loss + share * potential((z - actions) / (1 - o.t_star), m if o.geometry_on_probe else None)
        return o.loss_scale * loss.mean()

    def start(self, count: int) -> Tensor:
        """What the proposal starts from, (count, H, D)."""
        zeros = self.zeros(count)
        return torch.randn_like(zeros) if self.options.proposal.noise == "gaussian" else zeros

    def proposal_loss(self, cond: Tensor, actions: Tensor, m: Tensor | None) -> Tensor:
        """2 E(y) / t*^2 at each step (B, H) for the paper's one sample, what `proposal.assign` makes of several, or drift's scalar."""
        o, p = self.options, self.options.proposal
        batch, horizon, dim = actions.shape
        if p.samples > 1:
            cond = cond.repeat_interleave(p.samples, dim=0)
        y = self.generator(cond, self.start(batch * p.samples), 0.0)
        if p.assign == "drift":
            # One field per chunk step, as in the Naive Drifting baseline: (H, B, G, D) and (H, B, 1, D).
            samples = y.view(batch, p.samples, horizon, dim).permute(2, 0, 1, 3)
            return drifting.drifting_loss(samples, actions[:, None].permute(2, 0, 1, 3), temperatures=p.temperatures)
        if p.samples == 1:
            return potential((y - actions) / o.t_star, m)
        if m is not None:
            m = m.repeat_interleave(p.samples, dim=0)
        energy = potential((y - actions.repeat_interleave(p.samples, dim=0)) / o.t_star, m).view(
            batch, p.samples, horizon
        )
        return (assignment(energy.mean(-1), p.assign).unsqueeze(-1) * energy).sum(dim=1)

    @torch.no_grad()
    def _update_reference(self, actions: Tensor) -> None:
        if not self.training:
            return
        now = geometry.reference_variance(actions)
        first = not bool(self.reference_variance.any())
        self.reference_variance.lerp_(now, 1.0 if first else 1 - EMA_REFERENCE_RATE)

    def set_normalizer(self, normalizer: LinearNormalizer) -> None:
        super().set_normalizer(normalizer)
        if self.options.reference == "dataset":
            field = self.normalizer["action"].params_dict
            std = field["input_stats"]["std"] * field["scale"]
            self.reference_variance.copy_(std.detach().square().expand_as(self.reference_variance))

    def metrics(self) -> dict[str, float]:
        """Size of the excess and of the neighbourhoods in the last batch."""
        out = {"lambda_prox": self.current_lambda()}
        if self._last is None:
            return out
        features, m = self._last
        values = torch.diagonal(m, dim1=-2, dim2=-1) if m.ndim == 4 else m
        values = values.float().flatten()
        o = self.options
        w = geometry.neighbor_weights(
            features,
            tau=o.tau,
            topk=o.topk,
            self_neighbor=o.self_neighbor,
            weights="softmax" if o.weights == "shuffled" else o.weights,
        )
        return out | {
            "m_mean": values.mean().item(),
            "m_p99": values.kthvalue(max(1, round(0.99 * len(values)))).values.item(),
            "m_max": values.max().item(),
            "m_positive": (values > 0).float().mean().item(),
            "effective_neighbors": geometry.effective_neighbors(w).mean().item(),
        }

    # ------------------------------------------------------------------ acting
    def sample(self, cond: Tensor, batch: int) -> Tensor:
        check_nfe(self.nfe)
        y = self.generator(cond, self.start(batch), 0.0)
        return y if self.nfe == 1 else self.generator(cond, y, self.options.t_star)


def check_nfe(nfe: int) -> None:
    if nfe not in (1, 2):
        raise ValueError(f"nfe={nfe}: IDP acts with 1 network call, or with 2 when the probe refines the proposal")
