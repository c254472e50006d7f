"""A dataset for runs that only need one."""
from __future__ import annotations

import pathlib

import numpy as np

from diffusion_policy.common.replay_buffer import ReplayBuffer


def write_pusht(path: pathlib.Path, episodes: int = 6, length: int = 30, seed: int = 0) -> pathlib.Path:
    """A small dataset with the keys and ranges of PushT, not its physics."""
    rng = np.random.default_rng(seed)
    buffer = ReplayBuffer.create_empty_numpy()
    for _ in range(episodes):
        state = np.concatenate([rng.uniform(50, 450, (length, 4)), rng.uniform(0, 2 * np.pi, (length, 1))], axis=1)
        buffer.add_episode({"state": state.astype(np.float32), "keypoint": rng.uniform(50, 450, (length, 9, 2)).astype(np.float32),
                            "action": rng.uniform(50, 450, (length, 2)).astype(np.float32)})
    buffer.save_to_path(str(path))
    return path
