"""Small valid inputs to damage: a dataset, configurations, a workspace."""

from __future__ import annotations

import functools
import pathlib

import hydra
import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from diffusion_policy.common.config_util import config_dir, get_class, register_configs, register_resolvers
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.workspace.base_workspace import BaseWorkspace

torch.set_num_threads(1)
register_resolvers()
register_configs()


def write_pusht(path: pathlib.Path) -> pathlib.Path:
    """The keys and ranges of PushT, not its physics."""
    rng = np.random.default_rng(0)
    buffer = ReplayBuffer.create_empty_numpy()
    for _ in range(4):
        buffer.add_episode(
            {
                "state": rng.uniform(0, 500, (20, 5)).astype(np.float32),
                "keypoint": rng.uniform(0, 500, (20, 9, 2)).astype(np.float32),
                "action": rng.uniform(0, 500, (20, 2)).astype(np.float32),
            }
        )
    buffer.save_to_path(path)
    return path


def config(name: str, overrides: list[str]) -> DictConfig:
    """Composed as train.py does."""
    with hydra.initialize_config_dir(str(config_dir()), version_base=None):
        cfg = hydra.compose(name, overrides)
    OmegaConf.resolve(cfg)
    return cfg


def small_config(
    folder: pathlib.Path, name: str = "train_idp_mlp_lowdim", overrides: tuple[str, ...] = ()
) -> DictConfig:
    return config(
        name, ["preset=debug", "training.device=cpu", f"task.dataset.zarr_path={_dataset(folder)}", *overrides]
    )


def workspace_of(cfg: DictConfig, folder: pathlib.Path):
    return get_class(cfg._target_, BaseWorkspace)(cfg, output_dir=str(folder / "run"))


@functools.cache
def _dataset(folder: pathlib.Path) -> pathlib.Path:
    return write_pusht(folder / "pusht.zarr")
