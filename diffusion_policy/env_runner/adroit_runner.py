"""Rollouts on Adroit observed through point clouds."""

from diffusion_policy.env.adroit.adroit import MAX_STEPS, TASKS, AdroitEnv
from diffusion_policy.env.point_cloud_env import known_task, require
from diffusion_policy.env_runner.point_cloud_runner import PointCloudRunner


class AdroitRunner(PointCloudRunner):
    """Solved at the end of the episode counts. max_steps: null for the task's; fewer end an episode before it can count as solved.
    Other arguments: see `PointCloudRunner`."""

    def __init__(self, output_dir, task_name, num_points=512, max_steps=None, **rollouts):
        known_task(task_name, TASKS, "Adroit")
        require("gymnasium-robotics", "adroit")
        super().__init__(
            output_dir,
            AdroitEnv,
            {"task_name": task_name, "num_points": num_points},
            max_steps=max_steps or MAX_STEPS[task_name],
            **rollouts,
        )
