"""PushT in simulation as a robot of LeRobot, to run its loops for robots: state and action are positions."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import gym_pusht  # noqa: F401  registers the environment
import gymnasium
import numpy as np
from lerobot.robots import Robot, RobotConfig

STATE = ("agent_x", "agent_y", *(f"corner_{number}" for number in range(16)))


@RobotConfig.register_subclass("simulated_pusht")
@dataclass
class SimulatedPushTConfig(RobotConfig):
    seed: int = 0


class SimulatedPushT(Robot):
    config_class = SimulatedPushTConfig
    name = "simulated_pusht"
    #: Observations and actions of the last robot that was made, for tests.
    diary: list[tuple[str, np.ndarray]] = []

    def __init__(self, config: SimulatedPushTConfig) -> None:
        super().__init__(config)
        self.config = config
        self.env: Any = None
        SimulatedPushT.diary = []

    @functools.cached_property
    def observation_features(self) -> dict[str, type]:
        return {f"{name}.pos": float for name in STATE}

    @functools.cached_property
    def action_features(self) -> dict[str, type]:
        return {"x.pos": float, "y.pos": float}

    @property
    def is_connected(self) -> bool:
        return self.env is not None

    is_calibrated = True

    def connect(self, calibrate: bool = True) -> None:
        self.env = gymnasium.make("gym_pusht/PushT-v0", obs_type="environment_state_agent_pos").unwrapped
        self.observation, _ = self.env.reset(seed=self.config.seed)

    def calibrate(self) -> None:
        pass

    def configure(self) -> None:
        pass

    def get_observation(self) -> dict[str, Any]:
        values = np.concatenate([self.observation["agent_pos"], self.observation["environment_state"]])
        self.diary.append(("observation", values))
        return {f"{name}.pos": float(value) for name, value in zip(STATE, values, strict=True)}

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        target = np.array([float(action["x.pos"]), float(action["y.pos"])])
        self.diary.append(("action", target))
        self.observation, *_ = self.env.step(target)
        return action

    def disconnect(self) -> None:
        self.env = None
