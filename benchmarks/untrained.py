"""Policies with random weights, in memory and as exported weights: latency does not depend on what was learnt."""

from __future__ import annotations

import pathlib
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf

from diffusion_policy.common.config_util import config_dir, register_configs, register_resolvers
from diffusion_policy.model.common.normalizer import LinearNormalizer
from diffusion_policy.policy.interface import interface_of
from diffusion_policy.storage import weights_io


def untrained(config: str, *overrides: str) -> tuple[Any, DictConfig]:
    """The policy of a configuration, with a normaliser fitted to numbers in [0, 1], and the resolved configuration."""
    register_resolvers()
    register_configs()
    with hydra.initialize_config_dir(str(config_dir()), version_base=None):
        cfg = hydra.compose(config, list(overrides))
    OmegaConf.resolve(cfg)
    policy = hydra.utils.instantiate(cfg.policy).eval()
    interface = interface_of(policy)
    shapes = {key: entry.shape for key, entry in interface.observation.items()} | {"action": (interface.action_dim,)}
    normalizer = LinearNormalizer()
    normalizer.fit({key: torch.rand(32, *shape) for key, shape in shapes.items()})
    policy.set_normalizer(normalizer)
    return policy, cfg


def export_untrained(folder: pathlib.Path, config: str, *overrides: str) -> pathlib.Path:
    """Write such a policy as exported weights, which every command opens."""
    policy, cfg = untrained(config, *overrides)
    payload = {"cfg": OmegaConf.to_container(cfg), "state_dicts": {"model": policy.state_dict()}}
    payload["cfg"]["training"]["use_ema"] = False
    return weights_io.write(payload, folder)
