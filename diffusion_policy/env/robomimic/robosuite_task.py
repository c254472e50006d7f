"""robosuite's tasks as robomimic's datasets describe them (`env_args`), without robomimic.

The interface (reset, reset_to, step, get_observation, render, is_success, get_state) and its results are those of
robomimic's EnvRobosuite, with these differences: `step` returns the observation at its end; images are rendered only on
request; the fixed parts of a scene, such as the size of Lift's cube, are equal in all environments (robosuite draws
them for each one); and `start_at` begins an episode in a given state.
"""

import contextlib
import copy
import importlib.metadata
import json
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np

from diffusion_policy.common.errors import ConfigError, DataError
from diffusion_policy.gym_util.mujoco_point_cloud import choose_renderer, no_renderer

ROBOSUITE = "1.5"  # the supported series: others have other controllers, observations and states
INSTALL = "Install the simulators with: pip install -e .[robomimic]"
# Environments whose observation 'object' has another order in robosuite 1.5 than in 1.4.
REORDERED = ("PickPlaceCan", "NutAssemblySquare", "ToolHang", "TwoArmTransport")
SCENE_SEED = 0


def import_robosuite() -> Any:
    """Import robosuite of the supported series; raise ConfigError with the install command if that fails."""
    try:
        version = importlib.metadata.version("robosuite")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"This task needs robosuite, which is not installed. {INSTALL}") from None
    if version.rpartition(".")[0] != ROBOSUITE:
        raise ConfigError(
            f"This task needs robosuite {ROBOSUITE}, and {version} is installed; observations and controllers of other "
            f"versions differ. {INSTALL}"
        )
    choose_renderer()
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # a dozen lines on optional parts in every process
    try:
        import robosuite
    except ImportError as error:
        raise ConfigError(f"robosuite {version} cannot be imported: {error}. {INSTALL}") from error
    finally:
        logging.disable(level)
    robosuite.ROBOSUITE_DEFAULT_LOGGER.setLevel(logging.ERROR)
    return robosuite


