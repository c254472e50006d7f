"""Pick Peach: an arm takes a peach from one of two places and puts it on the left or the right of a plate.

The task of the paper's real robot, in simulation. The observation of joint positions does not hold the peach; what it
tells is at which of the two places the peach lies, because the arm faces it at the start.
"""

import dataclasses
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.env.pick_peach.simulation import CAMERAS, JOINTS, draw, load_model

CONTROL_HZ = 50
ACTION_DIM = len(JOINTS) + 1
FINGER_RANGE = 0.056  # of a finger in metres; the gripper's numbers are shares of it
PEACH_RADIUS = 0.033
#: The gripper closes on the peach at this share; a command in the band neither holds a peach nor lets it go.
PEACH_WIDTH = PEACH_RADIUS / FINGER_RANGE
HALF_OPEN = (0.9 * PEACH_WIDTH, 0.9)

#: Where the peach lies at the start, and by how much each coordinate varies.
STARTS = {"left": (0.42, 0.24), "right": (0.42, -0.24)}
START_RANGE = 0.02
READY = (0.0, -0.6, 0.75, 0.0, 0.85, 0.0)  # joints at the start; the waist turns to the peach's place
READY_RANGE = 0.03
PLATE = (0.5, 0.0)
PLATE_RADIUS = 0.13
PLATE_TOP = 0.008
PLACEMENTS = ("left", "right", "middle")
MIDDLE = 0.015  # a peach that comes to rest closer than this to the plate's middle line is on neither side

LIFTED = 0.03  # height above the table at which a held peach counts as lifted
AT_REST = 0.03  # metres per second
REST_STEPS = 10
FAILURES = ("missed", "behind", "frozen", "dropped", "wrong_place", "timeout")
BEHIND = 0.015  # a grasp that closes this far beyond the peach, seen from the arm's base
STILL = CONTROL_HZ  # steps over which a gripper that stays half open counts as frozen


@dataclasses.dataclass
class Progress:
    """What has happened in an episode."""

    grasp_offset: float | None = None  # of the first grasp, in metres: positive beyond the peach, seen from the base
    lifted: bool = False
    left_hand: str | None = None  # how a lifted peach left the gripper: released, or slipped
    rest_steps: int = 0
    half_open_steps: int = 0  # up to now, without a break
    placement: str | None = None  # left, right or middle, once the peach rests on the plate


