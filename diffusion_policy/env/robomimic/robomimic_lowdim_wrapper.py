"""robomimic's tasks observed through numbers."""

import numpy as np
from gymnasium import spaces

from diffusion_policy.env.robomimic.robomimic_wrapper import RobomimicWrapper


class RobomimicLowdimWrapper(RobomimicWrapper):
    """Observation (Do,) float32: the arrays `obs_keys` side by side. Other arguments: see `RobomimicWrapper`."""

    def __init__(
        self,
        env,
        obs_keys=("object", "robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos"),
        init_state=None,
        render_hw=(256, 256),
        render_camera_name="agentview",
        terminate_on_success=False,
    ):
        super().__init__(env, init_state, render_hw, render_camera_name, terminate_on_success)
        self.obs_keys = list(obs_keys)
        raw = env.get_observation()
        self.require(raw, self.obs_keys)
        self.observation_space = spaces.Box(-np.inf, np.inf, self.get_observation(raw).shape, np.float32)

    def get_observation(self, raw=None):
        raw = self.env.get_observation() if raw is None else raw
        return np.concatenate([raw[key] for key in self.obs_keys]).astype(np.float32)
