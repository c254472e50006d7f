"""Conditional expert geometry and its excess over the reference (paper, Sections 4.2 and 4.3).

Pure functions on tensors. Nothing here carries a gradient: the geometry shapes the loss, it is not trained. Everything runs in
float32 (the full matrix in float64) outside autocast, because differences of second moments do not survive half precision.

    h_i    = phi_i / (|phi_i| + eps)                           features, normalised
    w_ij   = softmax_j( zscore_j(h_i . h_j) / tau )            neighbourhood weights; rows sum to one
    v_cond = sum_j w_ij (a_j - a_i)^2                          how experts vary near observation i
    v_ref  = 1/B sum_i (a_i - mean a)^2                        how they vary overall
    s      = (v + eps)^-1/2 / mean_k (v_k + eps)^-1/2          normalised precision, of cond and of ref
    m      = relu( s_cond / (s_ref + eps) - 1 )                the local geometry excess
"""

from __future__ import annotations

import torch
from torch import Tensor

from idp_workspace.options import check_choices

EPS = 1e-6
LARGEST = 1e15  # of a number whose square, summed over a batch or divided by eps, still fits float32

#: Values of the switches that are words; the policy and the functions below check against the same table.
CHOICES = {
    "granularity": ("per_step", "flat", "dim"),
    "weights": ("softmax", "uniform", "shuffled"),
    "center": ("expert", "weighted_mean"),
    "reference": ("batch", "ema", "dataset", "none"),
    "excess": ("relative", "absolute"),
    "matrix": ("diag", "full"),
}


def check_switches(**switches) -> None:
    """Raise ValueError for a switch value that has no meaning."""
    check_choices(switches, CHOICES)
    if switches.get("tau", 1.0) <= 0:
        raise ValueError(f"tau={switches['tau']} must be positive")
    if switches.get("topk") is not None and switches["topk"] < 1:
        raise ValueError(f"topk={switches['topk']} must be at least 1, or null for all neighbours")
    if switches.get("rel_floor", 0.0) < 0:
        raise ValueError(f"rel_floor={switches['rel_floor']} must not be negative")
    if switches.get("m_clip") is not None and switches["m_clip"] < 0:
        raise ValueError(f"m_clip={switches['m_clip']} must not be negative")
    if switches.get("matrix") == "full":
        # The matrix form compares whole covariances step by step; these two have no counterpart in it.
        if switches.get("granularity", "per_step") != "per_step":
            raise ValueError("matrix='full' works on per-step D x D blocks: use granularity='per_step'")
        if switches.get("excess", "relative") != "relative":
            raise ValueError("matrix='full' is defined with the relative excess only")


def _scale(x: Tensor, dim: int | None = None) -> Tensor:
    """What to multiply x, or each of its slices along `dim`, by to stay within LARGEST: 1, exactly, unless an entry is beyond it."""
    peak = _plain(x).abs()
    peak = peak.amax() if dim is None else peak.amax(dim, keepdim=True)
    return torch.where(peak > LARGEST, LARGEST / peak, 1.0)


def _plain(x: Tensor) -> Tensor:
    """Without gradient, in float32 unless it is in float64."""
    return x.detach() if x.dtype == torch.float64 else x.detach().float()


@torch.no_grad()
def neighbor_weights(
    features: Tensor,
    *,
    tau: float = 1.0,
    weights: str = "softmax",
    self_neighbor: bool = True,
    topk: int | None = None,
    eps: float = EPS,
) -> Tensor:
    """Weights w (B, B) over the batch from features (B, F); each row sums to one.

    `shuffled` gives every sample the neighbourhood of another one, which keeps the weights' spectrum and destroys their meaning.
    At most two (B, B) matrices are alive at any time.
    """
    check_switches(tau=tau, weights=weights, topk=topk)
    batch = len(features)
    with torch.autocast(features.device.type, enabled=False):
        h = _plain(features.flatten(1))
        h = (h * _scale(h, dim=1)).float()
        if weights == "shuffled":
            h = h[torch.randperm(batch, device=h.device)]
        if weights == "uniform":
            z = h.new_zeros(batch, batch)
        else:
            h.div_(h.norm(dim=1, keepdim=True) + eps)
            z = h @ h.T
            std, mean = torch.std_mean(z, dim=1, correction=0, keepdim=True)
            z.sub_(mean).div_((std + eps) * tau)
        if not self_neighbor and batch > 1:
            z.fill_diagonal_(-torch.inf)
        if topk is not None and topk < batch:
            kth = z.topk(topk, dim=1).values[:, -1:]
            z.masked_fill_(z < kth, -torch.inf)
        # An in-place softmax: exp(z - max) / sum.
        z.sub_(z.amax(dim=1, keepdim=True)).exp_()
        return z.div_(z.sum(dim=1, keepdim=True))