class PickPeachEnv(gym.Env):
    """Observation: qpos (7,), six joints in radians and the gripper from 0, closed, to 1, open. Action: their targets.

    With `cameras`, the observation is {qpos, front, head}, with images (size, size, 3) uint8.

    The reward is 1 once the peach was grasped by both fingers, lifted, and rests on the plate, untouched. A seed
    decides the start: even seeds have the peach on the left. `observing` is set to False by MultiStepWrapper when
    images will not be used; they are then not drawn anew.

    Args:
        cameras: names of cameras, or none for qpos alone.
        image_size: height and width of their images.
        terminate_on_success: end an episode when it is solved.
    """

    metadata = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"
    control_hz = CONTROL_HZ
    still_distance = 0.005  # of the fingers, for an episode that ends still

    def __init__(self, cameras: tuple[str, ...] = (), image_size: int = 96, terminate_on_success: bool = True):
        unknown = [camera for camera in cameras if camera not in CAMERAS]
        if unknown:
            raise ConfigError(f"Pick Peach has no camera {unknown[0]!r}; there are: {', '.join(CAMERAS)}")
        self.model = load_model()
        import mujoco

        self.mujoco = mujoco
        self.cameras, self.image_size, self.terminate_on_success = tuple(cameras), image_size, terminate_on_success
        self.data = mujoco.MjData(self.model)
        self.observing = True
        self.substeps = round(1 / (CONTROL_HZ * self.model.opt.timestep))
        joints = [self.model.joint(name) for name in (*JOINTS, "left_finger")]
        self._qpos = np.array([joint.qposadr[0] for joint in joints])
        self._qvel = np.array([joint.dofadr[0] for joint in joints])
        self._right = self.model.joint("right_finger").qposadr[0]
        self._peach = self.model.joint("peach").qposadr[0]
        self._peach_vel = self.model.joint("peach").dofadr[0]
        geoms = {name: self.model.geom(name).id for name in ("peach", "plate", "left_pad", "right_pad", "palm")}
        self._peach_geom, self._plate_geom = geoms["peach"], geoms["plate"]
        self._hand_geoms = {geoms["left_pad"], geoms["right_pad"], geoms["palm"]}
        self._pads = {geoms["left_pad"], geoms["right_pad"]}
        self._scale = np.array([1.0] * len(JOINTS) + [FINGER_RANGE])
        self._limits = (self.model.actuator_ctrlrange / self._scale[:, None]).T  # lowest and highest action
        self.action_space = spaces.Box(*self._limits.astype(np.float32))
        box = spaces.Box(-np.inf, np.inf, (ACTION_DIM,), np.float32)
        image = spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
        self.observation_space: spaces.Space = (
            spaces.Dict({"qpos": box, **dict.fromkeys(self.cameras, image)}) if self.cameras else box
        )
        self.progress = Progress()
        self.start = "left"

    # ------------------------------------------------------------------ episodes
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray | dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        number = int(self.np_random.integers(2)) if seed is None else seed
        self.start = ("left", "right")[number % 2]
        place = np.array(STARTS[self.start])
        ready = np.array(READY)
        ready[0] = np.arctan2(place[1], place[0])
        ready += self.np_random.uniform(-READY_RANGE, READY_RANGE, len(ready))
        place += self.np_random.uniform(-START_RANGE, START_RANGE, 2)
        turn = self.np_random.uniform(0, 2 * np.pi)
        self.mujoco.mj_resetData(self.model, self.data)
        target = np.array([*ready, 1.0]) * self._scale
        self.data.qpos[self._qpos], self.data.qpos[self._right] = target, FINGER_RANGE
        self.data.ctrl[:] = target
        self.data.qpos[self._peach : self._peach + 7] = [
            *place,
            PEACH_RADIUS,
            np.cos(turn / 2),
            0.0,
            0.0,
            np.sin(turn / 2),
        ]
        for _ in range(self.substeps):  # the peach settles on the table
            self.mujoco.mj_step(self.model, self.data)
        self.peach_start = self.peach_position[:2]
        self.progress = Progress()
        self.observing = True
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray | dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        action = np.asarray(action, dtype=np.float64)
        if action.shape != (ACTION_DIM,) or not np.isfinite(action).all():
            raise ConfigError(
                f"Pick Peach takes actions of {ACTION_DIM} finite numbers, six joints and the gripper, got {action}"
            )
        self.data.ctrl[:] = np.clip(action, *self._limits) * self._scale
        for _ in range(self.substeps):
            self.mujoco.mj_step(self.model, self.data)
        self._watch(float(action[-1]))
        solved = self.progress.placement is not None
        return self._observation(), float(solved), solved and self.terminate_on_success, False, {"success": solved}

    def _watch(self, gripper: float) -> None:
        """Update the progress of the episode after a step."""
        now = self.progress
        touching = self.touching()
        peach = self.peach_position
        half_open = HALF_OPEN[0] < gripper < HALF_OPEN[1]
        now.half_open_steps = now.half_open_steps + 1 if half_open else 0
        if now.grasp_offset is None and gripper < HALF_OPEN[0]:
            beyond = peach[:2] / np.linalg.norm(peach[:2])
            now.grasp_offset = float((self.tool_position[:2] - peach[:2]) @ beyond)
        held = self._pads <= touching
        if held and peach[2] - PEACH_RADIUS > LIFTED:
            now.lifted, now.left_hand = True, None
        elif now.lifted and now.left_hand is None and not touching & self._hand_geoms:
            opening = gripper > self.joint_positions()[-1]  # else the fingers still squeeze
            now.left_hand = "released" if opening else "slipped"
        resting = now.left_hand == "released" and self._on_plate(peach) and not touching & self._hand_geoms
        slow = np.linalg.norm(self.data.qvel[self._peach_vel : self._peach_vel + 3]) < AT_REST
        now.rest_steps = now.rest_steps + 1 if resting and slow else 0
        if now.rest_steps >= REST_STEPS:
            side = peach[1] - PLATE[1]
            now.placement = "middle" if abs(side) < MIDDLE else "left" if side > 0 else "right"

    def _on_plate(self, peach: np.ndarray) -> bool:
        height = peach[2] - PEACH_RADIUS - PLATE_TOP
        return bool(np.linalg.norm(peach[:2] - PLATE) < PLATE_RADIUS and abs(height) < 0.01)

    def touching(self) -> set[int]:
        """The geometries that touch the peach."""
        pairs = self.data.contact.geom
        return {int(other) for a, b in pairs for me, other in ((a, b), (b, a)) if me == self._peach_geom}

    def outcome(self) -> dict[str, Any]:
        """What became of the episode, if it ended now."""
        now = self.progress
        return {
            "start": self.start,
            "placement": now.placement,
            "failure": None if now.placement else self._failure(),
            "grasp_offset": now.grasp_offset,
            "lifted": now.lifted,
        }

    def _failure(self) -> str:
        """Why the episode, which has not succeeded, failed."""
        now = self.progress
        if now.left_hand == "slipped":
            return "dropped"
        if now.left_hand == "released":
            return "timeout" if self._on_plate(self.peach_position) else "wrong_place"
        if now.half_open_steps >= STILL:
            return "frozen"
        if now.lifted or now.grasp_offset is None:
            return "timeout"
        return "behind" if now.grasp_offset > BEHIND else "missed"

    # ------------------------------------------------------------------ state
    @property
    def peach_position(self) -> np.ndarray:
        return self.data.qpos[self._peach : self._peach + 3].copy()

    @property
    def tool_position(self) -> np.ndarray:
        """The point between the fingertips."""
        return self.data.site("pinch").xpos.copy()

    def joint_positions(self) -> np.ndarray:
        """(7,) in the units of qpos."""
        return self.data.qpos[self._qpos] / self._scale

    def joint_velocities(self) -> np.ndarray:
        """(7,) per second."""
        return self.data.qvel[self._qvel] / self._scale

    def images(self) -> dict[str, np.ndarray]:
        return {camera: draw(self.data, camera, self.image_size, self.image_size) for camera in self.cameras}

    def _observation(self) -> np.ndarray | dict[str, np.ndarray]:
        qpos = self.joint_positions().astype(np.float32)
        if not self.cameras:
            return qpos
        if self.observing:
            self._images = self.images()
        return {"qpos": qpos, **self._images}

    def render(self) -> Any:
        return draw(self.data, "front", 240, 320)

    def render_large(self, size: int, chunk: np.ndarray | None) -> np.ndarray:
        """Both cameras side by side, for videos; the chunk of joint positions is not drawn."""
        return np.concatenate([draw(self.data, camera, size, size) for camera in CAMERAS], axis=1)
