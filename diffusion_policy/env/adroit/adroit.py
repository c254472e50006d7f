"""Adroit's tasks observed through a point cloud, with the cameras and crops of DP3."""

import contextlib
import importlib
import io
import os
from types import ModuleType
from typing import Any

import numpy as np

from diffusion_policy.common.errors import ConfigError, DataError, DataNotFoundError
from diffusion_policy.env.point_cloud_env import PointCloudEnv, dp3_view, known_task, require
from diffusion_policy.gym_util.mujoco_point_cloud import choose_renderer

TOP = (0.0, 0.0, 0.0, 1.0)  # looks down, the arm's base at the top of the image (w, x, y, z)
SLOPED = (0.92388, 0.382683, 0.0, 0.0)
#: camera: position and quaternion; tilt: rotation of the view about x in degrees; lift: added to z; floor: lowest z of
#: the crop; hand: the 24 joints of wrist and fingers in qpos; horizon: simulation steps of an episode.
TASKS: dict[str, dict[str, Any]] = {
    "hammer": {
        "camera": ((0, 0, 1.1), TOP),
        "tilt": 45,
        "lift": 1.0,
        "floor": -0.099,
        "hand": slice(2, -7),
        "horizon": 200,
    },
    "door": {
        "camera": ((0, 0, 1.5), TOP),
        "tilt": 45,
        "lift": 1.0,
        "floor": -0.499,
        "hand": slice(4, -2),
        "horizon": 200,
    },
    "pen": {
        "camera": ((0, -0.8, 0.8), SLOPED),
        "tilt": 0,
        "lift": 0.0,
        "floor": -0.79,
        "hand": slice(0, -6),
        "horizon": 100,
    },
}
CAMERA, SIZE = "vil_camera", 84
ACTION_REPEAT = 2
MAX_STEPS = {name: task["horizon"] // ACTION_REPEAT for name, task in TASKS.items()}
PEN_ALIGNED = 0.95  # cosine of the angle between pen and goal


class AdroitEnv(PointCloudEnv):
    """agent_pos (24,): joints of wrist and fingers. Action: targets of all joints in [-1, 1], held for two steps.

    An episode lasts for the task's horizon and counts as solved if the goal is reached at its end. For pen, the goal is
    the direction of the pen.
    """

    def __init__(self, task_name: str, num_points: int = 512):
        self.task_name = known_task(task_name, TASKS, "Adroit")
        self.task = TASKS[task_name]
        require("gymnasium-robotics", "adroit")
        choose_renderer()
        module = _import_quietly(f"gymnasium_robotics.envs.adroit_hand.adroit_{task_name}")
        self.env = getattr(module, f"AdroitHand{task_name.capitalize()}Env")()
        model = self.env.unwrapped.model
        camera = model.camera(CAMERA).id
        model.cam_pos[camera], model.cam_quat[camera] = self.task["camera"]
        self.steps = 0
        view = dp3_view(
            model, self.task["tilt"], 0, (0, 0, self.task["lift"]), (-10, -10, self.task["floor"]), (10, 10, 10)
        )
        self._look(model, self.env.unwrapped.data, CAMERA, SIZE, view, num_points, action_dim=model.nu)

    def _reset(self, seed: int | None) -> None:
        import mujoco

        self.steps = 0
        self.raw, _ = self.env.reset(seed=seed)
        mujoco.mj_forward(self.env.unwrapped.model, self.env.unwrapped.data)  # moves the camera to its new place

    def _step(self, action: np.ndarray) -> tuple[bool, bool]:
        for _ in range(ACTION_REPEAT):
            self.raw, _, _, _, info = self.env.step(action)
        self.steps += ACTION_REPEAT
        over = self.steps >= self.task["horizon"]
        return over and self.solved(info), over

    def solved(self, info: dict[str, Any]) -> bool:
        """Whether the goal is reached now."""
        if self.task_name != "pen":
            return bool(info["success"])
        # gymnasium-robotics also requires the pen to be in place; DP3 does not.
        return bool(np.dot(self.raw[33:36], self.raw[36:39]) > PEN_ALIGNED)

    def agent_pos(self) -> np.ndarray:
        return self.env.unwrapped.data.qpos[self.task["hand"]]


def _import_quietly(name: str) -> ModuleType:
    """Import without gymnasium-robotics' note on its dense rewards, which are not used here."""
    with contextlib.redirect_stderr(io.StringIO()):
        return importlib.import_module(name)


class DAPGExpert:
    """A policy of DAPG (Rajeswaran et al. 2018), from an .npz file of plain arrays.

    z = (obs - in_shift) / (in_scale + 1e-8)
    action = clip(out_scale (W2 tanh(W1 tanh(W0 z + b0) + b1) + b2) + out_shift, -1, 1)
    """

    KEYS = ("W0", "b0", "W1", "b1", "W2", "b2", "in_shift", "in_scale", "out_shift", "out_scale")

    def __init__(self, path: str | os.PathLike, env: AdroitEnv):
        try:
            with np.load(path, allow_pickle=False) as file:
                missing = [key for key in self.KEYS if key not in file]
                if missing:
                    raise DataError(
                        f"{path} is not an expert: it has no {', '.join(missing)} (it has: {', '.join(file)})."
                    )
                self.weights = {key: file[key].astype(np.float64) for key in self.KEYS}
        except FileNotFoundError:
            raise DataNotFoundError(f"There is no expert at {path}.") from None
        except (ValueError, OSError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{path} cannot be read as an .npz file of plain arrays: {error}") from error
        sizes = self.weights["W0"].shape[-1], self.weights["b2"].shape[-1]
        wanted = env.env.observation_space.shape[0], (env.action_space.shape or ())[0]
        if sizes != wanted:
            raise ConfigError(
                f"the expert of {path} observes {sizes[0]} numbers and gives {sizes[1]}; "
                f"{env.task_name} has {wanted[0]} and {wanted[1]}."
            )

    def get_action(self, raw: np.ndarray) -> np.ndarray:
        """Action for a raw observation of gymnasium-robotics."""
        w = self.weights
        hidden = (raw - w["in_shift"]) / (w["in_scale"] + 1e-8)
        for layer in ("0", "1"):
            hidden = np.tanh(w[f"W{layer}"] @ hidden + w[f"b{layer}"])
        return np.clip(w["out_scale"] * (w["W2"] @ hidden + w["b2"]) + w["out_shift"], -1.0, 1.0)
