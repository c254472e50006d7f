"""Conditional expert geometry and its excess over the reference: Sections 4.2 and 4.3 of the paper.

Equations are numbered as in the paper. B samples in a batch, F features, H chunk steps, D action dimensions.

    phi (B, F)     features of the observations, the encoder's output
    a   (B, H, D)  expert action chunks a*, normalised
    m   (B, H, D)  geometry excess: large where this observation constrains the action

The neighbours of a sample are the samples of its batch. `among` gives other ones, N of them: each part of a large batch
looks among the whole batch, and a small batch can also look among samples of other processes or earlier batches.

Nothing here carries a gradient: the geometry shapes the loss, it is not trained. Everything is computed in float32,
because differences of second moments do not survive half precision. Other readings of the paper, its ablations and the
full matrix of Appendix A.4 are in `geometry_variants`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from idp_workspace.geometry_variants import Geometry

EPS = 1e-6


class Samples(NamedTuple):
    """The samples among which neighbours are looked for."""

    phi: Tensor
    """Features (N, F)."""
    a: Tensor
    """Actions (N, H, D)."""
    first: int = 0
    """Where the first of those that look for neighbours is itself."""
    mask: Tensor | None = None
    """Which steps of the actions were recorded (N, H), see `padding`; None: all."""


# ------------------------------------------------------------------ Section 4.2: conditional expert geometry
def similarity(phi: Tensor, tau: float = 1.0, eps: float = EPS, among: Tensor | None = None) -> Tensor:
    """Row-normalised inner products s_bar_ij / tau (B, N) of features phi (B, F) and `among` (N, F), or phi itself."""
    h = unit(phi, eps)
    s = h @ (h if among is None or among is phi else unit(among, eps)).T  # Eq. (7)
    sigma, mu = torch.std_mean(s, dim=1, correction=0, keepdim=True)
    return s.sub_(mu).div_((sigma + eps) * tau)  # in place: (B, B) matrices are large


def unit(phi: Tensor, eps: float = EPS) -> Tensor:
    """h = phi / (|phi| + eps)."""
    return phi / (phi.norm(dim=1, keepdim=True) + eps)


def softmax(s: Tensor) -> Tensor:
    """w_ij = exp(s_ij) / sum_k exp(s_ik), in place of s."""
    w = s.sub_(s.amax(dim=1, keepdim=True)).exp_()
    return w.div_(w.sum(dim=1, keepdim=True))


def neighbor_weights(phi: Tensor, tau: float = 1.0, eps: float = EPS, among: Tensor | None = None) -> Tensor:
    """w (B, N): how much sample j counts as a neighbour of sample i. Rows sum to one; the sample itself is included."""
    return softmax(similarity(phi, tau, eps, among))


def conditional_variance(w: Tensor, a: Tensor, among: Tensor | None = None) -> Tensor:
    """v_cond_i = sum_j w_ij (a_j - a_i)^2, the diagonal of G_i in Eq. (8): (B, H, D), with a_j of `among` or of a.

    By moments, W a^2 - 2 a (W a) + a^2, so that the (B, N, H D) differences are never formed. Centring the actions
    first does not change the result and keeps the subtraction accurate.
    """
    a_j = a if among is None else among
    a_i, a_j = (a - a_j.mean(dim=0)).flatten(1), (a_j - a_j.mean(dim=0)).flatten(1)
    v = w @ a_j.square() - 2 * a_i * (w @ a_j) + a_i.square()
    return v.clamp(min=0).view_as(a)


# ------------------------------------------------------------------ Section 4.3: local geometry excess
def reference_variance(a: Tensor) -> Tensor:
    """v_ref = 1/B sum_i (a_i - mean a)^2: (H, D)."""
    return a.detach().float().var(dim=0, correction=0)


def precision(v: Tensor, eps: float | Tensor = EPS) -> Tensor:
    """s = (v + eps)^-1/2 / mean_k (v_k + eps)^-1/2, Eq. (9), over the action dimensions of each chunk step."""
    s = (v + eps).rsqrt()
    return s / s.mean(dim=-1, keepdim=True)


def excess(phi: Tensor, a: Tensor, eps: float = EPS, among: Samples | None = None) -> Tensor:
    """m = ReLU(s_cond / (s_ref + eps) - 1), Eq. (10): (B, H, D)."""
    phi_j, a_j = (among or Samples(phi, a))[:2]
    w = neighbor_weights(phi, eps=eps, among=phi_j)
    s_cond = precision(conditional_variance(w, a, a_j), eps)
    s_ref = precision(reference_variance(a_j), eps)
    return torch.relu(s_cond / (s_ref + eps) - 1)


# ------------------------------------------------------------------ entry points
@torch.no_grad()
def compute_excess(
    features: Tensor,
    actions: Tensor,
    geometry: Geometry,
    v_ref: Tensor | None = None,
    eps: float = EPS,
    among: Samples | None = None,
) -> Tensor:
    """Return m as the switches in `geometry` define it, for features (B, F) and actions (B, H, D).

    Neighbours and reference are those of the batch, or of `among`, which includes the batch. A sample that is alone has
    no neighbourhood: m = 0. A large batch is computed in parts, so that the memory grows with B, not with B^2.
    """
    from idp_workspace import geometry_variants  # it builds on this module

    if len(actions if among is None else among.a) < 2:
        return actions.new_zeros(*actions.shape, *actions.shape[2:] if geometry.matrix == "full" else ())
    geometry = geometry_variants.bounded(geometry, actions.dtype)
    with torch.autocast(actions.device.type, enabled=False), geometry_variants.without_tf32(actions.device):
        parts = geometry_variants.in_parts(features, actions, among)
        if geometry.is_paper and (among is None or among.mask is None):
            m = [excess(phi, a, eps, others) for phi, a, others in parts]
        else:
            m = [geometry_variants.excess(phi, a, geometry, v_ref, eps, others) for phi, a, others in parts]
    return torch.cat(m).to(actions.dtype)


def geometry_excess(
    features: Tensor, actions: Tensor, *, v_ref: Tensor | None = None, eps: float = EPS, **switches: Any
) -> Tensor:
    """Return m (B, H, D), or M (B, H, D, D) with matrix='full', from features (B, F) and expert chunks (B, H, D).

    The switches and their defaults, which are the paper's, are the fields of `geometry_variants.Geometry`. `v_ref`
    (H, D) is the variance to compare with under reference='ema' and reference='dataset'. The result has no gradient.
    """
    from idp_workspace.geometry_variants import Geometry

    if actions.ndim != 3 or len(features) != len(actions):
        shapes = f"{tuple(features.shape)} and {tuple(actions.shape)}"
        raise ValueError(f"need features (B, F) and actions (B, H, D), got {shapes}")
    return compute_excess(features, actions, Geometry(**switches), v_ref, eps)
