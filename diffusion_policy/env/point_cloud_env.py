"""What the tasks observed through a point cloud of a MuJoCo simulation share."""

from __future__ import annotations

import difflib
import importlib.metadata

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.common.point_cloud import View
from diffusion_policy.gym_util.mujoco_point_cloud import PointCloudGenerator


class PointCloudEnv(gym.Env):
    """Observation: point_cloud (num_points, 3) in metres and agent_pos (D,), float32. Reward: 1 when the task counts as solved, else 0.

    A subclass makes the simulation, calls `_look`, and defines `_reset(seed)`, `_step(action) -> (solved, over)` and `agent_pos() -> (D,)`.

    `observing` is set by MultiStepWrapper: while it is False nobody looks at the observation, and the last cloud stands for it.
    `reset(seed=)` starts where the seed alone decides; without one, where the last seed's numbers go on.
    """

    metadata = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"
    control_hz = 10  # one picture of a video for each step

    def _look(self, model, data, camera: str, size: int, view: View, num_points: int, action_dim: int) -> None:
        self.view, self.num_points = view, num_points
        self.generator = PointCloudGenerator(model, data, camera, size)
        self.observing = True
        self.action_space = spaces.Box(-1.0, 1.0, (action_dim,), np.float32)
        self.observation_space = spaces.Dict(
            {
                "point_cloud": spaces.Box(-np.inf, np.inf, (num_points, 3), np.float32),
                "agent_pos": spaces.Box(-np.inf, np.inf, self.agent_pos().shape, np.float32),
            }
        )

    def reset(self, *, seed=None, options=None):
        self._reset(seed)
        self.observing = True
        return self._observation(), {}

    def step(self, action):
        action = np.asarray(action, dtype=np.float64)
        if action.shape != self.action_space.shape:
            raise ConfigError(
                f"{self.task_name} takes actions of {self.action_space.shape[0]} numbers, got {action.shape}."
            )
        solved, over = self._step(action)
        return self._observation(), float(solved), over, False, {"success": solved}

    def _observation(self):
        if self.observing:
            self._cloud = self.generator.point_cloud(self.view, self.num_points)
        return {"point_cloud": self._cloud, "agent_pos": self.agent_pos().astype(np.float32)}

    def frame(self) -> dict[str, np.ndarray]:
        """What a demonstration records of this moment: point_cloud (num_points, 6), img (H, W, 3), depth (H, W), state (D,)."""
        return {**self.generator.coloured(self.view, self.num_points), "state": self.agent_pos().astype(np.float32)}

    def render(self):
        return self.generator.picture()

    def close(self):
        self.generator.close()


def dp3_view(model, tilt_x: float, tilt_y: float, offset, low, high) -> View:
    """DP3's frame: that of the camera, turned by the rotation of the model's first camera (not of this one) and by two angles in degrees."""
    x, y = np.radians([tilt_x, tilt_y])
    about_x = np.array([[1, 0, 0], [0, np.cos(x), np.sin(x)], [0, -np.sin(x), np.cos(x)]])
    about_y = np.array([[np.cos(y), 0, np.sin(y)], [0, 1, 0], [-np.sin(y), 0, np.cos(y)]])
    first = model.cam_mat0[0].reshape(3, 3) @ np.diag([1.0, -1.0, -1.0])  # MuJoCo's cameras look along -z, with y up
    return View(about_x @ about_y @ first, *(np.array(values, dtype=np.float64) for values in (offset, low, high)))


def require(package: str, extra: str) -> None:
    """ConfigError that says how to install it, unless the package and fpsample are there."""
    for name in (package, "fpsample"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise ConfigError(
                f"This task needs the package {name}, which is not installed: pip install -e .[{extra}]"
            ) from None


def known_task(name, tasks, suite: str) -> str:
    """The name, or ConfigError that suggests the nearest."""
    if name in tasks:
        return name
    near = difflib.get_close_matches(str(name), tasks, n=1)
    raise ConfigError(
        f"{suite} has no task {name!r}; " + (f"did you mean {near[0]}?" if near else f"there are: {', '.join(tasks)}")
    )
