"""Beyond the paper: proposals from noise, to cover several modes of the experts, and a probe on part of the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from einops import rearrange, repeat
from torch import Tensor

from idp_workspace import drifting, padding, ranks
from idp_workspace.options import AtLeast, Options, numbers, unknown_argument

if TYPE_CHECKING:
    from idp_workspace.policy.idp import IDPPolicy
    from idp_workspace.policy.idp_options import IDPOptions

#: Share of the weight that relaxed winner-takes-all gives to the samples that did not win, so that each has a gradient.
RELAXED_SHARE = 0.05

#: The drifting field needs kernels as wide as the distance between modes; the published ones are narrower.
HOT_TEMPERATURES = (0.2, 0.5, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proposal(Options):
    """How proposals are drawn, and how they share the one expert of an observation.

        y_g = f(o, xi_g, 0),  g = 1..samples

    A proposal from zero is one point: the mean of the modes where experts disagree. So is one from noise, if every
    sample is pulled to every expert.
    """

    noise: Literal["zero", "gaussian"] = "zero"
    """Where a proposal starts: xi = 0 (the paper), or xi ~ N(0, I)."""
    samples: Annotated[int, AtLeast(1)] = 1
    """Proposals per observation in training; acting draws one."""
    assign: Literal["all", "wta", "relaxed_wta", "drift"] = "all"
    """What replaces E(y): `all` is mean_g E(y_g); `wta` is min_g E(y_g), so that only the nearest sample moves;
    `relaxed_wta` puts 0.95 on the nearest and spreads 0.05 over the others; `drift` is the explicit drifting loss of
    all y_g with a* as positive, which does not use the geometry."""
    temperatures: tuple[float, ...] = HOT_TEMPERATURES
    """Kernel widths of `drift`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperatures", numbers(self.temperatures))
        super().__post_init__()
        drifting.Field(temperatures=self.temperatures)  # checks them
        if self.noise == "zero" and self.samples > 1:
            raise ValueError(
                f"samples={self.samples} with noise='zero' are copies of one proposal: use noise='gaussian'"
            )

    @property
    def is_paper(self) -> bool:
        """Whether there is one proposal, from zero, with the error E(y)."""
        return self.noise == "zero" and self.assign != "drift"

    @classmethod
    def of(cls, section: Proposal | Mapping[str, Any]) -> Proposal:
        """Build from a section of a config; a Proposal is returned unchanged."""
        if isinstance(section, cls):
            return section
        if not isinstance(section, Mapping):
            raise TypeError(
                f"proposal must be a section such as {{noise: gaussian, samples: 8, assign: wta}}, got {section!r}"
            )
        names = [field.name for field in dataclasses.fields(cls)]
        for name in section:
            if name not in names:
                raise unknown_argument(str(name), names, "proposal")
        return cls(**section)


def start(zeros: Tensor, p: Proposal) -> Tensor:
    """Return what the generator starts from, like `zeros` (B, H, D)."""
    return torch.randn_like(zeros) if p.noise == "gaussian" else zeros


def inputs(cond: Tensor, zeros: Tensor, p: Proposal) -> tuple[Tensor, Tensor]:
    """Return conditions and starts of all proposals, (B G, ...): the G of a sample follow each other."""
    if p.samples > 1:
        cond, zeros = cond.repeat_interleave(p.samples, dim=0), zeros.repeat_interleave(p.samples, dim=0)
    return cond, start(zeros, p)


def energies(
    policy: IDPPolicy, cond: Tensor, a: Tensor, m: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return what replaces `IDPPolicy.energies` beyond the paper: at each step, or their means if part has a probe."""
    o = policy.options
    y, z = called(policy, cond, a, *inputs(cond, policy.zeros(len(a)), o.proposal))
    e_y, e_z = energy(y, a, m, o, policy.training), probe_energy(z, a, m, o)
    if mask is not None:
        e_y, e_z = padding.kept(e_y, mask), padding.kept(e_z, mask)
    if len(z) == len(a):
        return e_y, e_z
    return e_y.mean(), e_z.mean() if len(z) else e_y.new_zeros(())


def called(policy: IDPPolicy, cond: Tensor, a: Tensor, conds: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return proposals f(conds, starts, 0), and probes of the first samples: `probe_fraction`, none without weight."""
    o, t, f = policy.options, policy.options.t_star, policy.generator
    n = max(1, round(o.probe_fraction * len(a))) if o.final_lambda() else 0  # batches are shuffled: any n will do
    if 0 < n < len(a):  # one network call is faster than two then
        y, z = f.together((conds, starts, 0.0), (cond[:n], probe(a[:n], t), t))
        return y, z
    y = f(conds, starts, 0.0)
    return y, f(cond, probe(a, t), t) if n else a[:0]


def probe_energy(z: Tensor, a: Tensor, m: Tensor, o: IDPOptions) -> Tensor:
    """Return 2 E(z) / (1 - t*)^2 of probes z (n, H, D) of the first n samples: (n, H)."""
    from idp_workspace.policy.idp import potential

    n = len(z)
    return potential((z - a[:n]) / (1 - o.t_star), m[:n] * o.geometry_on_probe if m.ndim else m, o.energy_power)


def probe(a: Tensor, t: float) -> Tensor:
    """Return a* + (1 - t*) eps."""
    return a + (1 - t) * torch.randn_like(a)


def energy(y: Tensor, a: Tensor, m: Tensor, o: IDPOptions, training: bool = False) -> Tensor:
    """Return what replaces 2 E(y) / t*^2 for proposals y (B G, H, D): (B, H), or a scalar for `drift`."""
    from idp_workspace.policy.idp import potential

    p, samples = o.proposal, o.proposal.samples
    if p.is_paper:
        return potential((y - a) / o.t_star, m, o.energy_power)
    if p.assign == "drift":  # one field per chunk step, as in Naive Drifting
        generated = rearrange(y, "(b g) h d -> h b g d", g=samples)
        average = ranks.mean if training else drifting.alone
        positives = rearrange(a, "b h d -> h b 1 d")
        return drifting.drifting_loss(generated, positives, average=average, temperatures=p.temperatures)
    targets = repeat(a, "b h d -> (b g) h d", g=samples)
    weights = m.repeat_interleave(samples, dim=0) if m.ndim else m
    e = potential((y - targets) / o.t_star, weights, o.energy_power)
    e = rearrange(e, "(b g) h -> b g h", g=samples)
    return (assignment(e.mean(-1), p.assign).unsqueeze(-1) * e).sum(dim=1)


def assignment(energy: Tensor, assign: str) -> Tensor:
    """Return weights (B, G), rows summing to one and without gradient, of samples with energies (B, G)."""
    count = energy.shape[1]
    if assign == "all" or count == 1:
        return torch.full_like(energy, 1 / count, requires_grad=False)
    others = RELAXED_SHARE if assign == "relaxed_wta" else 0.0
    weights = torch.full_like(energy, others / (count - 1), requires_grad=False)
    return weights.scatter_(1, energy.detach().argmin(dim=1, keepdim=True), 1 - others)
