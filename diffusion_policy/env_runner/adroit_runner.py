"""Rollouts on Adroit observed through point clouds."""

from typing import Any

from diffusion_policy.env.adroit.adroit import MAX_STEPS, TASKS, AdroitEnv
from diffusion_policy.env.point_cloud_env import known_task, require
from diffusion_policy.env_runner.point_cloud_runner import PointCloudRunner


class AdroitRunner(PointCloudRunner):
    """An episode counts as solved if it is solved at its end.

    Args:
        max_steps: None for the task's horizon; with fewer steps no episode can count as solved.
        rollouts: see `PointCloudRunner`.
    """

    def __init__(
        self,
        output_dir: str,
        task_name: str,
        num_points: int = 512,
        max_steps: int | None = None,
        **rollouts: Any,
    ):
        known_task(task_name, TASKS, "Adroit")
        require("gymnasium-robotics", "adroit")
        super().__init__(
            output_dir,
            AdroitEnv,
            {"task_name": task_name, "num_points": num_points},
            max_steps=max_steps or MAX_STEPS[task_name],
            **rollouts,
        )
