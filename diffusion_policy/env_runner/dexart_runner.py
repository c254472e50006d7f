"""Rollouts on DexArt's tasks observed through point clouds."""

from diffusion_policy.env.dexart.dexart_wrapper import DexArtEnv, check_task
from diffusion_policy.env_runner.point_cloud_runner import PointCloudRunner


class DexArtRunner(PointCloudRunner):
    """Solved at any step counts. The policy also gets 'imagin_robot' (N, To, 96, 3).

    Args:
        task_name, num_points, state_dim, use_test_set: see `DexArtEnv`.
        max_steps: DP3's limit for all four tasks; DexArt's own is 250 (bucket in DP3's copy: 100).
        stop_on_success: end an episode when it is solved; its score cannot change any more.
        n_envs: environments at the same time, by default one: each holds its own scene on the GPU.
    Other arguments: see `PointCloudRunner`.
    """

    def __init__(
        self,
        output_dir,
        task_name,
        num_points=1024,
        state_dim=None,
        use_test_set=False,
        stop_on_success=True,
        max_steps=50,
        n_envs=None,
        **rollouts,
    ):
        check_task(
            task_name, num_points, state_dim
        )  # says what is missing here and now, not in the process of an environment
        env_kwargs = {
            "task_name": task_name,
            "num_points": num_points,
            "state_dim": state_dim,
            "use_test_set": use_test_set,
            "terminate_on_success": stop_on_success,
        }
        super().__init__(output_dir, DexArtEnv, env_kwargs, max_steps=max_steps, n_envs=n_envs or 1, **rollouts)
