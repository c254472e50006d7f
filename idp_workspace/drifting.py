"""The explicit drifting field (Deng et al., "Generative Modeling via Drifting"), as used by the Naive Drifting baseline.

For one observation: generated samples x_g are attracted by positives y+ and repelled by each other. With targets
y = [x, y+], distances d_gk = |x_g - y_k| divided by their mean c, and for each temperature tau

    A    = sqrt( max( softmax_k(-d/tau) * softmax_g(-d/tau), floor ) )       affinity, normalised over both axes
    V_g  = sum_k A+_gk (sum A-_g) y+_k  -  sum_k A-_gk (sum A+_g) x_k         attraction minus repulsion
    V    = sum_tau V_tau / rms(V_tau)                                         field in coordinates of unit mean distance

and the loss is |x - sg(x + V)|^2. Positives may carry weights w_k: then A+ <- A+ w, and c is the weighted mean distance. With one sample and one positive the field is a positive multiple of (y+ - x), so its gradient is
that of the squared error (paper, Proposition 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from idp_workspace.options import check_choices

CHOICES = {
    "kernel": ("laplace", "gaussian"),
    "normalise_axes": ("xy", "y", "none"),
    "feature_norm_scope": ("batch", "per_obs"),
}
TEMPERATURES = (0.02, 0.05, 0.2)
SELF_MASK = 100.0  # added to a sample's (normalised) distance to itself: it does not repel itself
MIN_SCALE = 1e-3  # of the mean distance, so that identical samples do not divide by zero
MIN_RMS = 1e-4


def check_switches(**switches) -> None:
    """Raise ValueError for a switch value that has no meaning."""
    check_choices(switches, CHOICES)
    temperatures = switches.get("temperatures", TEMPERATURES)
    if not temperatures or min(temperatures) <= 0:
        raise ValueError(f"temperatures={list(temperatures)} must be positive, and at least one")


@torch.no_grad()
def _scaled_field(
    generated: Tensor,
    positives: Tensor,
    *,
    temperatures: Sequence[float] = TEMPERATURES,
    kernel: str = "laplace",
    normalise_axes: str = "xy",
    feature_norm: bool = True,
    feature_norm_scope: str = "batch",
    drift_norm: bool = True,
    affinity_floor: float = 1e-6,
    self_mask: bool = True,
    positive_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Field in scaled coordinates (N, B, G, S) and the scale (N, B|1, 1, 1) that coordinates were divided by.

    The leading axis N separates problems whose normalisers must not mix (the steps of a chunk). positive_weights (N, B, P), not
    negative, multiply the positives' affinities after the softmaxes, as the published field does for its guidance; a weight of zero
    takes a positive out of the attraction (it stays in the softmaxes' denominators, which only rescale a sample's field). None
    means one each.
    """
    check_switches(
        temperatures=temperatures, kernel=kernel, normalise_axes=normalise_axes, feature_norm_scope=feature_norm_scope
    )
    x, positive = generated.detach().float(), positives.detach().float()
    n_generated, size = x.shape[-2:]
    targets = torch.cat([x, positive], dim=-2)  # (N, B, G + P, S)
    distance = torch.cdist(x, targets, compute_mode="donot_use_mm_for_euclid_dist").clamp(min=1e-4)
    scale = x.new_ones(x.shape[0], 1, 1, 1)
    weights = None
    if positive_weights is not None:
        if positive_weights.shape != positive.shape[:-1]:
            raise ValueError(
                f"positive_weights has shape {tuple(positive_weights.shape)}, the positives {tuple(positive.shape[:-1])}"
            )
        weights = positive_weights.detach().float().unsqueeze(-2)  # (N, B, 1, P)
    if feature_norm:
        dims = (1, 2, 3) if feature_norm_scope == "batch" else (2, 3)
        if weights is None:
            mean = distance.mean(dim=dims, keepdim=True)
        else:
            share = torch.cat(
                [torch.ones_like(weights[..., :1]).expand(*weights.shape[:-1], n_generated), weights], dim=-1
            )
            mean = (share * distance).mean(dim=dims, keepdim=True) / share.mean(dim=dims, keepdim=True)
        scale = (mean / size**0.5).clamp(min=MIN_SCALE)
        distance = distance / mean.clamp(min=MIN_SCALE)
    if self_mask:
        distance = distance.clone()
        distance[..., :n_generated].diagonal(dim1=-2, dim2=-1).add_(SELF_MASK)
    if kernel == "gaussian":
        distance = distance.square()
    x, targets = x / scale, targets / scale
    field = torch.zeros_like(x)
    for tau in temperatures:
        logits = -distance / tau
        if normalise_axes == "none":
            affinity = logits.exp()
        else:
            affinity = logits.softmax(dim=-1)
            if normalise_axes == "xy":
                affinity = (affinity * logits.softmax(dim=-2)).clamp(min=affinity_floor).sqrt()
        repel, attract = affinity[..., :n_generated], affinity[..., n_generated:]
        if weights is not None:
            attract = attract * weights
        coefficient = torch.cat([-repel * attract.sum(-1, keepdim=True), attract * repel.sum(-1, keepdim=True)], dim=-1)
        v = coefficient @ targets - coefficient.sum(-1, keepdim=True) * x
        if drift_norm:
            v = v / v.square().mean(dim=(1, 2, 3), keepdim=True).sqrt().clamp(min=MIN_RMS)
        field += v
    return field, scale


def drifting_field(generated: Tensor, positives: Tensor, positive_weights: Tensor | None = None, **switches) -> Tensor:
    """Field V (B, G, S), detached, in the coordinates of the samples: generated (B, G, S), positives (B, P, S), weights (B, P).

    Switches (defaults are the published ones): temperatures, kernel, normalise_axes (both softmaxes, the one over targets, or the
    plain kernel), feature_norm and its scope, drift_norm, affinity_floor, self_mask.
    """
    if positive_weights is not None:
        positive_weights = positive_weights[None]
    field, scale = _scaled_field(generated[None], positives[None], positive_weights=positive_weights, **switches)
    return (field * scale)[0].to(generated.dtype)


def drifting_loss(generated: Tensor, positives: Tensor, positive_weights: Tensor | None = None, **switches) -> Tensor:
    """mean | (x - sg(x + V)) / scale |^2 over generated (N, B, G, S), with positives (N, B, P, S) and their weights (N, B, P).

    Its value stays near the square of the number of temperatures by construction: follow the error of the samples, not the loss.
    """
    field, scale = _scaled_field(generated, positives, positive_weights=positive_weights, **switches)
    scaled = generated / scale
    return (scaled - (scaled.detach() + field)).square().mean()
