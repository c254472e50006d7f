"""Implicit Drifting Policy: Section 4.1 of the paper. The geometry m comes from `idp_workspace.geometry`."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from diffusion_policy.model.common.normalizer import LinearNormalizer
from idp_workspace import proposals
from idp_workspace.geometry import compute_excess
from idp_workspace.geometry_variants import ReferenceVariance, statistics
from idp_workspace.paths import raised
from idp_workspace.policy.base import GeneratorPolicy
from idp_workspace.policy.idp_options import IDPOptions, paper_lambda
from idp_workspace.upstream_arguments import UpstreamArguments


def potential(r: Tensor, m: Tensor) -> Tensor:
    """2 E = |r|^2 + r^T M r, Eq. (5), at each chunk step: (B, H) from residuals r = x - a* (B, H, D).

    m is the diagonal of M (B, H, D), or 0, or M itself (B, H, D, D).
    """
    if m.ndim == 4:
        return r.square().sum(-1) + torch.einsum("bhd,bhde,bhe->bh", r, m, r)
    return ((1 + m) * r.square()).sum(-1)


class IDPPolicy(ReferenceVariance, GeneratorPolicy):
    """One-step policy trained on a potential that is weighted by the conditional expert geometry.

        E(x) = 1/2 sum_d (1 + m_d) (x_d - a*_d)^2           Eq. (5), m without gradient
        y = f(o, 0, 0)                                      proposal: the action that is executed
        z = f(o, a* + (1 - t*) eps, t*)                     probe near the expert
        L = E(y) + lambda_prox E(z)                         Eq. (6)

    in the scaling of MIP: the sum over action dimensions, the mean over batch and chunk, residuals divided by t* and
    1 - t*, times loss_scale. With m = 0 it is MIP's training loss.
    """

    Options = IDPOptions
    options: IDPOptions

    def __init__(self, options: IDPOptions | None = None, **arguments: Unpack[UpstreamArguments]) -> None:
        super().__init__(options, **arguments)
        self.make_reference(self.generator.horizon, self.action_dim)
        self._last: tuple[Tensor, Tensor] | None = None  # phi and m of the last batch, for the log
        self._terms: dict[str, Tensor] = {}  # the terms of the last loss, without lambda_prox

    # ------------------------------------------------------------------ training
    def loss(self, cond: Tensor, actions: Tensor) -> Tensor:
        o, a, t, p = self.options, actions, self.options.t_star, self.options.energy_power
        m = self.excess(cond, a)
        # Dividing by t* and 1 - t* already weights the probe by 81, or its power.
        share = self.current_lambda() / paper_lambda(t) ** p
        n = max(1, round(o.probe_fraction * len(a))) if share else 0  # a batch is shuffled: its first n are a fair draw
        if o.proposal.is_paper:
            y, z = self.propose_and_probe(cond, a, n)
            loss = raised(potential((y - a) / t, m), p)
        else:
            loss = proposals.loss(self, cond, a, m)
            z = self.generator(*self.near_expert(cond, a, n)) if n else a[:0]
        self._terms = {"loss/proposal": loss.detach()}
        if n:
            m = m[:n] if m.ndim and o.geometry_on_probe else m.new_zeros(())
            probe = raised(potential((z - a[:n]) / (1 - t), m), p)
            self._terms["loss/probe"] = probe.detach()
            loss = loss + share * probe if n == len(a) else loss.mean() + share * probe.mean()
        return o.loss_scale * loss.mean()

    def propose_and_probe(self, cond: Tensor, a: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Return y, and z for the first n samples: in one network call if n is part of the batch, which is faster."""
        proposal = (cond, self.zeros(len(a)), 0.0)
        if 0 < n < len(a):
            y, z = self.generator.together(proposal, self.near_expert(cond, a, n))
            return y, z
        y = self.generator(*proposal)
        return y, self.generator(*self.near_expert(cond, a, n)) if n else a[:0]

    def near_expert(self, cond: Tensor, a: Tensor, n: int) -> tuple[Tensor, Tensor, float]:
        """Return what the probe's call takes, for the first n samples."""
        t = self.options.t_star
        return cond[:n], a[:n] + (1 - t) * torch.randn_like(a[:n]), t

    def excess(self, cond: Tensor, actions: Tensor) -> Tensor:
        """Return m for a batch; a scalar 0 without geometry."""
        if not self.options.geometry:
            return actions.new_zeros(())
        phi = self.generator.embedding(cond)
        m = compute_excess(phi, actions, self.options, self.reference(actions))
        self._last = (phi, m)
        return m

    def current_lambda(self) -> float:
        """Return the weight of the probe now. Upstream's loops do not tell the progress: a ramp is at its end then."""
        return self.options.lambda_at(1.0 if self.progress is None else self.progress)

    @property
    def lambda_prox(self) -> float:
        """The final weight of the probe."""
        return self.options.final_lambda()

    def set_normalizer(self, normalizer: LinearNormalizer) -> None:
        super().set_normalizer(normalizer)
        self.take_reference_from(self.normalizer)

    def metrics(self) -> dict[str, float]:
        out = {"lambda_prox": self.current_lambda()}
        out |= {name: self.options.loss_scale * term.mean().item() for name, term in self._terms.items()}
        return out if self._last is None else out | statistics(*self._last, self.options)

    # ------------------------------------------------------------------ acting
    def sample(self, cond: Tensor, batch: int) -> Tensor:
        y = self.generator(cond, proposals.start(self.zeros(batch), self.options.proposal), 0.0)
        return y if self.nfe == 1 else self.generator(cond, y, self.options.t_star)

    def check_nfe(self, nfe: int) -> None:
        if nfe not in (1, 2):
            raise ValueError(f"nfe={nfe}: IDP acts with 1 network call, or with 2 when the probe refines the proposal")
