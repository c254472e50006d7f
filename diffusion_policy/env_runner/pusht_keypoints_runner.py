"""Rollouts on PushT observed through keypoints."""
import numpy as np

from diffusion_policy.env.pusht.pusht_keypoints_env import PushTKeypointsEnv
from diffusion_policy.env_runner.base_lowdim_runner import BaseLowdimRunner
from diffusion_policy.env_runner.pusht_runner import PushTRunner


class PushTKeypointsRunner(PushTRunner, BaseLowdimRunner):
    """The policy gets 'obs' (N, To, 20) float32 and 'obs_mask' (N, To, 20) bool, 24 with
    agent_keypoints. Other arguments: see `PushTRunner`."""

    def __init__(self, output_dir, keypoint_visible_rate=1.0, n_train=10, n_train_vis=3,
                 train_start_seed=0, n_test=22, n_test_vis=6, legacy_test=False,
                 test_start_seed=10000, max_steps=200, n_obs_steps=8, n_action_steps=8,
                 n_latency_steps=0, fps=10, crf=22, agent_keypoints=False, past_action=False,
                 tqdm_interval_sec=5.0, n_envs=None, vector="sync"):
        super().__init__(
            output_dir, PushTKeypointsEnv,
            {"keypoint_visible_rate": keypoint_visible_rate, "agent_keypoints": agent_keypoints},
            n_train=n_train, n_train_vis=n_train_vis, train_start_seed=train_start_seed,
            n_test=n_test, n_test_vis=n_test_vis, legacy_test=legacy_test,
            test_start_seed=test_start_seed, max_steps=max_steps, n_obs_steps=n_obs_steps,
            n_action_steps=n_action_steps, n_latency_steps=n_latency_steps, fps=fps, crf=crf,
            past_action=past_action, tqdm_interval_sec=tqdm_interval_sec, n_envs=n_envs, vector=vector)

    def policy_input(self, obs):
        dim = obs.shape[-1] // 2
        obs = obs[:, :self.n_obs_steps]
        return {"obs": obs[..., :dim].astype(np.float32), "obs_mask": obs[..., dim:] > 0.5}
