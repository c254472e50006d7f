"""Straight flow: regression from noise."""

from __future__ import annotations

import torch
from torch import Tensor

from idp_workspace.policy.regression import RegressionPolicy


class StraightFlowPolicy(RegressionPolicy):
    """L = scale mean N(f(o, z, 0) - a*),  z ~ N(0, I). Acts with f(o, 0, 0).

    Noise and expert are drawn independently, so the best f does not depend on z: it is regression with a noisy input.
    """

    def training_input(self, actions: Tensor) -> Tensor:
        return torch.randn_like(actions)
