"""DexArt's tasks (Bao et al. 2023) observed through a point cloud.

DexArt is not on PyPI; the errors of `import_dexart` tell how to install it.
"""

import contextlib
import importlib.metadata
import pathlib
from typing import Any

import cv2
import gymnasium as gym
import numpy as np
from gymnasium import spaces

from diffusion_policy.common.errors import ConfigError, DataError
from diffusion_policy.common.random_state import isolated_random_state
from diffusion_policy.env.point_cloud_env import known_task

TASKS = ("laptop", "faucet", "bucket", "toilet")
#: Size of DexArt's 'state': joints 22, the palm's velocity 3, angular velocity 3 and position 3, (bucket: how upright
#: it is 1,) elapsed fraction of the horizon 1.
STATE_DIM = {"laptop": 32, "faucet": 32, "bucket": 33, "toilet": 32}
ACTION_DIM = 22  # the arm's velocity 6, the fingers' joints 16
IMAGINED = 96  # points on the fingers, computed from the joints
OBSERVATIONS = "instance_pc_seg"  # DexArt's name for the noisy clouds of its policies and of DP3's demonstrations
SAPIEN = "2.2"  # the series that DexArt is written for
SCENE_SEED = 0
RENDER_SIZE = 256
INSTALL = (
    "DexArt is the public GitHub repository Kami-code/dexart-release: clone it and pip install -e . there, which "
    "installs SAPIEN 2.2.1 (for Python up to 3.11, and numpy<2); put the assets that its README links into the clone "
    "as assets/. It needs an NVIDIA GPU with a Vulkan driver to render. Training needs none of this: "
    "task.env_runner=null trains without evaluating."
)


