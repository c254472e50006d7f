"""What the wrappers for low-dimensional and for image observations share."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from diffusion_policy.common.errors import ConfigError


class RobomimicWrapper(gym.Env):
    """A task of robomimic as a gymnasium environment; reward 1 while the task is solved, else 0.

    Args:
        env: a RobosuiteTask.
        init_state: (n,) flat state of the simulator in which every episode starts.
        render_hw, render_camera_name: of the pictures for videos.
        terminate_on_success: end the episode when the task is solved. Its score, the largest reward, is known then.

    `reset(options={'state': (n,)})` starts from a state of the simulator; `reset(seed=)` from a start that the seed alone decides.
    """

    metadata = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"

    def __init__(
        self, env, init_state=None, render_hw=(256, 256), render_camera_name="agentview", terminate_on_success=False
    ):
        self.env = env
        self.init_state = init_state
        self.render_hw = tuple(render_hw)
        self.render_camera_name = render_camera_name
        self.terminate_on_success = terminate_on_success
        limit = np.inf if env.abs_action else 1.0
        self.action_space = spaces.Box(-limit, limit, (env.action_dimension,), np.float64)
        self.control_hz = env.control_hz

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        state = (options or {}).get("state", self.init_state)
        raw = self.env.reset(seed=seed) if state is None else self.env.start_at({"states": state})
        return self.get_observation(raw), {}

    def step(self, action):
        raw, _, _, info = self.env.step(action)
        # Not the reward: robosuite scales it by reward_scale, and a shaped one is more than success.
        success = self.env.is_success()["task"]
        return self.get_observation(raw), float(success), bool(success and self.terminate_on_success), False, info

    def get_observation(self, raw=None):
        raise NotImplementedError

    def require(self, raw, keys):
        missing = [key for key in keys if key not in raw]
        if missing:
            raise ConfigError(
                f"the environment {self.env.name} has no observation {', '.join(missing)}; it has: {', '.join(sorted(raw))}."
            )

    def render(self):
        height, width = self.render_hw
        return self.env.render(mode="rgb_array", height=height, width=width, camera_name=self.render_camera_name)

    def close(self):
        self.env.close()
