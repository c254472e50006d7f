"""Rollouts on PushT observed through its state."""
import numpy as np

from diffusion_policy.env.pusht.pusht_env import PushTEnv
from diffusion_policy.env_runner.base_lowdim_runner import BaseLowdimRunner
from diffusion_policy.env_runner.pusht_runner import PushTRunner


class PushTStateRunner(PushTRunner, BaseLowdimRunner):
    """The policy gets 'obs' (N, To, 5) float32: agent xy, block xy, block angle in [0, 2 pi).
    Other arguments: see `PushTRunner`."""

    def __init__(self, output_dir, n_train=10, n_train_vis=3, train_start_seed=0, n_test=22,
                 n_test_vis=6, legacy_test=False, test_start_seed=10000, max_steps=200,
                 n_obs_steps=8, n_action_steps=8, n_latency_steps=0, fps=10, crf=22,
                 past_action=False, tqdm_interval_sec=5.0, n_envs=None, vector="sync"):
        super().__init__(
            output_dir, PushTEnv, {},
            n_train=n_train, n_train_vis=n_train_vis, train_start_seed=train_start_seed,
            n_test=n_test, n_test_vis=n_test_vis, legacy_test=legacy_test,
            test_start_seed=test_start_seed, max_steps=max_steps, n_obs_steps=n_obs_steps,
            n_action_steps=n_action_steps, n_latency_steps=n_latency_steps, fps=fps, crf=crf,
            past_action=past_action, tqdm_interval_sec=tqdm_interval_sec, n_envs=n_envs, vector=vector)

    def policy_input(self, obs):
        return {"obs": obs[:, :self.n_obs_steps].astype(np.float32)}
