"""Beyond the paper's default geometry: its other readings, its ablations, and the full matrix of Appendix A.4.

Each switch is a field of `Geometry`. The defaults are the paper's and run through `geometry.excess`; any other value
runs through `excess` below, which changes one step of the same computation.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Annotated, Literal

import torch
from torch import Tensor

from diffusion_policy.model.common.normalizer import LinearNormalizer
from idp_workspace import geometry, padding
from idp_workspace.geometry import EPS, Samples, conditional_variance, precision, reference_variance
from idp_workspace.options import Above, AtLeast, Options

EMA_RATE = 0.99
ROWS = 1024  # of the weights (B, N) that are in memory at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry(Options):
    """The switches of the geometry."""

    granularity: Literal["per_step", "flat", "dim"] = "per_step"
    """Which coordinates share one mean in Eq. (9): D at each chunk step, all H D, or D with variances pooled over H."""
    self_neighbor: bool = True
    """Whether a sample is its own neighbour. Both give the same m: w_ii cancels in the normalisation of Eq. (9)."""
    tau: Annotated[float, Above(0)] = 1.0
    """Temperature of the softmax over neighbours."""
    topk: Annotated[int | None, AtLeast(1)] = None
    """Number of neighbours to keep; null keeps all."""
    center: Literal["expert", "weighted_mean"] = "expert"
    """What v_cond is taken around: the expert's own action, or the mean action of the neighbourhood."""
    reference: Literal["batch", "ema", "dataset", "none"] = "batch"
    """Where v_ref comes from: the batch, a running average, the dataset, or no reference (s_ref = 1)."""
    excess: Literal["relative", "absolute"] = "relative"
    """ReLU(s_cond / s_ref - 1), or ReLU(s_cond - s_ref)."""
    weights: Literal["softmax", "uniform", "shuffled"] = "softmax"
    """Neighbour weights. `shuffled` gives each sample the neighbourhood of another one."""
    matrix: Literal["diag", "full"] = "diag"
    """The paper's diagonal m, or the matrix M of Appendix A.4 for each chunk step."""
    rel_floor: Annotated[float, AtLeast(0)] = 0.0
    """Adds rel_floor * v_ref to both variances. Sharp neighbourhoods (tau < 0.5, or topk) need it."""
    m_clip: Annotated[float | None, AtLeast(0)] = None
    """Upper bound of m, or of the eigenvalues of M."""
    is_paper = True
    """Whether all switches have the paper's values; not one of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Appendix A.4 compares whole covariances step by step; these two switches have no counterpart there.
        if self.matrix == "full" and self.granularity != "per_step":
            raise ValueError("matrix='full' works on per-step D x D blocks: use granularity='per_step'")
        if self.matrix == "full" and self.excess != "relative":
            raise ValueError("matrix='full' is defined with excess='relative' only")

        # Known beforehand, because torch.compile cannot ask a dataclass for its fields.
        paper = all(getattr(self, field.name) == field.default for field in dataclasses.fields(Geometry))
        object.__setattr__(self, "is_paper", paper)


def bounded(g: Geometry, dtype: torch.dtype) -> Geometry:
    """Bound m for actions in float16, which ends at 65504."""
    if dtype != torch.float16:
        return g
    largest = torch.finfo(dtype).max
    return dataclasses.replace(g, m_clip=largest if g.m_clip is None else min(g.m_clip, largest))


@contextlib.contextmanager
def without_tf32(device: torch.device) -> Iterator[None]:
    """Multiply matrices in full float32 on a GPU: differences of second moments do not survive the 10 bits of TF32.

    Compiled code does not notice the switch; a compiled training leaves TF32 off.
    """
    before = torch.get_float32_matmul_precision() if device.type == "cuda" else "highest"
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def in_parts(
    features: Tensor, actions: Tensor, among: Samples | None = None
) -> Iterator[tuple[Tensor, Tensor, Samples | None]]:
    """Yield at most ROWS samples at a time in float32: phi, a, and among which samples they look for neighbours."""
    phi, a = plain(features).flatten(1), plain(actions)
    if among is not None:
        among = among._replace(phi=plain(among.phi).flatten(1), a=plain(among.a))
    elif len(a) > ROWS:
        among = Samples(phi, a)
    for i in range(0, len(a), ROWS):
        yield phi[i : i + ROWS], a[i : i + ROWS], among and among._replace(first=among.first + i)


def plain(x: Tensor) -> Tensor:
    return x.detach().float()


# ------------------------------------------------------------------ the diagonal form
def excess(
    phi: Tensor,
    a: Tensor,
    g: Geometry,
    v_ref: Tensor | None = None,
    eps: float = EPS,
    among: Samples | None = None,
) -> Tensor:
    """Return m (B, H, D), or M (B, H, D, D), for any values of the switches; features and actions in float32."""
    w = neighbor_weights(phi, g, eps, among)
    a_j, mask = (a, None) if among is None else (among.a, padding.mask_of(among))
    if g.reference in ("ema", "dataset"):
        if v_ref is None:
            raise ValueError(f"reference={g.reference!r} needs v_ref, the (H, D) variance to compare with")
        v_ref = v_ref.detach().float()
    else:
        v_ref = reference_variance(a_j) if mask is None else padding.reference_variance(a_j, mask)
    if g.matrix == "full":
        return full_excess(w, a, v_ref, g, eps, a_j).to(a.dtype)
    if mask is not None:
        padding.check_switches(g)
        v = padding.conditional_variance(w, a, a_j, mask, g.center)
    else:
        v = (conditional_variance if g.center == "expert" else variance_around_mean)(w, a, among and among.a)
    if g.granularity == "dim":
        v, v_ref = v.mean(dim=1, keepdim=True), v_ref.mean(dim=0, keepdim=True)
    normalise = precision_over_chunk if g.granularity == "flat" else precision
    floor = eps + g.rel_floor * v_ref
    s = normalise(v, floor)
    s_ref = torch.ones_like(v_ref) if g.reference == "none" else normalise(v_ref, floor)
    m = s / (s_ref + eps) - 1 if g.excess == "relative" else s - s_ref
    m = m.clamp(min=0, max=g.m_clip).expand(a.shape)
    return m if mask is None or among is None else padding.where_known(m, w, mask, among.first)


@torch.no_grad()
def neighbor_weights(phi: Tensor, g: Geometry, eps: float = EPS, among: Samples | None = None) -> Tensor:
    """Return w (B, N) under the switches tau, topk, weights and self_neighbor; N = B without `among`."""
    phi = phi.float()
    phi_j, first = (None, 0) if among is None else (among.phi.float(), among.first)
    count = len(phi if phi_j is None else phi_j)
    if g.weights == "shuffled":  # keeps the spectrum of the weights and destroys their meaning
        phi_j = (phi if phi_j is None else phi_j)[torch.randperm(count, device=phi.device)]
        phi = phi_j[first : first + len(phi)]
    s = phi.new_zeros(len(phi), count) if g.weights == "uniform" else geometry.similarity(phi, g.tau, eps, phi_j)
    if not g.self_neighbor and count > 1:
        s.diagonal(first).fill_(-torch.inf)
    if g.topk is not None and g.topk < count:
        kth = s.topk(g.topk, dim=1).values[:, -1:]
        s.masked_fill_(s < kth, -torch.inf)
    return geometry.softmax(s)


def variance_around_mean(w: Tensor, a: Tensor, among: Tensor | None = None) -> Tensor:
    """sum_j w_ij (a_j - abar_i)^2 = W a^2 - (W a)^2 with abar_i = sum_j w_ij a_j: (B, H, D)."""
    a_j = a if among is None else among
    a_j = (a_j - a_j.mean(dim=0)).flatten(1)
    return (w @ a_j.square() - (w @ a_j).square()).clamp(min=0).view_as(a)


def precision_over_chunk(v: Tensor, eps: float | Tensor) -> Tensor:
    """Eq. (9) with one mean over all H D coordinates of a chunk."""
    s = (v + eps).rsqrt()
    return s / s.mean(dim=(-2, -1), keepdim=True)


# ------------------------------------------------------------------ Appendix A.4: the full matrix
def full_excess(
    w: Tensor, a: Tensor, v_ref: Tensor, g: Geometry, eps: float = EPS, among: Tensor | None = None
) -> Tensor:
    """M_i = U relu(eig(R_i) - 1) U^T with R_i = P_ref^-1/2 P_i P_ref^-1/2, for each chunk step: (B, H, D, D).

    P is the inverse of a covariance plus a floor. Reference 'batch' uses the full covariance of the batch; 'ema' and
    'dataset' know variances only and use a diagonal one; 'none' compares with the identity.
    """
    cov = conditional_covariance(w, a, g.center, among)
    if not cov.isfinite().all():
        return torch.full_like(cov, torch.nan)  # eigh would fail; the training loop reports the loss of this step
    v_ref = v_ref.to(cov.dtype)
    floor = torch.diag_embed(eps + g.rel_floor * v_ref)  # (H, D, D)
    if g.reference == "batch":
        sigma = reference_covariance(a if among is None else among)
    elif g.reference == "none":
        sigma = torch.eye(cov.shape[-1], dtype=cov.dtype, device=cov.device).expand(cov.shape[1:])
    else:
        sigma = torch.diag_embed(v_ref)
    values, vectors = torch.linalg.eigh(sigma + floor)
    root = vectors @ torch.diag_embed(values.clamp(min=0).sqrt()) @ vectors.mT  # (Sigma_ref + floor)^1/2 = P_ref^-1/2
    root, bound = root.expand_as(cov), values.amax(-1) / eps
    chol, failed = torch.linalg.cholesky_ex(cov + floor)
    x = torch.linalg.solve_triangular(chol, root, upper=False)
    # No eigenvalue of cov + floor is below eps, so none of R is above the bound. Where rounding says otherwise, R is
    # rebuilt from clamped eigenvalues.
    wrong = (failed != 0) | ~(x.square().sum(dim=(-2, -1)) <= 2 * cov.shape[-1] * bound)
    if wrong.any():
        values, vectors = torch.linalg.eigh((cov + floor)[wrong])
        x[wrong] = values.clamp(min=eps).rsqrt().unsqueeze(-1) * (vectors.mT @ root[wrong])
    values, vectors = torch.linalg.eigh(x.mT @ x)
    return vectors @ torch.diag_embed((values - 1).clamp(min=0, max=g.m_clip)) @ vectors.mT


@torch.no_grad()
def conditional_covariance(w: Tensor, actions: Tensor, center: str = "expert", among: Tensor | None = None) -> Tensor:
    """G_i = sum_j w_ij (a_j - c_i)(a_j - c_i)^T around c_i, the expert's or the weighted mean action: (B, H, D, D).

    In float64: float32 cannot resolve positive definiteness to 1e-6 once D is large (mps has no float64).
    """
    a_j = exact(actions if among is None else among)
    a_i = exact(actions) - a_j.mean(dim=0)
    a_j = a_j - a_j.mean(dim=0)
    w = w.to(a_j.dtype)
    first = (w @ a_j.flatten(1)).view_as(a_i)
    second = (w @ outer(a_j).flatten(1)).view(*a_i.shape, a_i.shape[2])
    if center == "expert":
        cross = a_i.unsqueeze(-1) * first.unsqueeze(-2)
        return second - cross - cross.mT + outer(a_i)
    return second - first.unsqueeze(-1) * first.unsqueeze(-2)


@torch.no_grad()
def reference_covariance(actions: Tensor) -> Tensor:
    """Sigma_ref, the covariance over the batch of actions (B, H, D), in float64: (H, D, D)."""
    a = exact(actions)
    a = a - a.mean(dim=0)
    return torch.einsum("bhd,bhe->hde", a, a) / len(a)


def outer(a: Tensor) -> Tensor:
    """a a^T at each chunk step."""
    return a.unsqueeze(-1) * a.unsqueeze(-2)


def exact(x: Tensor) -> Tensor:
    return x.detach().to(torch.float32 if x.device.type == "mps" else torch.float64)


# ------------------------------------------------------------------ a reference from more than the batch
class ReferenceVariance:
    """Mixin of a policy: keeps v_ref (H, D) for reference='ema' and reference='dataset' as a buffer of the policy."""

    options: Geometry
    reference_variance: Tensor
    training: bool

    def make_reference(self, horizon: int, action_dim: int) -> None:
        if self.options.reference in ("ema", "dataset"):
            # Zero until the first batch (ema) or the normaliser's statistics (dataset) fill it.
            self.register_buffer("reference_variance", torch.zeros(horizon, action_dim))  # type: ignore[attr-defined]

    def reference(self, actions: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """Return v_ref for a batch, after updating a running average; None if the batch is the reference."""
        if self.options.reference == "ema" and self.training:
            first = not bool(self.reference_variance.any())
            v = reference_variance(actions) if mask is None else padding.reference_variance(actions, mask.float())
            self.reference_variance.lerp_(v, 1.0 if first else 1 - EMA_RATE)
        return self.reference_variance if self.options.reference in ("ema", "dataset") else None

    def take_reference_from(self, normalizer: LinearNormalizer) -> None:
        """Fill v_ref with the dataset's variance of normalised actions."""
        if self.options.reference == "dataset":
            field = normalizer["action"].params_dict
            std = field["input_stats"]["std"] * field["scale"]
            self.reference_variance.copy_(std.detach().square().expand_as(self.reference_variance))


# ------------------------------------------------------------------ statistics for the log
@torch.no_grad()
def effective_neighbors(w: Tensor) -> Tensor:
    """1 / sum_j w_ij^2 for each row of w (B, B): the effective sample size of a neighbourhood."""
    return w.square().sum(dim=1).reciprocal()


def statistics(features: Tensor, m: Tensor, g: Geometry, among: Samples | None = None) -> dict[str, float]:
    """Return the size of the excess and of the neighbourhoods in one batch; of its first part, if it is large."""
    values = (torch.diagonal(m, dim1=-2, dim2=-1) if m.ndim == 4 else m).float().flatten()
    # A shuffled neighbourhood has the size of the original one, and logging must not draw random numbers.
    phi, _, among = next(in_parts(features, m, among))
    g = dataclasses.replace(g, weights="softmax") if g.weights == "shuffled" else g
    w = neighbor_weights(phi, g, among=among)
    return {
        "m_mean": values.mean().item(),
        "m_p99": values.kthvalue(max(1, round(0.99 * len(values)))).values.item(),
        "m_max": values.max().item(),
        "m_positive": (values > 0).float().mean().item(),
        "effective_neighbors": effective_neighbors(w).mean().item(),
    }
