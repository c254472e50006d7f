"""MIP, the minimal iterative policy (Much Ado About Noising)."""

from __future__ import annotations

import dataclasses

from idp_workspace.policy.idp import IDPOptions, IDPPolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class MIPOptions(IDPOptions):
    """Options of MIP: those of IDP, without geometry and with a second network call."""

    nfe: int = 2
    geometry: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.geometry:
            raise ValueError("geometry=True: MIP has no geometry; use IDPPolicy")


class MIPPolicy(IDPPolicy):
    """IDP with m = 0, refined by a second call.

        L = scale mean [ N((f(o, 0, 0) - a*) / t*) + N((f(o, a* + (1 - t*) eps, t*) - a*) / (1 - t*)) ]
        act: f(o, f(o, 0, 0), t*)

    with N(r) = sum_d r_d^2. IDP and MIP are trained by the same code. `nfe: 1` acts with the proposal alone.
    """

    Options = MIPOptions
    options: MIPOptions
