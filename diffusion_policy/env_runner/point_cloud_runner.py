"""Rollouts on tasks observed through point clouds."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from diffusion_policy.env_runner.base_image_runner import BaseImageRunner
from diffusion_policy.env_runner.rollout import RolloutRunner


class PointCloudRunner(RolloutRunner, BaseImageRunner):
    """The policy gets 'point_cloud' (N, To, P, 3) and 'agent_pos' (N, To, D) float32.

    The score of an episode is 1 if it was solved, else 0.

    Args:
        n_envs: environments in parallel, by default one per core.
        rollouts: see `RolloutRunner`.
    """

    def __init__(
        self,
        output_dir: str,
        env_cls: Callable[..., Any],
        env_kwargs: dict[str, Any],
        n_train: int = 0,
        n_train_vis: int = 0,
        n_test: int = 20,
        n_test_vis: int = 2,
        test_start_seed: int = 100000,
        n_obs_steps: int = 2,
        n_envs: int | None = None,
        vector: str = "async",
        **rollouts: Any,
    ):
        self.title = f"{env_kwargs['task_name']} rollouts"
        super().__init__(
            output_dir,
            env_cls,
            env_kwargs,
            n_train=n_train,
            n_train_vis=n_train_vis,
            n_test=n_test,
            n_test_vis=n_test_vis,
            test_start_seed=test_start_seed,
            n_obs_steps=n_obs_steps,
            n_envs=n_envs or os.cpu_count(),
            vector=vector,
            **rollouts,
        )

    def policy_input(self, obs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {key: value[:, : self.n_obs_steps] for key, value in obs.items()}
