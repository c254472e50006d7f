"""Rollouts on MetaWorld observed through point clouds."""

from diffusion_policy.env.metaworld.metaworld_wrapper import MAX_STEPS, TASKS, MetaWorldEnv
from diffusion_policy.env.point_cloud_env import known_task, require
from diffusion_policy.env_runner.point_cloud_runner import PointCloudRunner


class MetaworldRunner(PointCloudRunner):
    """Solved at any step counts. stop_on_success: end an episode then; its score cannot change any more.
    Other arguments: see `PointCloudRunner`."""

    def __init__(self, output_dir, task_name, num_points=512, max_steps=MAX_STEPS, stop_on_success=True, **rollouts):
        known_task(task_name, TASKS, "MetaWorld")  # says what is wrong here, not in the process of an environment
        require("metaworld", "metaworld")
        env_kwargs = {"task_name": task_name, "num_points": num_points, "terminate_on_success": stop_on_success}
        super().__init__(output_dir, MetaWorldEnv, env_kwargs, max_steps=max_steps, **rollouts)
