"""Muon, the optimiser of the small recipe, in LeRobot's registry of optimisers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lerobot.optim import OptimizerConfig

from diffusion_policy.model.common.muon import Muon


@OptimizerConfig.register_subclass("idp_muon")
@dataclass
class MuonConfig(OptimizerConfig):
    """Muon for the matrices between hidden layers, AdamW for the other parameters."""

    lr: float = 1e-3
    """Of AdamW."""
    weight_decay: float = 1e-5
    grad_clip_norm: float = 10.0
    muon_lr: float = 0.02
    momentum: float = 0.95
    iterations: int = 5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def build(self, params: Any) -> torch.optim.Optimizer:
        groups = list(params)
        if not all(isinstance(group, dict) and "muon" in group for group in groups):
            raise ValueError(
                "optimizer.type=idp_muon needs the parameters by their role, which policy.type=idp gives with "
                "optimizer_type=muon and use_policy_training_preset=true"
            )
        return Muon(
            groups,
            lr=self.lr,
            muon_lr=self.muon_lr,
            momentum=self.momentum,
            iterations=self.iterations,
            betas=tuple(self.betas),
            eps=self.eps,
            weight_decay=self.weight_decay,
        )
