"""A simulator in place of a robot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.policy.interface import PolicyInterface


class SimulatedRobot:
    """An environment with the two methods of a robot; it moves one control step with every action.

    Attributes: `hz`, its control rate; `finished`, whether the episode is over; `score`, its best reward.
    """

    def __init__(self, env: Any, observe: Callable[[Any], dict[str, np.ndarray]], seed: int = 0):
        self.env, self._observe = env, observe
        self.hz: float = env.control_hz
        self.score, self.finished = 0.0, False
        self._observation = env.reset(seed=seed)[0]

    def read_observation(self) -> dict[str, np.ndarray]:
        return self._observe(self._observation)

    def send_action(self, action: np.ndarray) -> None:
        if not self.finished:
            self._observation, reward, terminated, truncated, _ = self.env.step(action)
            self.score, self.finished = max(self.score, float(reward)), terminated or truncated


def pusht(interface: PolicyInterface, seed: int = 0) -> SimulatedRobot:
    """PushT, observed as the policy expects it: state, keypoints, or image."""
    from diffusion_policy.env.pusht.pusht_env import PushTEnv
    from diffusion_policy.env.pusht.pusht_image_env import PushTImageEnv
    from diffusion_policy.env.pusht.pusht_keypoints_env import PushTKeypointsEnv

    shapes = {key: entry.shape for key, entry in interface.observation.items()}
    if shapes == {"obs": (5,)}:
        return SimulatedRobot(PushTEnv(), lambda state: {"obs": state}, seed)
    if shapes == {"obs": (20,)}:  # the second half of the observation tells which keypoints are visible: all
        return SimulatedRobot(PushTKeypointsEnv(), lambda points: {"obs": points[:20]}, seed)
    if shapes.keys() == {"image", "agent_pos"}:
        return SimulatedRobot(PushTImageEnv(render_size=shapes["image"][-1]), dict, seed)
    raise ConfigError(f"PushT cannot be observed as {shapes}; name your own robot with --robot module:function")
