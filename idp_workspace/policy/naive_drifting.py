"""Naive Drifting: the explicit drifting field as a behaviour-cloning objective."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from idp_workspace import drifting, geometry
from idp_workspace.options import check_choices
from idp_workspace.policy.base import GeneratorPolicy

CHOICES = {
    "positives": ("own", "knn", "batch", "weighted"),
    "space": ("per_step", "flat"),
    "noise": ("gaussian", "zero"),
}

#: Options that are handed to the field as they are.
FIELD = (
    "temperatures",
    "kernel",
    "normalise_axes",
    "feature_norm",
    "feature_norm_scope",
    "drift_norm",
    "affinity_floor",
    "self_mask",
)


class NaiveDriftingPolicy(GeneratorPolicy):
    """Baseline: several samples x_g = f(o, noise_g, 0) per observation, moved along the published drifting field (see
    idp_workspace.drifting) with the observation's own expert chunk as the positive. Acts with one network call, f(o, noise, 0).

    `positives: weighted` takes the experts of the whole batch, expert j attracting the samples of observation i with IDP's
    neighbourhood weight w_ij (idp_workspace.geometry): the conditional positives that one expert per observation cannot give.

    With one sample per observation its gradient is a multiple of the squared error's (paper, Proposition 3.1).
    """

    @dataclasses.dataclass(frozen=True)
    class Options:
        gens_per_obs: int = 8
        positives: str = "own"  # own expert | knn: those of similar observations in the batch | batch: all of them
        knn_k: int = 8  # | weighted: all, by w_ij
        tau: float = 1.0  # temperature and number of neighbours of w_ij
        topk: int | None = None
        temperatures: tuple[float, ...] = drifting.TEMPERATURES
        kernel: str = "laplace"
        normalise_axes: str = "xy"
        feature_norm: bool = True
        feature_norm_scope: str = "batch"
        drift_norm: bool = True
        affinity_floor: float = 1e-6
        self_mask: bool = True
        space: str = "per_step"  # one field per chunk step, or one over the flattened chunk
        noise: str = "gaussian"
        mse_coeff: float = 0.0  # adds the squared error to the expert
        probe_coeff: float = 0.0  # adds MIP's and IDP's probe near the expert; 81 is their weight
        t_star: float = 0.9

        def __post_init__(self):
            object.__setattr__(self, "temperatures", tuple(float(tau) for tau in self.temperatures))
            check_choices({name: getattr(self, name) for name in CHOICES}, CHOICES)
            drifting.check_switches(**{name: getattr(self, name) for name in FIELD})
            geometry.check_switches(tau=self.tau, topk=self.topk)
            if self.gens_per_obs < 1 or self.knn_k < 1:
                raise ValueError(f"gens_per_obs={self.gens_per_obs} and knn_k={self.knn_k} must be at least 1")

    def start_noise(self, count: int) -> Tensor:
        zeros = self.zeros(count)
        return torch.randn_like(zeros) if self.options.noise == "gaussian" else zeros

    def positives(self, cond: Tensor, actions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Expert chunks (B, P, H, D) that attract the samples of each observation, and their weights (B, P), None for one each."""
        o = self.options
        everyone = actions[None].expand(len(actions), *actions.shape)
        if o.positives == "own":
            return actions[:, None], None
        if o.positives == "batch":
            return everyone, None
        features = self.generator.embedding(cond)
        if o.positives == "knn":
            h = torch.nn.functional.normalize(features, dim=1)
            return actions[(h @ h.T).topk(min(o.knn_k, len(actions)), dim=1).indices], None
        w = geometry.neighbor_weights(features, tau=o.tau, topk=o.topk)
        if o.topk is None or o.topk >= len(actions):
            return everyone, w * len(actions)
        # The others weigh nothing: leave them out, and keep a mean weight of one.
        w, chosen = w.topk(o.topk, dim=1)
        return actions[chosen], w * o.topk

    def loss(self, cond: Tensor, actions: Tensor) -> Tensor:
        o = self.options
        batch, horizon, dim = actions.shape
        count = o.gens_per_obs
        x = self.generator(cond.repeat_interleave(count, dim=0), self.start_noise(batch * count), 0.0).view(
            batch, count, horizon, dim
        )
        positives, weights = self.positives(cond, actions)
        if o.space == "per_step":
            problem = (
                x.permute(2, 0, 1, 3),
                positives.permute(2, 0, 1, 3),
            )  # (H, B, G, D): each step has its own normalisers
        else:
            problem = x.flatten(2)[None], positives.flatten(2)[None]  # (1, B, G, H D)
        if weights is not None:
            weights = weights.expand(len(problem[0]), *weights.shape)
        loss = drifting.drifting_loss(*problem, weights, **{name: getattr(o, name) for name in FIELD})
        error = (x - actions[:, None]).square().mean()
        self._last_error = error.detach()
        if o.mse_coeff:
            loss = loss + o.mse_coeff * error
        if o.probe_coeff:
            noisy = actions + (1 - o.t_star) * torch.randn_like(actions)
            loss = loss + o.probe_coeff * (self.generator(cond, noisy, o.t_star) - actions).square().mean()
        return loss

    def metrics(self) -> dict[str, float]:
        """The drifting loss is constant by construction, so the samples' squared error to the expert is what to watch."""
        return {"sample_mse": self._last_error.item()} if hasattr(self, "_last_error") else {}

    def sample(self, cond: Tensor, batch: int) -> Tensor:
        return self.generator(cond, self.start_noise(batch), 0.0)