class DexArtEnv(gym.Env):
    """A task of DexArt as a gymnasium environment.

    Observation: point_cloud (num_points, 3) and imagin_robot (96, 3) in metres, in the frame of the robot's base, and
    agent_pos (state_dim,), all float32. Action (22,) in [-1, 1]. Reward: 1 while the task is solved, else 0.

    With `reset(seed=)` the object, its place, and the points of the camera with their noise depend on the seed only.

    Args:
        task_name: one of TASKS.
        num_points: number of points; DexArt has 512, DP3's copy 1024.
        state_dim: how many of DexArt's state numbers to observe, from the first; None for all.
        use_test_set: use DexArt's test objects instead of those of the demonstrations.
        terminate_on_success: end the episode when it is solved. Success at any step counts, so the score is known then.
    """

    metadata = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"

    def __init__(
        self,
        task_name: str,
        num_points: int = 1024,
        state_dim: int | None = None,
        use_test_set: bool = False,
        terminate_on_success: bool = True,
    ):
        create_env, settings = check_task(task_name, num_points, state_dim)
        self.task_name, self.num_points, self.terminate_on_success = task_name, num_points, terminate_on_success
        self.state_dim = state_dim or STATE_DIM[task_name]
        self.objects = list(settings.TRAIN_CONFIG[task_name]["unseen" if use_test_set else "seen"])
        self.camera = settings.EVAL_CAM_NAMES_CONFIG[task_name][0]
        with contextlib.suppress(ImportError, AttributeError):  # Open3D before 0.16 has no such function
            import open3d

            open3d.utility.random.seed(SCENE_SEED)  # it chooses the points on the fingers, once per environment
        try:
            with isolated_random_state(SCENE_SEED):
                self.env: Any = create_env(
                    task_name=task_name,
                    use_visual_obs=True,
                    is_eval=True,
                    pc_noise=True,
                    pc_seg=True,
                    index=self.objects,
                    img_type="robot",
                    **settings.RANDOM_CONFIG[task_name],
                )
        except Exception as error:  # missing Vulkan, CUDA or files can raise any type
            raise ConfigError(
                f"DexArt cannot build {task_name}: {type(error).__name__}: {error}. SAPIEN renders through Vulkan and "
                f"copies images through CUDA, and needs all of DexArt's assets. {INSTALL}"
            ) from error
        self.control_hz = round(1 / self.env.control_time_step)
        self.action_space = spaces.Box(-1.0, 1.0, (ACTION_DIM,), np.float32)
        self.observation_space = spaces.Dict(
            {
                key: spaces.Box(-np.inf, np.inf, shape, np.float32)
                for key, shape in (
                    ("point_cloud", (num_points, 3)),
                    ("imagin_robot", (IMAGINED, 3)),
                    ("agent_pos", (self.state_dim,)),
                )
            }
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        seed = int(self.np_random.integers(2**31) if seed is None else seed)
        # DexArt takes a random or the next object of its list, depending on the task. A list of one fixes the choice.
        self.env.instance_list = [self.objects[seed % len(self.objects)]]
        with isolated_random_state(seed):  # the object's place is drawn from numpy's global generator,
            self.env.seed(seed)  # points and noise, at every step, from DexArt's
            raw = self.env.reset()
        return self._observation(raw), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        action = np.asarray(action, dtype=np.float64)
        if action.shape != self.action_space.shape:
            raise ConfigError(f"{self.task_name} takes actions of {ACTION_DIM} numbers, got {action.shape}.")
        raw = self.env.step(action)[0]
        solved = bool(self.env.is_eval_done)
        # Not DexArt's `done`, which also ends a solved episode.
        over = bool(self.env.current_step >= self.env.horizon)
        return self._observation(raw), float(solved), solved and self.terminate_on_success, over, {"success": solved}

    def _observation(self, raw: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        # After the coordinates come masks (points on the fingers) and, in DP3's copy, colours (points of the camera).
        obs = {
            "point_cloud": raw["instance_1-point_cloud"][: self.num_points, :3],
            "imagin_robot": raw["imagination_robot"][:, :3],
            "agent_pos": raw["state"][: self.state_dim],
        }
        for key, value in obs.items():
            if not np.isfinite(value).all():
                raise DataError(
                    f"{key} of DexArt's {self.task_name} is not finite at step {self.env.current_step}: the simulation "
                    "has diverged, or the renderer is broken."
                )
        return {key: np.asarray(value, dtype=np.float32) for key, value in obs.items()}

    def render(self) -> Any:
        self.env.scene.update_render()
        camera = self.env.cameras[self.camera]
        camera.take_picture()
        image = np.clip(camera.get_color_rgba()[..., :3], 0, 1)  # (1000, 1000, 3)
        return cv2.resize((255 * image).astype(np.uint8), (RENDER_SIZE, RENDER_SIZE), interpolation=cv2.INTER_AREA)

    def close(self) -> None:
        self.env = None  # DexArt frees the scene with its last reference


def check_task(task_name: str, num_points: int, state_dim: int | None = None) -> tuple[Any, Any]:
    """Check the arguments without building anything or using a GPU; return DexArt's `create_env` and `task_setting`."""
    known_task(task_name, TASKS, "DexArt")
    if state_dim is not None and not 1 <= state_dim <= STATE_DIM[task_name]:
        raise ConfigError(
            f"DexArt's {task_name} has {STATE_DIM[task_name]} numbers of state, {state_dim} are asked for: "
            "change task.state_dim."
        )
    create_env, settings = import_dexart()
    points = settings.OBS_CONFIG[OBSERVATIONS]["instance_1"]["point_cloud"]["num_points"]
    if not 1 <= num_points <= points:
        raise ConfigError(
            f"this DexArt has {points} points, {num_points} are asked for: set task.num_points to at most {points}, or "
            "install DP3's copy of DexArt (third_party/dexart-release of YanjieZe/3D-Diffusion-Policy), which has 1024."
        )
    return create_env, settings


def import_dexart() -> tuple[Any, Any]:
    """DexArt's `create_env` and `task_setting`; raise ConfigError with install instructions if something is missing."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("sapien")
        if version.rpartition(".")[0] != SAPIEN:
            raise ConfigError(f"DexArt needs SAPIEN {SAPIEN}, and {version} is installed. {INSTALL}")
        with_numpy = importlib.metadata.version("numpy")
        if int(with_numpy.partition(".")[0]) >= 2:  # SAPIEN 2's binaries misread its arrays: Pose().q is (1, 1, 1, 1)
            raise ConfigError(
                f"SAPIEN {version} computes wrong poses with numpy {with_numpy}, without an error: "
                f"pip install 'numpy<2'. {INSTALL}"
            )
    try:
        from dexart.env import task_setting
        from dexart.env.create_env import create_env
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name:
            raise ConfigError(
                f"DexArt's tasks need the package {error.name.partition('.')[0]}, which is not installed. {INSTALL}"
            ) from error
        raise ConfigError(f"DexArt cannot be imported: {error}. {INSTALL}") from error
    assets = pathlib.Path(task_setting.__file__).resolve().parents[2] / "assets"
    missing = [name for name in ("annotation", "robot", "sapien") if not (assets / name).is_dir()]
    if missing:
        raise ConfigError(f"DexArt's assets are not installed: {assets} has no {', '.join(missing)}. {INSTALL}")
    return create_env, task_setting