@torch.no_grad()
def conditional_variance(w: Tensor, actions: Tensor, center: str = "expert", scale: Tensor | float = 1.0) -> Tensor:
    """v_cond (B, ...) from weights (B, B) and actions (B, ...) times `scale`, by moments.

    `expert`:        sum_j w_ij (a_j - a_i)^2   = W a^2 - 2 a (W a) + a^2
    `weighted_mean`: sum_j w_ij (a_j - abar_i)^2 = W a^2 - (W a)^2,  abar_i = sum_j w_ij a_j

    Two (B, B) x (B, HD) products; the (B, B, HD) tensor of differences is never formed. Centring the actions on the batch mean
    first changes nothing exactly and keeps the subtraction accurate in float32.
    """
    a = (_plain(actions) * scale).float().flatten(1)
    a = a - a.mean(dim=0)
    first, second = w @ a, w @ a.square()
    if center == "expert":
        v = second - 2 * a * first + a.square()
    else:
        v = second - first.square()
    return v.clamp_(min=0).view(actions.shape)


@torch.no_grad()
def conditional_covariance(w: Tensor, actions: Tensor, center: str = "expert", scale: Tensor | float = 1.0) -> Tensor:
    """G (B, H, D, D), the matrix form of `conditional_variance`, its diagonal: each step's D x D block, in float64.

    `expert`:        G_i = sum_j w_ij (a_j - a_i)(a_j - a_i)^T
    `weighted_mean`: G_i = sum_j w_ij (a_j - abar_i)(a_j - abar_i)^T,  abar_i = sum_j w_ij a_j

    Positive definiteness to 1e-6 is beyond float32 once D is large (mps has no float64 and makes do with it).
    """
    a = actions.detach().to(torch.float32 if actions.device.type == "mps" else torch.float64) * scale
    a = a - a.mean(dim=0)
    w = w.to(a.dtype)
    outer = a.unsqueeze(-1) * a.unsqueeze(-2)  # (B, H, D, D)
    first = (w @ a.flatten(1)).view_as(a)
    second = (w @ outer.flatten(1)).view_as(outer)
    if center == "expert":
        cross = a.unsqueeze(-1) * first.unsqueeze(-2)
        return second - cross - cross.mT + outer
    return second - first.unsqueeze(-1) * first.unsqueeze(-2)


