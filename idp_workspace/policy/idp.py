"""Implicit Drifting Policy: Section 4.1 of the paper. The geometry m comes from `idp_workspace.geometry`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from diffusion_policy.model.common.normalizer import LinearNormalizer
from idp_workspace import geometry, geometry_variants, proposals
from idp_workspace.geometry_variants import Geometry, ReferenceVariance
from idp_workspace.options import Above, AtLeast, Between
from idp_workspace.policy.base import GeneratorPolicy
from idp_workspace.proposals import Proposal


def potential(r: Tensor, m: Tensor) -> Tensor:
    """2 E = |r|^2 + r^T M r, Eq. (5), at each chunk step: (B, H) from residuals r = x - a* (B, H, D).

    m is the diagonal of M (B, H, D), or 0, or M itself (B, H, D, D).
    """
    if m.ndim == 4:
        return r.square().sum(-1) + torch.einsum("bhd,bhde,bhe->bh", r, m, r)
    return ((1 + m) * r.square()).sum(-1)


def paper_lambda(t_star: float) -> float:
    """lambda_prox = (t* / (1 - t*))^2, the weight of the probe in MIP's loss: 81 at t* = 0.9."""
    return (t_star / (1 - t_star)) ** 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class IDPOptions(Geometry):
    """Options of IDP, with the paper's values as defaults; the switches of the geometry are those of `Geometry`."""

    t_star: Annotated[float, Between(0, 1, open=True)] = 0.9
    """Time t* of the probe."""
    lambda_prox: Annotated[float | None, AtLeast(0)] = None
    """Weight of the probe; null is (t*/(1-t*))^2, 0 trains without a probe."""
    lambda_schedule: Literal["constant", "ramp"] = "constant"
    """`ramp` grows the weight geometrically from lambda_start to lambda_prox between ramp_from and ramp_until."""
    lambda_start: Annotated[float, Above(0)] = 1.0
    ramp_from: Annotated[float, AtLeast(0)] = 0.5
    """Share of the training at which the ramp starts."""
    ramp_until: Annotated[float, Above(0)] = 0.95
    """Share of the training at which the ramp ends."""
    loss_scale: float = 0.1
    nfe: int = 1
    """Network calls per action: 1, or 2 to refine the proposal with the probe."""
    geometry: bool = True
    """False sets m = 0."""
    geometry_on_probe: bool = True
    """False leaves the probe's error isotropic."""
    proposal: Proposal = Proposal()
    """Beyond the paper: several proposals from noise (see `Proposal`)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "proposal", Proposal.of(self.proposal))
        super().__post_init__()
        if not self.ramp_from < self.ramp_until <= 1:
            raise ValueError(f"a ramp needs ramp_from={self.ramp_from} < ramp_until={self.ramp_until} <= 1")


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

    def __init__(self, options: IDPOptions | None = None, **arguments: Any) -> None:
        super().__init__(options, **arguments)
        self.make_reference(self.generator.horizon, self.action_dim)
        self._last: tuple[Tensor, Tensor] | None = None  # features and m of the last batch, for the log

    # ------------------------------------------------------------------ training
    def loss(self, cond: Tensor, actions: Tensor) -> Tensor:
        o, a, t = self.options, actions, self.options.t_star
        m = self.excess(cond, a)
        if o.proposal.is_paper:
            y = self.generator(cond, self.zeros(len(a)), 0.0)
            loss = potential((y - a) / t, m)
        else:
            loss = proposals.loss(self, cond, a, m)
        share = self.current_lambda() / paper_lambda(t)  # dividing by t* and 1 - t* already weights the probe by 81
        if share:
            z = self.generator(cond, a + (1 - t) * torch.randn_like(a), t)
            loss = loss + share * potential((z - a) / (1 - t), m if o.geometry_on_probe else m.new_zeros(()))
        return o.loss_scale * loss.mean()

    def excess(self, cond: Tensor, actions: Tensor) -> Tensor:
        """Return m for a batch; a scalar 0 without geometry."""
        if not self.options.geometry:
            return actions.new_zeros(())
        phi = self.generator.embedding(cond)
        m = geometry.compute_excess(phi, actions, self.options, self.reference(actions))
        self._last = (phi, m)
        return m

    @property
    def lambda_prox(self) -> float:
        """The final weight of the probe."""
        o = self.options
        return paper_lambda(o.t_star) if o.lambda_prox is None else float(o.lambda_prox)

    def current_lambda(self) -> float:
        """Return the weight of the probe now.

        In a short training the gradient noise of a probe with weight 81 drowns the proposal. A ramp grows the weight
        while the learning rate falls: lambda_start^(1-p) lambda_prox^p, p from 0 at ramp_from to 1 at ramp_until.
        """
        o = self.options
        if o.lambda_schedule == "constant" or self.lambda_prox == 0:
            return self.lambda_prox
        p = min(1.0, max(0.0, (self.progress - o.ramp_from) / (o.ramp_until - o.ramp_from)))
        return o.lambda_start ** (1 - p) * self.lambda_prox**p

    def set_normalizer(self, normalizer: LinearNormalizer) -> None:
        super().set_normalizer(normalizer)
        self.take_reference_from(self.normalizer)

    def metrics(self) -> dict[str, float]:
        out = {"lambda_prox": self.current_lambda()}
        return out if self._last is None else out | geometry_variants.statistics(*self._last, self.options)

    # ------------------------------------------------------------------ acting
    def check_nfe(self, nfe: int) -> None:
        if nfe not in (1, 2):
            raise ValueError(f"nfe={nfe}: IDP acts with 1 network call, or with 2 when the probe refines the proposal")

    def sample(self, cond: Tensor, batch: int) -> Tensor:
        y = self.generator(cond, proposals.start(self.zeros(batch), self.options.proposal), 0.0)
        return y if self.nfe == 1 else self.generator(cond, y, self.options.t_star)
