"""Rollouts on PushT observed through its state."""

from typing import Any

import numpy as np

from diffusion_policy.env.pusht.pusht_env import PushTEnv
from diffusion_policy.env_runner.base_lowdim_runner import BaseLowdimRunner
from diffusion_policy.env_runner.pusht_runner import PushTRunner


class PushTStateRunner(PushTRunner, BaseLowdimRunner):
    """The policy gets 'obs' (N, To, 5) float32: agent xy, block xy, block angle in [0, 2 pi).

    Args:
        rollouts: see `PushTRunner`.
    """

    def __init__(self, output_dir: str, **rollouts: Any):
        super().__init__(output_dir, PushTEnv, {}, **rollouts)

    def policy_input(self, obs: np.ndarray) -> dict[str, np.ndarray]:
        return {"obs": obs[:, : self.n_obs_steps].astype(np.float32)}
