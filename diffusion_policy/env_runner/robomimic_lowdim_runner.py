"""Rollouts on robomimic's tasks with low-dimensional observations."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from diffusion_policy.env.robomimic.robomimic_lowdim_wrapper import RobomimicLowdimWrapper
from diffusion_policy.env_runner.base_lowdim_runner import BaseLowdimRunner
from diffusion_policy.env_runner.robomimic_runner import RobomimicRunner


class RobomimicLowdimRunner(RobomimicRunner, BaseLowdimRunner):
    """The policy gets 'obs' (N, To, Do) float32.

    Args:
        n_train_vis, n_test_vis: number of videos; recording needs a renderer.
        rollouts: see `RobomimicRunner`.
    """

    def __init__(
        self,
        output_dir: str,
        dataset_path: str | os.PathLike,
        obs_keys: Sequence[str],
        render_hw: Sequence[int] = (256, 256),
        render_camera_name: str = "agentview",
        n_train_vis: int = 3,
        n_test_vis: int = 6,
        **rollouts: Any,
    ):
        wrapper = {"obs_keys": list(obs_keys), "render_hw": tuple(render_hw), "render_camera_name": render_camera_name}
        super().__init__(
            output_dir,
            dataset_path,
            RobomimicLowdimWrapper,
            wrapper,
            render_offscreen=n_train_vis + n_test_vis > 0,
            n_train_vis=n_train_vis,
            n_test_vis=n_test_vis,
            **rollouts,
        )

    def policy_input(self, obs: np.ndarray) -> dict[str, np.ndarray]:
        return {"obs": obs[:, : self.n_obs_steps].astype(np.float32)}
