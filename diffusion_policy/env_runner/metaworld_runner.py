"""Rollouts on MetaWorld observed through point clouds."""

from typing import Any

from diffusion_policy.env.metaworld.metaworld_wrapper import MAX_STEPS, TASKS, MetaWorldEnv
from diffusion_policy.env.point_cloud_env import known_task, require
from diffusion_policy.env_runner.point_cloud_runner import PointCloudRunner


class MetaworldRunner(PointCloudRunner):
    """An episode counts as solved if it is solved at any step.

    Args:
        stop_on_success: end an episode when it is solved; its score cannot change after that.
        rollouts: see `PointCloudRunner`.
    """

    def __init__(
        self,
        output_dir: str,
        task_name: str,
        num_points: int = 512,
        max_steps: int = MAX_STEPS,
        stop_on_success: bool = True,
        **rollouts: Any,
    ):
        known_task(task_name, TASKS, "MetaWorld")  # fail here rather than in the process of an environment
        require("metaworld", "metaworld")
        env_kwargs = {"task_name": task_name, "num_points": num_points, "terminate_on_success": stop_on_success}
        super().__init__(output_dir, MetaWorldEnv, env_kwargs, max_steps=max_steps, **rollouts)
