"""robomimic's tasks with low-dimensional observations."""

from collections.abc import Sequence

import numpy as np
from gymnasium import spaces

from diffusion_policy.env.robomimic.robomimic_wrapper import RobomimicWrapper
from diffusion_policy.env.robomimic.robosuite_task import RobosuiteTask


class RobomimicLowdimWrapper(RobomimicWrapper):
    """Observation (Do,) float32: the arrays `obs_keys`, concatenated. Other arguments: see `RobomimicWrapper`."""

    def __init__(
        self,
        env: RobosuiteTask,
        obs_keys: Sequence[str] = ("object", "robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos"),
        init_state: np.ndarray | None = None,
        render_hw: Sequence[int] = (256, 256),
        render_camera_name: str = "agentview",
        terminate_on_success: bool = False,
    ):
        super().__init__(env, init_state, render_hw, render_camera_name, terminate_on_success)
        self.obs_keys = list(obs_keys)
        raw = env.get_observation()
        self.require(raw, self.obs_keys)
        self.observation_space = spaces.Box(-np.inf, np.inf, self.get_observation(raw).shape, np.float32)

    def get_observation(self, raw: dict[str, np.ndarray] | None = None) -> np.ndarray:
        raw = self.env.get_observation() if raw is None else raw
        return np.concatenate([raw[key] for key in self.obs_keys]).astype(np.float32)
