"""Options of IDP, and the weight of its probe."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from idp_workspace.geometry_variants import Geometry
from idp_workspace.options import Above, AtLeast, Between
from idp_workspace.proposals import Proposal

PAPER_PROPOSAL = Proposal()


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
    """First weight of a ramp."""
    ramp_from: Annotated[float, AtLeast(0)] = 0.5
    """Share of the training at which the ramp starts."""
    ramp_until: Annotated[float, Above(0)] = 0.95
    """Share of the training at which the ramp ends."""
    loss_scale: float = 0.1
    """Factor of the loss, as in MIP."""
    energy_power: Annotated[float, Above(0)] = 1.0
    """Beyond the paper: exponent of the potential at each chunk step; 0.5 is its square root. At 1 the best action is
    the mean of the experts whatever m is; at 0.5 it is near their median, below that at a mode, and m changes it."""
    probe_fraction: Annotated[float, Above(0)] = 1.0
    """Share of the batch on which the probe is evaluated."""
    nfe: int = 1
    """Network calls per action: 1, or 2 to refine the proposal with the probe."""
    geometry: bool = True
    """False sets m = 0."""
    bank_size: Annotated[int, AtLeast(0)] = 0
    """Beyond the paper, for small batches: number of earlier samples among which a batch also looks for neighbours."""
    geometry_on_probe: bool = True
    """False leaves the probe's error isotropic."""
    proposal: Proposal = PAPER_PROPOSAL
    """Beyond the paper: several proposals from noise (see `Proposal`)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "proposal", Proposal.of(self.proposal))
        super().__post_init__()
        if self.probe_fraction > 1:
            raise ValueError(f"probe_fraction={self.probe_fraction} is a share of the batch: at most 1")
        if not self.ramp_from < self.ramp_until <= 1:
            raise ValueError(f"a ramp needs ramp_from={self.ramp_from} < ramp_until={self.ramp_until} <= 1")

    @property
    def is_paper_loss(self) -> bool:
        """Whether each sample has one proposal, from zero, and one probe, with the same m."""
        every = self.probe_fraction == 1 and self.final_lambda() > 0
        return self.proposal.is_paper and every and self.geometry_on_probe

    def final_lambda(self) -> float:
        """Return lambda_prox, with null replaced by the paper's value."""
        return paper_lambda(self.t_star) if self.lambda_prox is None else float(self.lambda_prox)

    def lambda_at(self, progress: float) -> float:
        """Return the weight of the probe when `progress` of the training is done.

        In a short training the gradient noise of a probe with weight 81 hides the proposal. A ramp grows the weight
        while the learning rate falls: lambda_start^(1-p) lambda_prox^p, p from 0 at ramp_from to 1 at ramp_until.
        """
        final = self.final_lambda()
        if self.lambda_schedule == "constant" or final == 0:
            return final
        p = min(1.0, max(0.0, (progress - self.ramp_from) / (self.ramp_until - self.ramp_from)))
        return self.lambda_start ** (1 - p) * final**p
