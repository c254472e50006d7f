"""MIP, the minimal iterative policy (Much Ado About Noising)."""

from __future__ import annotations

import dataclasses

from idp_workspace.policy.idp import IDPPolicy


class MIPPolicy(IDPPolicy):
    """IDP without geometry and with a second call:

        L = scale mean [ N((f(o, 0, 0) - a*) / t*) + N((f(o, a* + (1 - t*) eps, t*) - a*) / (1 - t*)) ],    N(r) = sum_d r_d^2
        act: f(o, f(o, 0, 0), t*)

    The loss is IDP's with m = 0, so both are trained by the same code; with `nfe: 1` it acts with the proposal alone.
    """

    @dataclasses.dataclass(frozen=True)
    class Options(IDPPolicy.Options):
        nfe: int = 2
        geometry: bool = False

        def __post_init__(self):
            super().__post_init__()
            if self.geometry:
                raise ValueError("geometry=True: MIP has no geometry; with it, it is IDPPolicy")
