"""Base class of the wrappers for low-dimensional and for image observations."""

from collections.abc import Iterable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.env.robomimic.robosuite_task import RobosuiteTask


class RobomimicWrapper(gym.Env):
    """A task of robomimic as a gymnasium environment; reward 1 while the task is solved, else 0.

    `reset(options={'state': (n,)})` starts from a state of the simulator. The start of `reset(seed=)` depends on the
    seed only.

    Args:
        init_state: (n,) flat state of the simulator in which every episode starts.
        render_hw, render_camera_name: size and camera of video frames.
        terminate_on_success: end the episode when the task is solved. Its score, the largest reward, is known then.
    """

    metadata = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"

    def __init__(
        self,
        env: RobosuiteTask,
        init_state: np.ndarray | None = None,
        render_hw: Sequence[int] = (256, 256),
        render_camera_name: str = "agentview",
        terminate_on_success: bool = False,
    ):
        self.env = env
        self.init_state = init_state
        self.render_hw = tuple(render_hw)
        self.render_camera_name = render_camera_name
        self.terminate_on_success = terminate_on_success
        limit = np.inf if env.abs_action else 1.0
        self.action_space = spaces.Box(-limit, limit, (env.action_dimension,), np.float64)
        self.control_hz = env.control_hz

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        state = (options or {}).get("state", self.init_state)
        raw = self.env.reset(seed=seed) if state is None else self.env.start_at({"states": state})
        return self.get_observation(raw), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        raw, _, _, info = self.env.step(action)
        # Not robosuite's reward, which may be shaped and is multiplied by reward_scale.
        success = self.env.is_success()["task"]
        return self.get_observation(raw), float(success), bool(success and self.terminate_on_success), False, info

    def get_observation(self, raw: dict[str, np.ndarray] | None = None) -> Any:
        """Convert the task's raw observation, by default the current one."""
        raise NotImplementedError

    def require(self, raw: dict[str, np.ndarray], keys: Iterable[str]) -> None:
        """Raise ConfigError if a key is missing."""
        missing = [key for key in keys if key not in raw]
        if missing:
            raise ConfigError(
                f"the environment {self.env.name} has no observation {', '.join(missing)}; "
                f"it has: {', '.join(sorted(raw))}."
            )

    def render(self) -> Any:
        height, width = self.render_hw
        return self.env.render(mode="rgb_array", height=height, width=width, camera_name=self.render_camera_name)

    def close(self) -> None:
        self.env.close()
