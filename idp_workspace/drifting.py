"""The explicit drifting field (Deng et al., "Generative Modeling via Drifting") of the Naive Drifting baseline.

For one observation, generated samples x_g are attracted by positives y+ and repelled by each other. With targets
y = [x, y+], distances d_gk = |x_g - y_k| divided by their mean c, and for each temperature tau:

    A    = sqrt( max( softmax_k(-d/tau) * softmax_g(-d/tau), floor ) )       affinity, normalised over both axes
    V_g  = sum_k A+_gk (sum A-_g) y+_k  -  sum_k A-_gk (sum A+_g) x_k         attraction minus repulsion
    V    = sum_tau V_tau / rms(V_tau)                                         field in coordinates of unit mean distance

The loss is |x - sg(x + V)|^2, Eq. (2) of the paper. Positives may carry weights w_k: then A+ <- A+ w, and c is the
weighted mean distance. With one sample and one positive the field is a positive multiple of (y+ - x), so the gradient
is that of the squared error (Proposition 3.1 of the paper).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from idp_workspace.options import Options, numbers

TEMPERATURES = (0.02, 0.05, 0.2)
SELF_MASK = 100.0  # added to a sample's (normalised) distance to itself: it does not repel itself
MIN_SCALE = 1e-3  # of the mean distance, so that identical samples do not divide by zero
MIN_RMS = 1e-4
Average = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field(Options):
    """The switches of the drifting field, with the published values as defaults."""

    temperatures: tuple[float, ...] = TEMPERATURES
    kernel: Literal["laplace", "gaussian"] = "laplace"
    normalise_axes: Literal["xy", "y", "none"] = "xy"
    """Both softmaxes, the one over targets, or the plain kernel."""
    feature_norm: bool = True
    """Divide distances by their mean."""
    feature_norm_scope: Literal["batch", "per_obs"] = "batch"
    drift_norm: bool = True
    """Divide the field of each temperature by its root mean square."""
    affinity_floor: float = 1e-6
    self_mask: bool = True
    """A sample does not repel itself."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperatures", numbers(self.temperatures))
        super().__post_init__()
        if not self.temperatures or min(self.temperatures) <= 0:
            raise ValueError(f"temperatures={list(self.temperatures)} must be positive, and at least one")


def alone(x: Tensor) -> Tensor:
    """Return x: its mean over one process."""
    return x


@torch.no_grad()
def scaled_field(
    x: Tensor, positives: Tensor, weights: Tensor | None, f: Field, average: Average = alone
) -> tuple[Tensor, Tensor]:
    """Return the field in scaled coordinates (N, B, G, S), and the scale (N, B or 1, 1, 1) that divided them.

    Args:
        x: generated samples (N, B, G, S). N separates problems whose normalisers must not mix: the steps of a chunk.
        positives: (N, B, P, S).
        weights: (N, B, P), not negative, or None for one each. A weight of zero removes a positive from the attraction.
            It stays in the softmaxes' denominators, which only rescale a sample's field.
        f: the switches.
        average: the mean over the processes that share the batch, for the normalisers.
    """
    x, positives = x.detach().float(), positives.detach().float()
    n_generated, size = x.shape[-2:]
    targets = torch.cat([x, positives], dim=-2)  # (N, B, G + P, S)
    distance = torch.cdist(x, targets, compute_mode="donot_use_mm_for_euclid_dist").clamp(min=1e-4)
    if weights is not None:
        if weights.shape != positives.shape[:-1]:
            raise ValueError(
                f"positive_weights has shape {tuple(weights.shape)}, the positives {tuple(positives.shape[:-1])}"
            )
        weights = weights.detach().float().unsqueeze(-2)  # (N, B, 1, P)
    scale = x.new_ones(len(x), 1, 1, 1)
    if f.feature_norm:
        if f.feature_norm_scope == "batch":
            mean = mean_distance(distance, weights, n_generated, (1, 2, 3), average)
        else:
            mean = mean_distance(distance, weights, n_generated, (2, 3))
        scale = (mean / size**0.5).clamp(min=MIN_SCALE)
        distance = distance / mean.clamp(min=MIN_SCALE)
    if f.self_mask:
        distance = distance.clone()
        distance[..., :n_generated].diagonal(dim1=-2, dim2=-1).add_(SELF_MASK)
    if f.kernel == "gaussian":
        distance = distance.square()
    x, targets = x / scale, targets / scale
    field = torch.zeros_like(x)
    for tau in f.temperatures:
        a = affinity(-distance / tau, f)
        repel, attract = a[..., :n_generated], a[..., n_generated:]
        if weights is not None:
            attract = attract * weights
        c = torch.cat([-repel * attract.sum(-1, keepdim=True), attract * repel.sum(-1, keepdim=True)], dim=-1)
        v = c @ targets - c.sum(-1, keepdim=True) * x
        if f.drift_norm:
            v = v / average(v.square().mean(dim=(1, 2, 3), keepdim=True)).sqrt().clamp(min=MIN_RMS)
        field += v
    return field, scale


def affinity(logits: Tensor, f: Field) -> Tensor:
    """Return A (N, B, G, G + P) from -d / tau."""
    if f.normalise_axes == "none":
        return logits.exp()
    if f.normalise_axes == "y":
        return logits.softmax(dim=-1)
    return (logits.softmax(dim=-1) * logits.softmax(dim=-2)).clamp(min=f.affinity_floor).sqrt()


def mean_distance(
    distance: Tensor, weights: Tensor | None, n_generated: int, dims: tuple[int, ...], average: Average = alone
) -> Tensor:
    """Return the mean of distances (N, B, G, G + P) over `dims`, positives counted by their weights (N, B, 1, P)."""
    if weights is None:
        return average(distance.mean(dim=dims, keepdim=True))
    ones = torch.ones_like(weights[..., :1]).expand(*weights.shape[:-1], n_generated)
    share = torch.cat([ones, weights], dim=-1)
    return average((share * distance).mean(dim=dims, keepdim=True)) / average(share.mean(dim=dims, keepdim=True))


def drifting_field(
    generated: Tensor, positives: Tensor, positive_weights: Tensor | None = None, **switches: Any
) -> Tensor:
    """Return the field V (B, G, S), detached, in the coordinates of the samples.

    Args:
        generated: samples (B, G, S).
        positives: (B, P, S).
        positive_weights: (B, P), or None for one each.
        switches: the fields of `Field`; the defaults are the published ones.
    """
    weights = None if positive_weights is None else positive_weights[None]
    field, scale = scaled_field(generated[None], positives[None], weights, Field(**switches))
    return (field * scale)[0].to(generated.dtype)


def drifting_loss(
    generated: Tensor,
    positives: Tensor,
    positive_weights: Tensor | None = None,
    average: Average = alone,
    **switches: Any,
) -> Tensor:
    """Return mean |(x - sg(x + V)) / scale|^2 over generated (N, B, G, S), with positives (N, B, P, S).

    `average` is the mean over the processes that share the batch. The loss stays near the square of the number of
    temperatures by construction: watch the error of the samples instead.
    """
    return field_loss(generated, positives, positive_weights, Field(**switches), average)


def field_loss(
    generated: Tensor, positives: Tensor, weights: Tensor | None, f: Field, average: Average = alone
) -> Tensor:
    """Return `drifting_loss` with its switches as one object."""
    with torch.autocast(generated.device.type, enabled=False):
        field, scale = scaled_field(generated, positives, weights, f, average)
    x = generated / scale
    return (x - (x.detach() + field)).square().mean()
