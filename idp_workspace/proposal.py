"""Several modes in one step: proposals of IDP that start from noise. Past the paper, whose proposal is one point."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from idp_workspace import drifting
from idp_workspace.options import check_choices, unknown_argument

#: Share of the weight that relaxed winner-takes-all gives to the samples that did not win, so that none is left without gradient.
RELAXED_SHARE = 0.05

#: The explicit field needs kernels as wide as the distance between modes to see more than one; the published ones are narrower.
HOT_TEMPERATURES = (0.2, 0.5, 1.0)


@dataclasses.dataclass(frozen=True)
class Proposal:
    """How the proposal is drawn and how its samples share the observation's one expert. The defaults are the paper's: one, from zero.

        y_g = f(o, xi_g, 0),  g = 1..samples,    xi_g = 0 or ~ N(0, I)

    A proposal that starts from zero is one point, the mean of the modes when experts disagree; so is one from noise if every sample
    is pulled to every expert. `assign` says what takes the place of E(y) in the loss:

        all            mean_g E(y_g)
        wta            min_g E(y_g): only the nearest sample moves, the others stay free for other experts
        relaxed_wta    0.95 on the nearest, 0.05 spread evenly over the others
        drift          the explicit drifting loss of {y_g} with a* as positive, at `temperatures` (idp_workspace.drifting), which
                       knows no geometry; the probe keeps it
    """

    noise: str = "zero"
    samples: int = 1
    assign: str = "all"
    temperatures: tuple[float, ...] = HOT_TEMPERATURES  # of drift

    def __post_init__(self):
        object.__setattr__(self, "temperatures", tuple(float(tau) for tau in self.temperatures))
        check_choices(
            {"noise": self.noise, "assign": self.assign},
            {"noise": ("zero", "gaussian"), "assign": ("all", "wta", "relaxed_wta", "drift")},
        )
        drifting.check_switches(temperatures=self.temperatures)
        if self.samples < 1:
            raise ValueError(f"proposal.samples={self.samples} must be at least 1")
        if self.noise == "zero" and self.samples > 1:
            raise ValueError(
                f"proposal.samples={self.samples} with noise='zero' are copies of one sample: use noise='gaussian'"
            )

    @classmethod
    def of(cls, value: Proposal | Mapping[str, Any]) -> Proposal:
        """From a mapping, such as a section of a configuration; a Proposal is returned as it is."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise TypeError(
                f"proposal must be a section such as {{noise: gaussian, samples: 8, assign: wta}}, got {value!r}"
            )
        names = [field.name for field in dataclasses.fields(cls)]
        for name in value:
            if name not in names:
                raise unknown_argument(str(name), names, "proposal")
        return cls(**value)


def assignment(energy: Tensor, assign: str) -> Tensor:
    """Weights (B, G), rows summing to one and without gradient, of samples with energies (B, G)."""
    count = energy.shape[1]
    if assign == "all" or count == 1:
        return torch.full_like(energy, 1 / count, requires_grad=False)
    others = RELAXED_SHARE if assign == "relaxed_wta" else 0.0
    weights = torch.full_like(energy, others / (count - 1), requires_grad=False)
    return weights.scatter_(1, energy.detach().argmin(dim=1, keepdim=True), 1 - others)
