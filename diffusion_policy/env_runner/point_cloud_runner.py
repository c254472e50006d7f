"""Rollouts on tasks observed through point clouds."""

import os

from diffusion_policy.env_runner.base_image_runner import BaseImageRunner
from diffusion_policy.env_runner.rollout import RolloutRunner


class PointCloudRunner(RolloutRunner, BaseImageRunner):
    """The policy gets 'point_cloud' (N, To, P, 3) and 'agent_pos' (N, To, D) float32. The score of an episode is 1 if it was solved, else 0.

    n_envs: environments at the same time, by default one per core. Other arguments: see `RolloutRunner`.
    """

    def __init__(
        self,
        output_dir,
        env_cls,
        env_kwargs,
        n_train=0,
        n_train_vis=0,
        n_test=20,
        n_test_vis=2,
        test_start_seed=100000,
        n_obs_steps=2,
        n_envs=None,
        vector="async",
        **rollouts,
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

    def policy_input(self, obs):
        return {key: value[:, : self.n_obs_steps] for key, value in obs.items()}
