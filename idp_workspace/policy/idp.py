"""Implicit Drifting Policy: Section 4.1 of the paper. The geometry m comes from `idp_workspace.geometry`."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from diffusion_policy.model.common.normalizer import LinearNormalizer
from idp_workspace import padding, ranks
from idp_workspace.geometry import Samples, compute_excess
from idp_workspace.geometry_variants import ReferenceVariance, statistics
from idp_workspace.memory_bank import Remembering
from idp_workspace.paths import raised
from idp_workspace.policy.base import GeneratorPolicy
from idp_workspace.policy.idp_options import IDPOptions, paper_lambda
from idp_workspace.proposals import energies, start
from idp_workspace.upstream_arguments import UpstreamArguments


def potential(r: Tensor, m: Tensor, power: float = 1.0) -> Tensor:
    """2 E = |r|^2 + r^T M r, Eq. (5), at each chunk step: (B, H) from residuals r = x - a* (B, H, D).

    m is the diagonal of M (B, H, D), or 0, or M itself (B, H, D, D). Beyond the paper: the potential to a power.
    """
    if m.ndim == 4:
        return raised(r.square().sum(-1) + torch.einsum("bhd,bhde,bhe->bh", r, m, r), power)
    return raised(((1 + m) * r.square()).sum(-1), power)


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
    def loss(self, cond: Tensor, actions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return E(y) + lambda_prox E(z), Eq. (6), over the steps that were recorded: mask (B, H), see `padding`."""
        m = self.excess(cond, actions, mask=mask)
        if self.options.is_paper_loss:
            e_y, e_z = (padding.kept(e, mask) for e in self.energies(cond, actions, m))
        else:
            e_y, e_z = energies(self, cond, actions, m, mask)
        self._terms = {"loss/proposal": e_y.detach()} | ({"loss/probe": e_z.detach()} if self.lambda_prox else {})
        return self.options.loss_scale * (e_y + self.probe_weight() * e_z).mean()

    def energies(self, cond: Tensor, a: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        """Return 2 E(y) / t*^2 and 2 E(z) / (1 - t*)^2 at each chunk step, (B, H)."""
        t, f, power = self.options.t_star, self.generator, self.options.energy_power
        y = f(cond, self.zeros(len(a)), 0.0)
        z = f(cond, a + (1 - t) * torch.randn_like(a), t)
        return potential((y - a) / t, m, power), potential((z - a) / (1 - t), m, power)

    def probe_weight(self) -> float:
        """Return the weight of E(z) now, without (t* / (1 - t*))^2, which its residuals over 1 - t* have already."""
        return self.current_lambda() / paper_lambda(self.options.t_star) ** self.options.energy_power

    def excess(self, cond: Tensor, actions: Tensor, phi: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return m for a batch, by the features phi(o) or given ones; a scalar 0 without geometry."""
        if mask is not None:
            padding.check(mask, actions, self.options)
        if not self.options.geometry:
            return actions.new_zeros(())
        phi = self.generator.embedding(cond) if phi is None else phi
        batch = ranks.whole_batch(phi, actions, self.training, mask)
        among = self.among(batch)
        m = compute_excess(phi, actions, self.options, self.reference(batch.a, batch.mask), among=among)
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
        y = self.generator(cond, start(self.zeros(batch), self.options.proposal), 0.0)
        return y if self.nfe == 1 else self.generator(cond, y, self.options.t_star)

    def check_nfe(self, nfe: int) -> None:
        if nfe not in (1, 2):
            raise ValueError(f"nfe={nfe}: IDP acts with 1 network call, or with 2 when the probe refines the proposal")