@torch.no_grad()
def reference_covariance(actions: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """Sigma_ref (H, D, D): covariance over the batch of actions (B, H, D) times `scale`, in float64."""
    a = actions.detach().to(torch.float32 if actions.device.type == "mps" else torch.float64) * scale
    a = a - a.mean(dim=0)
    return torch.einsum("bhd,bhe->hde", a, a) / len(a)


@torch.no_grad()
def reference_variance(actions: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """v_ref (H, D): population variance over the batch of actions (B, H, D) times `scale`."""
    return (_plain(actions) * scale).float().var(dim=0, correction=0)


def _precision(v: Tensor, floor: Tensor | float, granularity: str) -> Tensor:
    """s = (v + floor)^-1/2 divided by its mean over the coordinates that `granularity` compares; v is (..., H, D)."""
    s = (v + floor).rsqrt()
    return s / s.mean(dim=(-2, -1) if granularity == "flat" else -1, keepdim=True)


@torch.no_grad()
def geometry_excess(
    features: Tensor,
    actions: Tensor,
    *,
    granularity: str = "per_step",
    self_neighbor: bool = True,
    tau: float = 1.0,
    topk: int | None = None,
    center: str = "expert",
    reference: str = "batch",
    excess: str = "relative",
    weights: str = "softmax",
    matrix: str = "diag",
    rel_floor: float = 0.0,
    m_clip: float | None = None,
    v_ref: Tensor | None = None,
    eps: float = EPS,
) -> Tensor:
    """m (B, H, D), or M (B, H, D, D) with matrix='full', from features (B, F) and expert chunks (B, H, D).

    The defaults are the paper's. Larger m means: here, experts agree on this coordinate more than they do overall.

    granularity    which coordinates share one mean: D at each step, H*D, or D with variances pooled over the chunk
    self_neighbor  whether sample i counts among its own neighbours; cancels in the normalisation of s
    tau, topk      softmax temperature on the z-scores, and how many neighbours remain
    center         v_cond around the expert's own action, or around the neighbourhood's mean
    reference      where v_ref comes from; 'ema' and 'dataset' take it from the argument `v_ref` (H, D); 'none' sets s_ref to 1
    excess         relu(s_cond / s_ref - 1) or relu(s_cond - s_ref)
    weights        softmax, or the ablations uniform and shuffled
    rel_floor      adds rel_floor * v_ref to both variances; needed for sharp neighbourhoods (tau < 0.5 or topk)
    m_clip         upper bound on m (on the eigenvalues of M)

    A batch of fewer than two samples has no neighbourhood: m = 0. With D = 1 and per-step granularity m is 0 by construction.
    """
    check_switches(
        granularity=granularity,
        tau=tau,
        topk=topk,
        center=center,
        reference=reference,
        excess=excess,
        weights=weights,
        matrix=matrix,
        rel_floor=rel_floor,
        m_clip=m_clip,
    )
    if actions.ndim != 3 or len(features) != len(actions):
        raise ValueError(
            f"need features (B, F) and actions (B, H, D), got {tuple(features.shape)} and {tuple(actions.shape)}"
        )
    if len(actions) < 2:
        return actions.new_zeros(*actions.shape, *actions.shape[2:] if matrix == "full" else ())
    with torch.autocast(actions.device.type, enabled=False):
        w = neighbor_weights(features, tau=tau, weights=weights, self_neighbor=self_neighbor, topk=topk, eps=eps)
        scale = _scale(actions)  # m does not depend on it, save for eps
        if reference in ("ema", "dataset"):
            if v_ref is None:
                raise ValueError(f"reference={reference!r} needs v_ref, the (H, D) variance to compare with")
            v_ref = v_ref.detach().float().clamp(max=LARGEST**2) * scale.square()
        else:
            v_ref = reference_variance(actions, scale)
        largest = min(
            torch.finfo(actions.dtype).max, torch.finfo(torch.float32).max
        )  # half precision ends at 65504, m may not
        m_clip = largest if m_clip is None else min(m_clip, largest)
        if matrix == "full":
            return _full_excess(w, actions, scale, v_ref, center, reference, rel_floor, m_clip, eps).to(actions.dtype)
        v = conditional_variance(w, actions, center, scale)
        if granularity == "dim":
            v, v_ref = v.mean(dim=1, keepdim=True), v_ref.mean(dim=0, keepdim=True)
        floor = eps + rel_floor * v_ref
        s = _precision(v, floor, granularity)
        s_ref = torch.ones_like(v_ref) if reference == "none" else _precision(v_ref, floor, granularity)
        m = s / (s_ref + eps) - 1 if excess == "relative" else s - s_ref
        return m.clamp_(min=0, max=m_clip).expand(actions.shape).to(actions.dtype)


def _full_excess(
    w: Tensor,
    actions: Tensor,
    scale: Tensor,
    v_ref: Tensor,
    center: str,
    reference: str,
    rel_floor: float,
    m_clip: float,
    eps: float,
) -> Tensor:
    """The multivariate excess of Appendix A.4 on each step's D x D block: M (B, H, D, D).

        R_i = P_ref^-1/2 P_i P_ref^-1/2,   P = (covariance + floor)^-1,   M_i = U relu(eig(R_i) - 1) U^T

    With diagonal covariances it reduces to relu(v_ref / v_cond - 1). Reference 'batch' uses the full covariance over the batch;
    'ema' and 'dataset' know variances only and use a diagonal one; 'none' compares with the identity.
    """
    g = conditional_covariance(w, actions, center, scale)
    if not g.isfinite().all():
        return torch.full_like(g, torch.nan)  # as the diagonal does, where eigh would raise an error of its own
    v_ref = v_ref.to(g.dtype)
    floor = torch.diag_embed(eps + rel_floor * v_ref)  # (H, D, D)
    if reference == "batch":
        sigma = reference_covariance(actions, scale)
    elif reference == "none":
        sigma = torch.eye(g.shape[-1], dtype=g.dtype, device=g.device).expand(g.shape[1:])
    else:
        sigma = torch.diag_embed(v_ref)
    values, vectors = torch.linalg.eigh(sigma + floor)
    root = vectors @ torch.diag_embed(values.clamp(min=0).sqrt()) @ vectors.mT  # (Sigma_ref + floor)^1/2 = P_ref^-1/2
    root, bound = root.expand_as(g), values.amax(-1) / eps
    chol, failed = torch.linalg.cholesky_ex(g + floor)
    x = torch.linalg.solve_triangular(chol, root, upper=False)
    # No eigenvalue of g + floor is below eps, so none of R above the bound, but rounding errors, which grow with the actions, may say
    # otherwise. Such blocks are taken from eigenvalues that are put right.
    wrong = (failed != 0) | ~(x.square().sum(dim=(-2, -1)) <= 2 * g.shape[-1] * bound)
    if wrong.any():
        values, vectors = torch.linalg.eigh((g + floor)[wrong])
        x[wrong] = values.clamp(min=eps).rsqrt().unsqueeze(-1) * (vectors.mT @ root[wrong])
    values, vectors = torch.linalg.eigh(x.mT @ x)
    return vectors @ torch.diag_embed((values - 1).clamp(min=0, max=m_clip)) @ vectors.mT


@torch.no_grad()
def effective_neighbors(w: Tensor) -> Tensor:
    """1 / sum_j w_ij^2 for each row of w (B, B): how many samples a neighbourhood is worth."""
    return w.square().sum(dim=1).reciprocal()
