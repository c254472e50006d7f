"""The optimiser of a config."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from diffusion_policy.common.config_util import build, get_class
from diffusion_policy.common.errors import ConfigError


def make_optimizer(cfg: DictConfig, policy: Any) -> torch.optim.Optimizer:
    """The optimiser in `cfg.optimizer`; without a `_target_`, its keys are arguments of policy.get_optimizer.

    A class that has `parameter_groups` divides the parameters by their role itself.
    """
    if "_target_" in cfg.optimizer:
        groups = getattr(get_class(cfg.optimizer._target_, object), "parameter_groups", nn.Module.parameters)
        optimizer = build(cfg, "optimizer", params=groups(policy), _convert_="all")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"optimizer._target_={cfg.optimizer._target_} is not an optimiser of torch")
        return optimizer
    arguments: Any = OmegaConf.to_container(cfg.optimizer, resolve=True)
    try:
        return policy.get_optimizer(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the section optimizer has no _target_, and does not fit the policy's get_optimizer: {error}"
        ) from error
