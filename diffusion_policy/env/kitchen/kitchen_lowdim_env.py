"""Franka Kitchen with the observations and actions of the relay-policy-learning demonstrations."""

import importlib.metadata
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.gym_util.mujoco_point_cloud import choose_renderer, no_renderer

PACKAGE = "gymnasium-robotics"
JOINTS, OBJECTS, GOAL = 9, 21, 30  # numbers of the observation: robot, objects, and a goal, which is always zero
TASKS = 7


def require_kitchen() -> None:
    """Raise ConfigError with the install command unless the simulator is installed."""
    try:
        importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"The kitchen needs the package {PACKAGE}, which is not installed: pip install -e .[kitchen]; or train "
            "without a simulator: task.env_runner=null"
        ) from None


class KitchenLowdimEnv(gym.Env):
    """gymnasium-robotics' FrankaKitchen as upstream's kitchen: obs (60,), action (9,), reward: share of solved tasks.

    Both are ports of the same simulation: the 30 numbers of qpos (9 of the robot, 21 of the objects) have the same
    order and the same goals. The episode ends when all seven tasks are solved; a solved task stays solved.

    Args:
        abs_action: actions are joint positions; else joint velocities, in units of 2 rad/s, from -1 to 1.
        robot_noise_ratio: scale of the observation noise of robot and objects.
        render_hw: height and width of video frames.
    """

    metadata = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"
    control_hz = 12.5

    def __init__(self, abs_action: bool = False, robot_noise_ratio: float = 0.1, render_hw: Sequence[int] = (240, 360)):
        require_kitchen()
        choose_renderer()
        from gymnasium_robotics.envs.franka_kitchen import KitchenEnv

        self.env = KitchenEnv(
            robot_noise_ratio=robot_noise_ratio,
            object_noise_ratio=robot_noise_ratio,
            render_mode="rgb_array",
            height=render_hw[0],
            width=render_hw[1],
        )
        self.robot = self.env.robot_env
        self.start = self.robot.init_qpos.copy(), self.robot.init_qvel.copy()
        self.abs_action = abs_action
        if abs_action:  # positions are reached as fast as the joints allow
            self.robot.act_rng = self.robot.robot_vel_bound[:JOINTS, 1]
        self.observation_space = spaces.Box(-np.inf, np.inf, (JOINTS + OBJECTS + GOAL,), np.float32)
        self.action_space = spaces.Box(-8.0, 8.0, (JOINTS,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start from `options`, {'qpos': (30,), 'qvel': (29,)}, or from the simulator's own start."""
        super().reset(seed=seed)
        self.robot.init_qpos, self.robot.init_qvel = (
            (options["qpos"], options["qvel"]) if options else (array.copy() for array in self.start)
        )
        obs, _ = self.env.reset(seed=seed)
        return self._observation(obs), {"completed_tasks": set()}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        action = np.asarray(action, dtype=np.float64)
        if action.shape != (JOINTS,):
            raise ConfigError(f"The kitchen takes actions of {JOINTS} numbers, got {action.shape}.")
        if self.abs_action:
            action = (action - self.robot._last_robot_qpos) / (self.robot.dt * self.robot.act_rng)
        obs, _, terminated, truncated, info = self.env.step(action)
        completed = set(info["episode_task_completions"])
        return self._observation(obs), len(completed) / TASKS, terminated, truncated, {"completed_tasks": completed}

    def _observation(self, obs: dict[str, Any]) -> np.ndarray:
        """Robot and objects of FrankaKitchen's observation (robot 9 + 9 velocities, objects 21 + 20), and no goal."""
        state = obs["observation"]
        objects = state[2 * JOINTS : 2 * JOINTS + OBJECTS]
        return np.concatenate([state[:JOINTS], objects, np.zeros(GOAL)]).astype(np.float32)

    def render(self) -> Any:
        try:
            return self.env.render()
        except Exception as error:  # a missing library or display, in many ways
            raise no_renderer("the kitchen", error) from error

    def close(self) -> None:
        self.env.close()
