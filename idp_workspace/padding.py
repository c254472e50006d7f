"""Steps that pad the end of an episode: they count neither in the geometry nor in the loss.

Some hosts fill chunks that reach beyond an episode with copies of its last action, and say so with a mask (N, H), true
where a step was recorded. At a padded step a sample is nobody's neighbour and not part of the reference: each step is
compared among the samples that have an action there. Their observations exist, so the weights of neighbours are those
of the whole batch, which then sum to one over the samples that are left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from idp_workspace.geometry import Samples

if TYPE_CHECKING:
    from idp_workspace.geometry_variants import Geometry
    from idp_workspace.policy.idp_options import IDPOptions


def mask_of(among: Samples | None) -> Tensor | None:
    """Return the mask of the samples (N, H) as numbers; None if all of their steps were recorded."""
    return None if among is None or among.mask is None else among.mask.float()


def mean(a: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the samples that have a step: (H, D) of a (N, H, D)."""
    weight = mask.unsqueeze(-1)
    return (weight * a).sum(dim=0) / weight.sum(dim=0).clamp(min=1)


def reference_variance(a: Tensor, mask: Tensor) -> Tensor:
    """v_ref (H, D) over the samples that have a step."""
    a = a.detach().float()
    return mean((a - mean(a, mask)).square(), mask)


def conditional_variance(w: Tensor, a: Tensor, among: Tensor, mask: Tensor, center: str = "expert") -> Tensor:
    """v_cond (B, H, D): `geometry.conditional_variance`, or around the mean, over the neighbours that have a step."""
    center_of = mean(among, mask)
    a_i, a_j = a - center_of, mask.unsqueeze(-1) * (among - center_of)
    total = shares(w, mask).clamp(min=1e-12).unsqueeze(-1)
    first = (w @ a_j.flatten(1)).view_as(a) / total
    second = (w @ a_j.square().flatten(1)).view_as(a) / total
    v = second - 2 * a_i * first + a_i.square() if center == "expert" else second - first.square()
    return v.clamp(min=0)


def shares(w: Tensor, mask: Tensor) -> Tensor:
    """Return how much of the weight of a sample's neighbours is on those that have a step: (B, H)."""
    return w @ mask


def where_known(m: Tensor, w: Tensor, mask: Tensor, first: int) -> Tensor:
    """Return m where the sample has the step and a neighbour, else 0."""
    known = (mask[first : first + len(m)] > 0) & (shares(w, mask) > 0) & (mask.sum(dim=0) > 1)
    return m * known.unsqueeze(-1)


def kept(energy: Tensor, mask: Tensor | None) -> Tensor:
    """Return the energies of recorded steps: of (n, H), the first n samples of a mask's batch; all without a mask."""
    return energy if mask is None else energy[mask[: len(energy)]]


def check(mask: Tensor, actions: Tensor, options: IDPOptions) -> None:
    """Raise ValueError unless the mask fits the chunks (B, H, D), and the options know masks."""
    if mask.shape != actions.shape[:2] or mask.dtype != torch.bool:
        raise ValueError(
            f"a mask of recorded steps must be boolean and of shape {tuple(actions.shape[:2])}, got {mask.dtype} "
            f"{tuple(mask.shape)}"
        )
    check_switches(options)
    if options.bank_size:
        raise ValueError("a memory bank does not know padded steps: use bank_size=0")
    if not options.proposal.is_paper:
        raise ValueError("several proposals, or proposals from noise, do not know padded steps: use the paper's")


def check_switches(g: Geometry) -> None:
    """Raise ValueError for switches that mix the steps of a chunk."""
    if g.granularity != "per_step" or g.matrix != "diag":
        raise ValueError(
            f"granularity={g.granularity!r} with matrix={g.matrix!r} mixes recorded and padded steps: use "
            "'per_step' and 'diag'"
        )
