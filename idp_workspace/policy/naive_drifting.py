"""Naive Drifting: the explicit drifting field as a behaviour-cloning objective (Section 3 of the paper)."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal, Unpack

import torch
from einops import rearrange
from torch import Tensor

from idp_workspace import drifting, ranks
from idp_workspace.geometry_variants import Geometry, neighbor_weights
from idp_workspace.options import Above, AtLeast
from idp_workspace.policy.base import GeneratorPolicy
from idp_workspace.upstream_arguments import UpstreamArguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class NaiveDriftingOptions(drifting.Field):
    """Options of Naive Drifting; the switches of the field are those of `drifting.Field`."""

    gens_per_obs: Annotated[int, AtLeast(1)] = 8
    """Samples per observation in training."""
    positives: Literal["own", "knn", "batch", "weighted"] = "own"
    """Which experts attract: the observation's own, the knn_k nearest of the batch, all, or all with weight w_ij."""
    knn_k: Annotated[int, AtLeast(1)] = 8
    tau: Annotated[float, Above(0)] = 1.0
    """Temperature of w_ij."""
    topk: Annotated[int | None, AtLeast(1)] = None
    """Number of neighbours in w_ij."""
    space: Literal["per_step", "flat"] = "per_step"
    """One field per chunk step, or one over the flattened chunk."""
    noise: Literal["gaussian", "zero"] = "gaussian"
    mse_coeff: float = 0.0
    """Weight of an added squared error to the expert."""
    probe_coeff: float = 0.0
    """Weight of an added probe near the expert; 81 in MIP and IDP."""
    t_star: float = 0.9


class NaiveDriftingPolicy(GeneratorPolicy):
    """Baseline: several samples x_g = f(o, noise_g, 0) per observation move along the published drifting field.

    The positive is the observation's own expert chunk. `positives: weighted` uses the experts of the whole batch:
    expert j attracts the samples of observation i with IDP's neighbour weight w_ij. Acts with one network call, f(o,
    noise, 0).

    With one sample per observation the gradient is a multiple of the squared error's (paper, Proposition 3.1).
    """

    Options = NaiveDriftingOptions
    options: NaiveDriftingOptions

    def __init__(self, options: NaiveDriftingOptions | None = None, **arguments: Unpack[UpstreamArguments]) -> None:
        super().__init__(options, **arguments)
        self._last_error: Tensor | None = None

    def start_noise(self, count: int) -> Tensor:
        zeros = self.zeros(count)
        return torch.randn_like(zeros) if self.options.noise == "gaussian" else zeros

    def loss(self, cond: Tensor, actions: Tensor) -> Tensor:
        o = self.options
        batch, count = len(actions), o.gens_per_obs
        x = self.generator(cond.repeat_interleave(count, dim=0), self.start_noise(batch * count), 0.0)
        x = rearrange(x, "(b g) h d -> b g h d", g=count)
        positives, weights = self.positives(cond, actions)
        # Each chunk step is a problem with its own normalisers, or the chunk is one problem.
        axes = "b g h d -> h b g d" if o.space == "per_step" else "b g h d -> 1 b g (h d)"
        generated = rearrange(x, axes)
        if weights is not None:
            weights = weights.expand(len(generated), *weights.shape)
        average = ranks.mean if self.training else drifting.alone
        loss = drifting.field_loss(generated, rearrange(positives, axes), weights, o, average)
        error = (x - actions[:, None]).square().mean()
        self._last_error = error.detach()
        if o.mse_coeff:
            loss = loss + o.mse_coeff * error
        if o.probe_coeff:
            noisy = actions + (1 - o.t_star) * torch.randn_like(actions)
            loss = loss + o.probe_coeff * (self.generator(cond, noisy, o.t_star) - actions).square().mean()
        return loss

    def positives(self, cond: Tensor, actions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the expert chunks (B, P, H, D) that attract each observation's samples, and their weights (B, P)."""
        o = self.options
        if o.positives == "own":
            return actions[:, None], None
        phi = self.generator.embedding(cond)
        batch = ranks.whole_batch(phi, actions, self.training)
        actions = batch.a
        everyone = actions[None].expand(len(cond), *actions.shape)
        if o.positives == "batch":
            return everyone, None
        if o.positives == "knn":
            h, h_j = torch.nn.functional.normalize(phi, dim=1), torch.nn.functional.normalize(batch.phi, dim=1)
            return actions[(h @ h_j.T).topk(min(o.knn_k, len(actions)), dim=1).indices], None
        w = neighbor_weights(phi, Geometry(tau=o.tau, topk=o.topk), among=batch if batch.phi is not phi else None)
        if o.topk is None or o.topk >= len(actions):
            return everyone, w * len(actions)
        # The other weights are zero: leave those positives out, and keep a mean weight of one.
        w, chosen = w.topk(o.topk, dim=1)
        return actions[chosen], w * o.topk

    def metrics(self) -> dict[str, float]:
        """Return the squared error of the samples: the drifting loss itself is constant by construction."""
        return {} if self._last_error is None else {"sample_mse": self._last_error.item()}

    def sample(self, cond: Tensor, batch: int) -> Tensor:
        return self.generator(cond, self.start_noise(batch), 0.0)
