"""Rollouts on PushT observed through images."""

from typing import Any

import numpy as np

from diffusion_policy.env.pusht.pusht_image_env import PushTImageEnv
from diffusion_policy.env_runner.base_image_runner import BaseImageRunner
from diffusion_policy.env_runner.pusht_runner import PushTRunner


class PushTImageRunner(PushTRunner, BaseImageRunner):
    """The policy gets 'image' (N, To, 3, H, W) float32 in [0, 1] and 'agent_pos' (N, To, 2) float32.

    Args:
        rollouts: see `PushTRunner`.
    """

    def __init__(self, output_dir: str, render_size: int = 96, **rollouts: Any):
        super().__init__(output_dir, PushTImageEnv, {"render_size": render_size}, **rollouts)

    def policy_input(self, obs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {key: value.astype(np.float32) for key, value in obs.items()}
