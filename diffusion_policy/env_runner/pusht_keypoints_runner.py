"""Rollouts on PushT observed through keypoints."""

import numpy as np

from diffusion_policy.env.pusht.pusht_keypoints_env import PushTKeypointsEnv
from diffusion_policy.env_runner.base_lowdim_runner import BaseLowdimRunner
from diffusion_policy.env_runner.pusht_runner import PushTRunner


class PushTKeypointsRunner(PushTRunner, BaseLowdimRunner):
    """The policy gets 'obs' (N, To, 20) float32 and 'obs_mask' (N, To, 20) bool, 24 with
    agent_keypoints. Other arguments: see `PushTRunner`."""

    def __init__(self, output_dir, keypoint_visible_rate=1.0, agent_keypoints=False, **rollouts):
        env_kwargs = {"keypoint_visible_rate": keypoint_visible_rate, "agent_keypoints": agent_keypoints}
        super().__init__(output_dir, PushTKeypointsEnv, env_kwargs, **rollouts)

    def policy_input(self, obs):
        dim = obs.shape[-1] // 2
        obs = obs[:, : self.n_obs_steps]
        return {"obs": obs[..., :dim].astype(np.float32), "obs_mask": obs[..., dim:] > 0.5}
