"""Rollouts on robomimic's tasks observed through cameras."""

import numpy as np

from diffusion_policy.env.robomimic.robomimic_image_wrapper import RobomimicImageWrapper
from diffusion_policy.env_runner.base_image_runner import BaseImageRunner
from diffusion_policy.env_runner.robomimic_runner import RobomimicRunner


class RobomimicImageRunner(RobomimicRunner, BaseImageRunner):
    """The policy gets pictures (N, To, 3, H, W) float32 in [0, 1] and numbers (N, To, D) float32, by the keys of shape_meta.
    Other arguments: see `RobomimicRunner`."""

    def __init__(self, output_dir, dataset_path, shape_meta, render_obs_key="agentview_image", **rollouts):
        wrapper = {
            "shape_meta": {
                "obs": {key: dict(meta, shape=tuple(meta["shape"])) for key, meta in shape_meta["obs"].items()}
            },
            "render_obs_key": render_obs_key,
        }
        super().__init__(output_dir, dataset_path, RobomimicImageWrapper, wrapper, render_offscreen=True, **rollouts)

    def policy_input(self, obs):
        # As bytes between the processes, a quarter of the floats.
        return {
            key: value[:, : self.n_obs_steps].astype(np.float32) / (255 if value.dtype == np.uint8 else 1)
            for key, value in obs.items()
        }
