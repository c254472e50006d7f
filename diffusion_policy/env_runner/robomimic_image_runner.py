"""Rollouts on robomimic's tasks observed through cameras."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from diffusion_policy.env.robomimic.robomimic_image_wrapper import RobomimicImageWrapper
from diffusion_policy.env_runner.base_image_runner import BaseImageRunner
from diffusion_policy.env_runner.robomimic_runner import RobomimicRunner


class RobomimicImageRunner(RobomimicRunner, BaseImageRunner):
    """The policy gets images (N, To, 3, H, W) float32 in [0, 1] and low-dim values (N, To, D) float32.

    Args:
        shape_meta: its keys name the observations.
        rollouts: see `RobomimicRunner`.
    """

    def __init__(
        self,
        output_dir: str,
        dataset_path: str | os.PathLike,
        shape_meta: Mapping,
        render_obs_key: str = "agentview_image",
        **rollouts: Any,
    ):
        obs = {key: dict(meta, shape=tuple(meta["shape"])) for key, meta in shape_meta["obs"].items()}
        wrapper = {"shape_meta": {"obs": obs}, "render_obs_key": render_obs_key}
        super().__init__(output_dir, dataset_path, RobomimicImageWrapper, wrapper, render_offscreen=True, **rollouts)

    def policy_input(self, obs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        # Images arrive as uint8: a quarter of the data to send between processes.
        return {
            key: value[:, : self.n_obs_steps].astype(np.float32) / (255 if value.dtype == np.uint8 else 1)
            for key, value in obs.items()
        }