class RobosuiteTask:
    """A robosuite environment.

    Args:
        env_args: `data.attrs['env_args']` of a dataset: {'env_name', 'env_version', 'env_kwargs'}, as text or parsed.
        abs_action: actions are goals of the arms' controllers, (position 3, axis-angle 3, gripper 1) per arm, in the
            frame given by env_args (for files of robosuite 1.4 always the world frame).
        render_offscreen: whether `render` will be called.
    """

    def __init__(
        self, env_args: str | bytes | dict[str, Any] | None, abs_action: bool = False, render_offscreen: bool = False
    ):
        robosuite = import_robosuite()
        self.env_args = check_env_args(env_args)
        self.name = self.env_args["env_name"]
        if self.name not in robosuite.ALL_ENVIRONMENTS:
            raise ConfigError(
                f"env_args name the environment {self.name!r}, which robosuite does not have; it has: "
                f"{', '.join(sorted(robosuite.ALL_ENVIRONMENTS))}."
            )
        kwargs = copy.deepcopy(self.env_args["env_kwargs"])
        kwargs["controller_configs"] = self._controllers(kwargs, abs_action)
        # A soft reset gives the same states, fifty times faster than loading the model again.
        kwargs.update(
            has_renderer=False,
            has_offscreen_renderer=render_offscreen,
            use_camera_obs=False,
            use_object_obs=True,
            ignore_done=True,
            hard_reset=False,
        )
        kwargs.setdefault("renderer", "mjviewer")
        for key in ("camera_names", "camera_heights", "camera_widths", "camera_depths", "camera_segmentations"):
            kwargs.pop(key, None)
        with seeded(SCENE_SEED):
            self.env = self._make(robosuite, kwargs, render_offscreen)
        self.abs_action = abs_action
        # robosuite's step returns observations measured some milliseconds before its end, while demonstrations hold
        # those of the recorded states. So observations are measured only on request.
        update = self.env._update_observables
        self.env._update_observables = lambda force=False: update(force=True) if force else None

    def _controllers(self, kwargs: dict[str, Any], abs_action: bool) -> dict[str, Any]:
        """Controller settings in robosuite 1.5's form, one dict for all robots."""
        from robosuite.controllers.composite.composite_controller_factory import refactor_composite_controller_config

        robots = kwargs.get("robots")
        if not robots:
            raise DataError(
                "env_args name no robots, so the environment cannot be built: not a robomimic file, or damaged."
            )
        configs = kwargs.get("controller_configs")
        config = configs[0] if isinstance(configs, (list, tuple)) and configs else configs
        if not isinstance(config, dict):
            raise DataError(
                f"env_args have no controller_configs for {self.name}, so the meaning of its actions is unknown."
            )
        if "body_parts" not in config:  # robosuite 1.4: one arm's controller, always in the world frame
            config = {
                **config,
                "input_ref_frame": "world",
                "input_type": "delta" if config.get("control_delta", True) else "absolute",
            }
            config = refactor_composite_controller_config(
                config, (robots if isinstance(robots, str) else robots[0]).lower(), ["right"]
            )
        config = copy.deepcopy(config)
        # A Panda has one arm; settings of other limbs would only cause warnings.
        config["body_parts"] = {name: part for name, part in config["body_parts"].items() if name == "right"}
        for part in config["body_parts"].values():
            if part.get("type") != "OSC_POSE":
                raise DataError(f"env_args control {self.name} by {part.get('type')}; actions as poses need OSC_POSE.")
            if abs_action:
                part["input_type"] = "absolute"
        return config

    def _make(self, robosuite: Any, kwargs: dict[str, Any], render_offscreen: bool) -> Any:
        try:
            return robosuite.make(self.name, **kwargs)
        except TypeError as error:
            raise ConfigError(f"robosuite cannot build {self.name} from these env_args: {error}") from error
        except Exception as error:  # a missing OpenGL library can raise any type
            if not render_offscreen:
                raise
            raise no_renderer(f"Images of {self.name}", error) from error

    # ------------------------------------------------------------------ robomimic's interface
    def reset(self, seed: int | None = None) -> dict[str, np.ndarray]:
        """Draw a start, the same for the same seed, and return its observation."""
        with seeded(seed):
            self.env.reset()
        return self.get_observation()  # in reset's own result, poses relative to the hand are 0

    def reset_to(self, state: dict[str, Any]) -> dict[str, np.ndarray]:
        """Set {'states': (n,) flat state of the simulator} and return its observation."""
        flat = np.asarray(state["states"], dtype=np.float64)
        size = self.get_state()["states"].size
        if flat.shape != (size,):
            raise DataError(
                f"a state of {self.name} has {size} numbers, this one has {flat.size}: it belongs to another task or "
                "version of robosuite."
            )
        self.env.sim.set_state_from_flattened(flat)
        self.env.sim.forward()
        return self.get_observation()

    def start_at(self, state: dict[str, Any]) -> dict[str, np.ndarray]:
        """Begin an episode in a state, as if `reset` had drawn it, and return its observation.

        An arm's controller pulls its redundant joint to the posture after the last reset, which is not part of a state;
        `reset_to` does not change it. Without it replayed demonstrations drift, and one in ten of Lift fails.
        """
        self.reset(seed=0)  # resets the grippers; with a seed, numpy's global generator is not changed
        self.reset_to(state)
        for controller in self.controllers():
            controller.update_initial_joints(self.env.sim.data.qpos[controller.qpos_index])
        return self.get_observation()  # a second time, because poses relative to the hand lag by one observation

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, dict[str, Any]]:
        """action (Da,) -> observation, reward 1 or 0, False, info."""
        action = np.asarray(action, dtype=np.float64)
        if action.shape != (self.action_dimension,):
            raise ConfigError(f"{self.name} takes actions of {self.action_dimension} numbers, got {action.shape}.")
        _, reward, _, info = self.env.step(action)
        return self.get_observation(), reward, False, info

    def get_observation(self) -> dict[str, np.ndarray]:
        """The current {name: array}: 'object', and all observations of the robots.

        In 'object' of Can, Square, Tool-Hang and Transport, poses relative to the hand lag by one observation:
        robosuite computes them from its previous measurements. robomimic's files for 1.5, with one observation per
        step, hold the same values.
        """
        raw = self.env._get_observations(force_update=True)
        robots = tuple(robot.robot_model.naming_prefix for robot in self.env.robots)
        obs = {
            key: np.array(value)
            for key, value in raw.items()
            if key.startswith(robots) and not key.endswith("proprio-state")
        }
        return {"object": np.array(raw["object-state"]), **obs}

    def render(
        self, mode: str = "rgb_array", height: int = 84, width: int = 84, camera_name: str = "agentview"
    ) -> np.ndarray:
        """(height, width, 3) uint8."""
        self._use_own_context()
        return self.env.sim.render(height=height, width=width, camera_name=camera_name)[::-1]

    def get_state(self) -> dict[str, np.ndarray]:
        """{'states': (n,) flat state of the simulator}."""
        return {"states": np.array(self.env.sim.get_state().flatten())}

    def get_model(self) -> str:
        """The scene as MuJoCo's xml."""
        return self.env.sim.model.get_xml()

    def is_success(self) -> dict[str, bool]:
        """{'task': whether the task is solved}."""
        return {"task": bool(self.env._check_success())}

    @property
    def action_dimension(self) -> int:
        return self.env.action_spec[0].shape[0]

    @property
    def control_hz(self) -> int:
        return int(self.env.control_freq)

    def camera_names(self) -> list[str]:
        """Names of the scene's cameras."""
        return list(self.env.sim.model.camera_names)

    def controllers(self) -> list:
        """The arms' controllers, in the order of the actions."""
        return [robot.composite_controller.part_controllers["right"] for robot in self.env.robots]

    def _use_own_context(self) -> None:
        """Make this environment's OpenGL context current; robosuite would use that of another environment."""
        context = self.env.sim._render_context_offscreen
        if context is not None:
            context.gl_ctx.make_current()

    def close(self) -> None:
        if getattr(self.env, "sim", None) is not None:
            self._use_own_context()
        self.env.close()


