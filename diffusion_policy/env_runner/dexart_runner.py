"""Rollouts on DexArt's tasks observed through point clouds."""

from typing import Any

from diffusion_policy.env.dexart.dexart_wrapper import DexArtEnv, check_task
from diffusion_policy.env_runner.point_cloud_runner import PointCloudRunner


class DexArtRunner(PointCloudRunner):
    """An episode counts as solved if it is solved at any step. The policy also gets 'imagin_robot' (N, To, 96, 3).

    Args:
        task_name, num_points, state_dim, use_test_set: see `DexArtEnv`.
        max_steps: 50 is DP3's limit for all four tasks; DexArt's is 250 (bucket in DP3's copy: 100).
        stop_on_success: end an episode when it is solved; its score cannot change after that.
        n_envs: environments in parallel; by default one, because each holds a scene on the GPU.
        rollouts: see `PointCloudRunner`.
    """

    def __init__(
        self,
        output_dir: str,
        task_name: str,
        num_points: int = 1024,
        state_dim: int | None = None,
        use_test_set: bool = False,
        stop_on_success: bool = True,
        max_steps: int = 50,
        n_envs: int | None = None,
        **rollouts: Any,
    ):
        check_task(task_name, num_points, state_dim)  # fail here rather than in the process of an environment
        env_kwargs = {
            "task_name": task_name,
            "num_points": num_points,
            "state_dim": state_dim,
            "use_test_set": use_test_set,
            "terminate_on_success": stop_on_success,
        }
        super().__init__(output_dir, DexArtEnv, env_kwargs, max_steps=max_steps, n_envs=n_envs or 1, **rollouts)
