"""A slow copy of a policy's generator, for objectives whose target is the network itself."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:  # policies import this module
    from idp_workspace.policy.base import GeneratorPolicy


class TargetNetwork:
    """Exponential moving average of a policy's networks:  target <- rate * target + (1 - rate) * online.

    The copies are registered in the policy as `target_model` and `target_obs_encoder`, so that they are saved with it
    and follow its device. They take no gradient. `generator` is the policy's generator over them.
    """

    def __init__(self, policy: GeneratorPolicy):
        policy.target_model = copy.deepcopy(policy.model).requires_grad_(False)
        policy.target_obs_encoder = None
        if policy.obs_encoder is not None:
            policy.target_obs_encoder = copy.deepcopy(policy.obs_encoder).requires_grad_(False)
        self.online = policy.generator
        self.generator = dataclasses.replace(
            policy.generator, model=policy.target_model, obs_encoder=policy.target_obs_encoder
        )

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """One step of the average; rate 0 copies the online networks."""
        for slow, fast in (
            (self.generator.model, self.online.model),
            (self.generator.obs_encoder, self.online.obs_encoder),
        ):
            if slow is None:
                continue
            for p, q in zip(slow.parameters(), fast.parameters()):
                p.lerp_(q, 1 - rate)
            for p, q in zip(slow.buffers(), fast.buffers()):
                p.copy_(q)


@contextlib.contextmanager
def fixed_parameters(network: nn.Module) -> Iterator[None]:
    """Treat the network's parameters as constants in graphs that are built inside."""
    trained = [p for p in network.parameters() if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)
