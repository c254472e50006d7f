"""robosuite's tasks as robomimic's datasets describe them (`env_args`), without robomimic.

The interface (reset, reset_to, step, get_observation, render, is_success, get_state) and what it returns are those of robomimic's
EnvRobosuite. What differs: `step` returns the observation of the moment after it; pictures are rendered only when they are asked for; the
fixed things of a scene, such as the size of Lift's cube, which robosuite draws anew for every environment, are the same in all of them;
and `start_at` begins an episode in a given state.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import json
import logging

import numpy as np

from diffusion_policy.common.errors import ConfigError, DataError
from diffusion_policy.gym_util.mujoco_point_cloud import choose_renderer, no_renderer

ROBOSUITE = "1.5"  # the series whose controllers, observations and states are known to be read rightly
INSTALL = "Install the simulators with: pip install -e .[robomimic]"
# In these, robosuite 1.5 puts the numbers of 'object' into another order than 1.4 did.
REORDERED = ("PickPlaceCan", "NutAssemblySquare", "ToolHang", "TwoArmTransport")
SCENE_SEED = 0


def import_robosuite():
    """robosuite, of the right series and with a renderer that can be there. Raises ConfigError that says what to install."""
    try:
        version = importlib.metadata.version("robosuite")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"This task needs robosuite, which is not installed. {INSTALL}") from None
    if version.rpartition(".")[0] != ROBOSUITE:
        raise ConfigError(
            f"This task needs robosuite {ROBOSUITE}, and {version} is installed; observations and controllers of other versions "
            f"differ. {INSTALL}"
        )
    choose_renderer()
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # advice about optional parts, a dozen lines in every process
    try:
        import robosuite
    except ImportError as error:
        raise ConfigError(f"robosuite {version} cannot be imported: {error}. {INSTALL}") from error
    finally:
        logging.disable(level)
    robosuite.ROBOSUITE_DEFAULT_LOGGER.setLevel(logging.ERROR)
    return robosuite


class RobosuiteTask:
    """
    Args:
        env_args: `data.attrs['env_args']` of a dataset: {'env_name', 'env_version', 'env_kwargs'}, as text or parsed.
        abs_action: actions are goals of the arms' controllers, (position 3, axis times angle 3, gripper 1) for each arm, in the frame that
            env_args name (world for files of robosuite 1.4, which know no other).
        render_offscreen: whether pictures will be asked for.
    """

    def __init__(self, env_args, abs_action=False, render_offscreen=False):
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
        # A soft reset is fifty times faster than loading the model again, and leads to the same states.
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
        # What robosuite's step returns was measured up to some milliseconds before its end, the more the more observations were asked for
        # in between, while demonstrations hold those of the recorded states. So they are measured only when asked for, and then.
        update = self.env._update_observables
        self.env._update_observables = lambda force=False: update(force=True) if force else None

    def _controllers(self, kwargs, abs_action):
        """Controller settings in robosuite 1.5's form, one dict for all robots."""
        from robosuite.controllers.composite.composite_controller_factory import refactor_composite_controller_config

        robots = kwargs.get("robots")
        if not robots:
            raise DataError(
                "env_args name no robots, so the environment cannot be built; the file is not robomimic's, or damaged."
            )
        configs = kwargs.get("controller_configs")
        config = configs[0] if isinstance(configs, (list, tuple)) and configs else configs
        if not isinstance(config, dict):
            raise DataError(
                f"env_args have no controller_configs for {self.name}, so the meaning of its actions is unknown."
            )
        if "body_parts" not in config:  # as robosuite 1.4 wrote it: one arm's controller, always in the world's frame
            config = {
                **config,
                "input_ref_frame": "world",
                "input_type": "delta" if config.get("control_delta", True) else "absolute",
            }
            config = refactor_composite_controller_config(
                config, (robots if isinstance(robots, str) else robots[0]).lower(), ["right"]
            )
        config = copy.deepcopy(config)
        # A Panda has one arm: what is said of other limbs is only warned about.
        config["body_parts"] = {name: part for name, part in config["body_parts"].items() if name == "right"}
        for part in config["body_parts"].values():
            if part.get("type") != "OSC_POSE":
                raise DataError(f"env_args control {self.name} by {part.get('type')}; actions as poses need OSC_POSE.")
            if abs_action:
                part["input_type"] = "absolute"
        return config

    def _make(self, robosuite, kwargs, render_offscreen):
        try:
            return robosuite.make(self.name, **kwargs)
        except TypeError as error:
            raise ConfigError(f"robosuite cannot build {self.name} from these env_args: {error}") from error
        except Exception as error:  # each way in which OpenGL can be missing has its own
            if not render_offscreen:
                raise
            raise no_renderer(f"Pictures of {self.name}", error) from error

    # ------------------------------------------------------------------ robomimic's interface
    def reset(self, seed=None) -> dict:
        """A new start, the same for the same seed -> its observation."""
        with seeded(seed):
            self.env.reset()
        return self.get_observation()  # not what reset returned: it has zeros where poses relative to the hand belong

    def reset_to(self, state: dict) -> dict:
        """state: {'states': (n,) flat state of the simulator} -> its observation."""
        flat = np.asarray(state["states"], dtype=np.float64)
        size = self.get_state()["states"].size
        if flat.shape != (size,):
            raise DataError(
                f"a state of {self.name} has {size} numbers, this one {flat.size}: it is of another task or version of robosuite."
            )
        self.env.sim.set_state_from_flattened(flat)
        self.env.sim.forward()
        return self.get_observation()

    def start_at(self, state: dict) -> dict:
        """Begin an episode in a state, as `reset` would have begun it there -> its observation.

        Beyond `reset_to`: an arm's controller draws its redundant joint to the posture it had after the last reset, which a state does
        not hold. Without it, replayed demonstrations drift apart, and one in ten of Lift fails.
        """
        self.reset(
            seed=0
        )  # ends what the last episode left in the grippers; the seed keeps numpy's own random numbers as they are
        self.reset_to(state)
        for controller in self.controllers():
            controller.update_initial_joints(self.env.sim.data.qpos[controller.qpos_index])
        return self.get_observation()  # a second time: see there

    def step(self, action):
        """action (Da,) -> observation, reward 1 or 0, False, info"""
        action = np.asarray(action, dtype=np.float64)
        if action.shape != (self.action_dimension,):
            raise ConfigError(f"{self.name} takes actions of {self.action_dimension} numbers, got {action.shape}.")
        _, reward, _, info = self.env.step(action)
        return self.get_observation(), reward, False, info

    def get_observation(self) -> dict:
        """{name: array} at this moment: 'object', and everything of the robots.

        In 'object' of Can, Square, Tool-Hang and Transport, poses relative to the hand are as old as the last observation: robosuite computes
        them first, from what it measured then. robomimic's files for 1.5 hold them so, with one observation a step, and so do episodes here.
        """
        raw = self.env._get_observations(force_update=True)
        robots = tuple(robot.robot_model.naming_prefix for robot in self.env.robots)
        obs = {
            key: np.array(value)
            for key, value in raw.items()
            if key.startswith(robots) and not key.endswith("proprio-state")
        }
        return {"object": np.array(raw["object-state"]), **obs}

    def render(self, mode="rgb_array", height=84, width=84, camera_name="agentview") -> np.ndarray:
        """(height, width, 3) uint8"""
        self._use_own_context()
        return self.env.sim.render(height=height, width=width, camera_name=camera_name)[::-1]

    def get_state(self) -> dict:
        return {"states": np.array(self.env.sim.get_state().flatten())}

    def get_model(self) -> str:
        """The scene as MuJoCo's xml."""
        return self.env.sim.model.get_xml()

    def is_success(self) -> dict:
        return {"task": bool(self.env._check_success())}

    @property
    def action_dimension(self) -> int:
        return self.env.action_spec[0].shape[0]

    @property
    def control_hz(self) -> int:
        return int(self.env.control_freq)

    def camera_names(self) -> list[str]:
        return list(self.env.sim.model.camera_names)

    def controllers(self) -> list:
        """The arms' controllers, in the order of the actions."""
        return [robot.composite_controller.part_controllers["right"] for robot in self.env.robots]

    def _use_own_context(self):
        """robosuite draws into, and frees, whichever context of OpenGL is current; another environment of this process may have the last word."""
        context = self.env.sim._render_context_offscreen
        if context is not None:
            context.gl_ctx.make_current()

    def close(self):
        if getattr(self.env, "sim", None) is not None:
            self._use_own_context()
        self.env.close()


def check_env_args(env_args) -> dict:
    """The parsed env_args, once they describe a task that this robosuite plays as it was recorded."""
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
            "env_args must hold env_name and env_kwargs; these are not of a robomimic dataset of robosuite."
        )
    version = str(env_args.get("env_version") or env_args.get("version") or "")
    if version and version.rpartition(".")[0] != ROBOSUITE and env_args["env_name"] in REORDERED:
        raise ConfigError(
            f"These demonstrations of {env_args['env_name']} were recorded with robosuite {version}; {ROBOSUITE} puts the numbers of the observation "
            "'object' into another order, so a policy would be misled without notice. Take the files for 1.5: "
            "python -m diffusion_policy.scripts.download robomimic"
        )
    return env_args


@contextlib.contextmanager
def seeded(seed):
    """robosuite draws from numpy's global generator: seed it, and put it back afterwards. None changes nothing."""
    if seed is None:
        yield
        return
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(state)
