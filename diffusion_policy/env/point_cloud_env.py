"""Base class of the tasks observed through a point cloud of a MuJoCo simulation."""

import difflib
import importlib.metadata
from collections.abc import Collection, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.common.point_cloud import View
from diffusion_policy.gym_util.mujoco_point_cloud import PointCloudGenerator


class PointCloudEnv(gym.Env):
    """Observation: point_cloud (num_points, 3) in metres and agent_pos (D,), float32. Reward: 1 if solved, else 0.

    A subclass builds the simulation, calls `_look`, and implements `_reset`, `_step` and `agent_pos`.

    MultiStepWrapper sets `observing` to False when the observation will not be used; it then holds the last cloud.
    The start of `reset(seed=)` depends on the seed only. `reset()` continues the last seed's random numbers.
    """

    metadata = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"
    control_hz = 10  # one video frame per step
    task_name: str

    def _reset(self, seed: int | None) -> None:
        """Start an episode."""
        raise NotImplementedError

    def _step(self, action: np.ndarray) -> tuple[bool, bool]:
        """Apply an action; return whether the task is solved and whether the episode is over."""
        raise NotImplementedError

    def agent_pos(self) -> np.ndarray:
        """State of the robot (D,)."""
        raise NotImplementedError

    def _look(
        self, model: Any, data: Any, camera: str, size: int, view: View, num_points: int, action_dim: int
    ) -> None:
        """Set up the camera and the spaces."""
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

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        self._reset(seed)
        self.observing = True
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        action = np.asarray(action, dtype=np.float64)
        shape = self.action_space.shape or ()
        if action.shape != shape:
            raise ConfigError(f"{self.task_name} takes actions of {shape[0]} numbers, got {action.shape}.")
        solved, over = self._step(action)
        return self._observation(), float(solved), over, False, {"success": solved}

    def _observation(self) -> dict[str, np.ndarray]:
        if self.observing:
            self._cloud = self.generator.point_cloud(self.view, self.num_points)
        return {"point_cloud": self._cloud, "agent_pos": self.agent_pos().astype(np.float32)}

    def frame(self) -> dict[str, np.ndarray]:
        """One step of a demonstration: point_cloud (num_points, 6), img (H, W, 3), depth (H, W), state (D,)."""
        return {**self.generator.coloured(self.view, self.num_points), "state": self.agent_pos().astype(np.float32)}

    def render(self) -> Any:
        return self.generator.image()

    def close(self) -> None:
        self.generator.close()


def dp3_view(
    model: Any,
    tilt_x: float,
    tilt_y: float,
    offset: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
) -> View:
    """DP3's frame: the camera's, rotated as the model's first camera (not this one) and by two angles in degrees."""
    x, y = np.radians([tilt_x, tilt_y])
    about_x = np.array([[1, 0, 0], [0, np.cos(x), np.sin(x)], [0, -np.sin(x), np.cos(x)]])
    about_y = np.array([[np.cos(y), 0, np.sin(y)], [0, 1, 0], [-np.sin(y), 0, np.cos(y)]])
    first = model.cam_mat0[0].reshape(3, 3) @ np.diag([1.0, -1.0, -1.0])  # MuJoCo's cameras look along -z, with y up
    return View(about_x @ about_y @ first, *(np.array(values, dtype=np.float64) for values in (offset, low, high)))


def require(package: str, extra: str) -> None:
    """Raise ConfigError with the install command unless the package and fpsample are installed."""
    for name in (package, "fpsample"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise ConfigError(
                f"This task needs the package {name}, which is not installed: pip install -e .[{extra}]"
            ) from None


def known_task(name: str, tasks: Collection[str], suite: str) -> str:
    """Return the name of a task; for an unknown one, raise ConfigError that suggests the nearest."""
    if name in tasks:
        return name
    near = difflib.get_close_matches(str(name), tasks, n=1)
    raise ConfigError(
        f"{suite} has no task {name!r}; " + (f"did you mean {near[0]}?" if near else f"there are: {', '.join(tasks)}")
    )
