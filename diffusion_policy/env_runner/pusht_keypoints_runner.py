"""Rollouts on PushT observed through keypoints."""

from typing import Any

import numpy as np

from diffusion_policy.env.pusht.pusht_keypoints_env import PushTKeypointsEnv
from diffusion_policy.env_runner.base_lowdim_runner import BaseLowdimRunner
from diffusion_policy.env_runner.pusht_runner import PushTRunner


class PushTKeypointsRunner(PushTRunner, BaseLowdimRunner):
    """The policy gets 'obs' (N, To, 20) float32 and 'obs_mask' (N, To, 20) bool; 24 instead of 20 with agent_keypoints.

    Args:
        rollouts: see `PushTRunner`.
    """

    def __init__(
        self,
        output_dir: str,
        keypoint_visible_rate: float = 1.0,
        agent_keypoints: bool = False,
        **rollouts: Any,
    ):
        env_kwargs = {"keypoint_visible_rate": keypoint_visible_rate, "agent_keypoints": agent_keypoints}
        super().__init__(output_dir, PushTKeypointsEnv, env_kwargs, **rollouts)

    def policy_input(self, obs: np.ndarray) -> dict[str, np.ndarray]:
        dim = obs.shape[-1] // 2
        obs = obs[:, : self.n_obs_steps]
        return {"obs": obs[..., :dim].astype(np.float32), "obs_mask": obs[..., dim:] > 0.5}
