"""Rollouts on robomimic's tasks observed through numbers."""

import numpy as np

from diffusion_policy.env.robomimic.robomimic_lowdim_wrapper import RobomimicLowdimWrapper
from diffusion_policy.env_runner.base_lowdim_runner import BaseLowdimRunner
from diffusion_policy.env_runner.robomimic_runner import RobomimicRunner


class RobomimicLowdimRunner(RobomimicRunner, BaseLowdimRunner):
    """The policy gets 'obs' (N, To, Do) float32. Videos, if n_train_vis or n_test_vis ask for any, need a renderer.
    Other arguments: see `RobomimicRunner`."""

    def __init__(
        self,
        output_dir,
        dataset_path,
        obs_keys,
        render_hw=(256, 256),
        render_camera_name="agentview",
        n_train_vis=3,
        n_test_vis=6,
        **rollouts,
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

    def policy_input(self, obs):
        return {"obs": obs[:, : self.n_obs_steps].astype(np.float32)}