def check_env_args(env_args: str | bytes | dict[str, Any] | None) -> dict[str, Any]:
    """Parse env_args; raise an error unless this robosuite simulates the task as it was recorded."""
    if env_args is None:
        raise DataError("the dataset has no env_args (attribute of 'data'), so its environment cannot be built.")
    if isinstance(env_args, (str, bytes)):
        try:
            env_args = json.loads(env_args)
        except ValueError as error:
            raise DataError(f"the dataset's env_args are not JSON: {error}") from error
    if (
        not isinstance(env_args, dict)
        or not isinstance(env_args.get("env_name"), str)
        or not isinstance(env_args.get("env_kwargs"), dict)
    ):
        raise DataError(
            "env_args must hold env_name and env_kwargs; these do not belong to a robomimic dataset of robosuite."
        )
    version = str(env_args.get("env_version") or env_args.get("version") or "")
    if version and version.rpartition(".")[0] != ROBOSUITE and env_args["env_name"] in REORDERED:
        raise ConfigError(
            f"These demonstrations of {env_args['env_name']} were recorded with robosuite {version}; {ROBOSUITE} has "
            "another order of the observation 'object', so a policy would get wrong inputs. Use the files for 1.5: "
            "python -m diffusion_policy.scripts.download robomimic"
        )
    return env_args


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed numpy's global generator, from which robosuite draws, and restore it afterwards. None changes nothing."""
    if seed is None:
        yield
        return
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(state)
