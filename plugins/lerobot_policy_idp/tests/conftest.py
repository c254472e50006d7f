"""A small dataset of PushT in LeRobot's format, and policies on it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
torch.set_num_threads(1)

SHIPPED = ROOT / "data/demos/pusht_policy_rollouts.zarr"
SIZES = {"n_emb": 16, "n_layer": 1, "n_head": 2, "down_dims": (16, 32)}


def pytest_configure(config: pytest.Config) -> None:
    import lerobot_policy_idp  # noqa: F401  so that a missing installation is the first thing one reads


@pytest.fixture(scope="session")
def pusht(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty episodes of the demonstrations of the repository, with gym-pusht's observations."""
    from diffusion_policy.common.replay_buffer import ReplayBuffer
    from examples import pusht_for_lerobot

    folder = tmp_path_factory.mktemp("pusht")
    source, small = ReplayBuffer.create_from_path(str(SHIPPED)), ReplayBuffer.create_empty_numpy()
    for index in range(20):
        small.add_episode({key: np.asarray(value) for key, value in source.get_episode(index).items()})
    small.save_to_path(folder / "small.zarr")
    pusht_for_lerobot.main([str(folder / "dataset"), "--data", str(folder / "small.zarr")])
    return folder / "dataset"
