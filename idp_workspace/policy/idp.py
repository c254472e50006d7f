"""Implicit Drifting Policy: Section 4.1 of the paper. The geometry m comes from `idp_workspace.geometry`."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from diffusion_policy.model.common.normalizer import LinearNormalizer
from idp_workspace import proposals, ranks
from idp_workspace.geometry import Samples, compute_excess
from idp_workspace.geometry_variants import ReferenceVariance, statistics
from idp_workspace.memory_bank import Remembering
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


class IDPPolicy(ReferenceVariance, Remembering, GeneratorPolicy):
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
        self.make_bank()
        self._last: tuple[Tensor, Tensor, Samples | None] | None = None  # phi, m, neighbours of the last batch
        self._terms: dict[str, Tensor] = {}  # the terms of the last loss, without lambda_prox

    # ------------------------------------------------------------------ training
    def loss(self, cond: Tensor, actions: Tensor) -> Tensor:
        """Return E(y) + lambda_prox E(z), Eq. (6), both energies to the power `energy_power`."""
        o, a, t, p = self.options, actions, self.options.t_star, self.options.energy_power
        m = self.excess(cond, a)
        weight = self.current_lambda() / paper_lambda(t) ** p  # residuals over 1 - t* have the paper's weight already
        n = max(1, round(o.probe_fraction * len(a))) if weight else 0  # batches are shuffled: any n will do
        y, z = self.propose_and_probe(cond, a, n)
        e_y = (
            raised(potential((y - a) / t, m), p) if o.proposal.is_paper else proposals.energy(y, a, m, o, self.training)
        )
        e_z = raised(potential((z - a[:n]) / (1 - t), m[:n] * o.geometry_on_probe if m.ndim else m), p)
        self._terms = {"loss/proposal": e_y.detach()} | ({"loss/probe": e_z.detach()} if n else {})
        if n == len(a):
            return o.loss_scale * (e_y + weight * e_z).mean()
        return o.loss_scale * (e_y.mean() + (weight * e_z.mean() if n else 0))

    def propose_and_probe(self, cond: Tensor, a: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Return y = f(o, 0, 0), and z = f(o, a* + (1 - t*) eps, t*) for the first n samples."""
        t, f = self.options.t_star, self.generator
        o, start = proposals.inputs(cond, self.zeros(len(a)), self.options.proposal)
        if 0 < n < len(a):  # one network call is faster than two then
            y, z = f.together((o, start, 0.0), (cond[:n], a[:n] + (1 - t) * torch.randn_like(a[:n]), t))
            return y, z
        y = f(o, start, 0.0)
        z = f(cond, a + (1 - t) * torch.randn_like(a), t) if n else a[:0]
        return y, z

    def excess(self, cond: Tensor, actions: Tensor) -> Tensor:
        """Return m for a batch; a scalar 0 without geometry."""
        if not self.options.geometry:
            return actions.new_zeros(())
        phi = self.generator.embedding(cond)
        batch = ranks.whole_batch(phi, actions, self.training)
        among = self.among(batch)
        m = compute_excess(phi, actions, self.options, self.reference(batch.a), among=among)
        self._last = (phi, m, among)
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
        if self._last is None:
            return out
        phi, m, among = self._last
        return out | statistics(phi, m, self.options, among)

    # ------------------------------------------------------------------ acting
    def sample(self, cond: Tensor, batch: int) -> Tensor:
        y = self.generator(cond, proposals.start(self.zeros(batch), self.options.proposal), 0.0)
        return y if self.nfe == 1 else self.generator(cond, y, self.options.t_star)

    def check_nfe(self, nfe: int) -> None:
        if nfe not in (1, 2):
            raise ValueError(f"nfe={nfe}: IDP acts with 1 network call, or with 2 when the probe refines the proposal")
