"""Scripted experts that solve Lift, Can and Square, for demonstrations where no human ones are available.

An expert is a small state machine: in every stage the hand moves to a point above, at or away from the object, and the
stage ends when the hand is there. Heights, offsets and speed are drawn for each episode, so that demonstrations differ.
"""

from typing import Any

import numpy as np

from diffusion_policy.common.errors import ConfigError

REACH = 0.05  # metres for an action of 1, as in the controllers of `env_args`
TURN = 0.5  # radians for an action of 1
OPEN, CLOSE = -1.0, 1.0

Obs = dict[str, np.ndarray]
Stage = tuple[np.ndarray, float, bool | np.bool_]


def env_args(task: str) -> dict[str, Any]:
    """env_args of a dataset of this task recorded here, as robomimic's for robosuite 1.5, in the world frame."""
    arm = {
        "type": "OSC_POSE",
        "input_max": 1,
        "input_min": -1,
        "output_max": [REACH] * 3 + [TURN] * 3,
        "output_min": [-REACH] * 3 + [-TURN] * 3,
        "kp": 150,
        "damping_ratio": 1,
        "impedance_mode": "fixed",
        "kp_limits": [0, 300],
        "damping_ratio_limits": [0, 10],
        "position_limits": None,
        "orientation_limits": None,
        "uncouple_pos_ori": True,
        "input_type": "delta",
        "input_ref_frame": "world",
        "interpolation": None,
        "ramp_ratio": 0.2,
        "gripper": {"type": "GRIP"},
    }
    name, extra = TASKS[task]
    robots = ["Panda", "Panda"] if "env_configuration" in extra else ["Panda"]
    return {
        "env_name": name,
        "env_version": "1.5.1",
        "type": 1,
        "env_kwargs": {
            "robots": robots,
            "controller_configs": {"type": "BASIC", "body_parts": {"right": arm}},
            "control_freq": 20,
            "reward_shaping": False,
            **extra,
        },
    }


# robomimic's name of a task -> robosuite's, and further arguments of its environment
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "lift": ("Lift", {}),
    "can": ("PickPlaceCan", {}),
    "square": ("NutAssemblySquare", {}),
    "tool_hang": ("ToolHang", {}),
    "transport": ("TwoArmTransport", {"env_configuration": "opposed"}),
}


class ScriptedExpert:
    """`act(obs)` -> (7,) action in [-1, 1]: change of the hand's position and rotation, and the gripper.

    A stage is a method (obs, the hand's position) -> (target point, gripper, whether the stage is over). The stages
    that pick up an object are defined here.
    """

    stages: tuple[str, ...] = ()
    clearance = 0.0  # added to the drawn height above the object
    beside = 0.012  # horizontal tolerance before moving down
    aside = 0.01  # vertical tolerance before grasping
    squeeze = 5  # steps until the gripper holds
    below = 0.03  # tolerance of the carrying height

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        self.stage, self.waited = 0, 0
        self.speed = rng.uniform(0.7, 1.0)
        self.hover = rng.uniform(0.06, 0.10)
        self.offset = rng.normal(0.0, 0.004, size=2)  # of the grasp on the object
        self.noise = 0.03
        self.carry = 1.0

    def act(self, obs: Obs) -> np.ndarray:
        """Action for an observation of `RobosuiteTask`."""
        hand = obs["robot0_eef_pos"]
        target, gripper, arrived = getattr(self, self.stages[self.stage])(obs, hand)
        if arrived and self.stage < len(self.stages) - 1:
            self.stage, self.waited = self.stage + 1, 0
            target, gripper, _ = getattr(self, self.stages[self.stage])(obs, hand)
        self.waited += 1
        move = (target - hand) / REACH
        move *= min(1.0, self.speed / max(np.abs(move).max(), 1e-9))
        move += self.rng.normal(0.0, self.noise, size=3)
        return np.clip(np.concatenate([move, self.turn(obs), [gripper]]), -1.0, 1.0)

    def turn(self, obs: Obs) -> np.ndarray:
        """(3,) rotation of the hand; by default none: it starts pointing down."""
        return np.zeros(3)

    def turned(self, obs: Obs) -> bool:
        """Whether the hand is oriented for the grasp."""
        return True

    def grip(self, obs: Obs) -> np.ndarray:
        """(3,) point to grasp."""
        raise NotImplementedError

    def above(self, obs: Obs, hand: np.ndarray) -> Stage:
        target = self.grip(obs) + [0, 0, self.hover + self.clearance]
        return target, OPEN, self.turned(obs) and np.linalg.norm((target - hand)[:2]) < self.beside

    def down(self, obs: Obs, hand: np.ndarray) -> Stage:
        target = self.grip(obs)
        return target, OPEN, abs(target - hand)[2] < self.aside

    def grasp(self, obs: Obs, hand: np.ndarray) -> Stage:
        return self.grip(obs), CLOSE, self.waited >= self.squeeze

    def up(self, obs: Obs, hand: np.ndarray) -> Stage:
        return np.array([hand[0], hand[1], self.carry]), CLOSE, hand[2] > self.carry - self.below


class LiftExpert(ScriptedExpert):
    """Above the cube, down, grasp, up."""

    stages = ("above", "down", "grasp", "up")

    def grip(self, obs: Obs) -> np.ndarray:
        return obs["object"][:3] + [*self.offset, 0.0]


class CanExpert(ScriptedExpert):
    """Above the can, down, grasp, up, over to its box, down, open, away."""

    stages = ("above", "down", "grasp", "up", "over", "lower", "release", "away")
    clearance, squeeze, below = 0.05, 6, 0.06
    BOX = np.array([0.1975, 0.4025])  # the can's compartment of the second bin, fixed in the scene

    def __init__(self, rng: np.random.Generator):
        super().__init__(rng)
        self.place = self.BOX + rng.uniform(-0.02, 0.02, size=2)
        self.carry = rng.uniform(1.08, 1.14)

    def grip(self, obs: Obs) -> np.ndarray:
        return obs["object"][7:10] + [*self.offset, 0.01]  # after the hand's pose relative to it

    def over(self, obs: Obs, hand: np.ndarray) -> Stage:
        target = np.array([*self.place, self.carry])
        return target, CLOSE, np.linalg.norm((target - hand)[:2]) < 0.025

    def lower(self, obs: Obs, hand: np.ndarray) -> Stage:
        target = np.array([*self.place, 0.93])
        return target, CLOSE, hand[2] < 0.955

    def release(self, obs: Obs, hand: np.ndarray) -> Stage:
        return np.array([*self.place, 0.93]), OPEN, self.waited >= 4

    def away(self, obs: Obs, hand: np.ndarray) -> Stage:
        return np.array([*self.place, 1.1]), OPEN, False


class SquareExpert(ScriptedExpert):
    """Above the nut's handle and turned across it, down, grasp, up, over the peg and aligned, down, open, away."""

    stages = ("above", "down", "grasp", "up", "over", "lower", "release", "away")
    clearance, beside, aside, squeeze = 0.02, 0.01, 0.008, 12
    PEG = np.array([0.23, 0.1])  # fixed in the scene
    HANDLE = 0.054  # distance from the nut's centre to that of its handle

    def __init__(self, rng: np.random.Generator):
        super().__init__(rng)
        self.offset = rng.normal(0.0, 0.002, size=2)
        self.carry = rng.uniform(1.06, 1.10)
        self.side: float | None = None  # the nut's direction on the peg, a multiple of a right angle

    def nut(self, obs: Obs) -> tuple[np.ndarray, float]:
        """Centre of the nut (3,), and the angle of its handle."""
        return obs["object"][7:10], heading(obs["object"][10:14])

    def grip(self, obs: Obs) -> np.ndarray:
        middle, angle = self.nut(obs)
        return middle + [*(self.HANDLE * np.array([np.cos(angle), np.sin(angle)]) + self.offset), -0.004]

    def across(self, obs: Obs) -> float:
        """Angle between hand and handle; of the two solutions, the one that keeps the wrist off its limit."""
        return (self.nut(obs)[1] + 0.2) % np.pi - 0.2 - heading(obs["robot0_eef_quat"])

    def turned(self, obs: Obs) -> bool:
        return abs(self.across(obs)) < 0.08

    def turn(self, obs: Obs) -> np.ndarray:
        if self.stage <= 2:
            error = self.across(obs)
        elif self.stage <= 5:
            error = whole_turn(self.direction(obs) - self.nut(obs)[1])
        else:
            error = 0.0
        return np.array([0.0, 0.0, np.clip(error / TURN, -0.8, 0.8)])

    def direction(self, obs: Obs) -> float:
        if self.side is None:
            self.side = np.pi / 2 * np.round(self.nut(obs)[1] / (np.pi / 2))
        return self.side

    def over_peg(self, obs: Obs, hand: np.ndarray, height: float) -> np.ndarray:
        """Position of the hand at which the nut's centre is over the peg."""
        middle, _ = self.nut(obs)
        return np.array([*(hand[:2] + self.PEG - middle[:2]), height])

    def over(self, obs: Obs, hand: np.ndarray) -> Stage:
        target = self.over_peg(obs, hand, self.carry)
        aligned = abs(whole_turn(self.direction(obs) - self.nut(obs)[1])) < 0.05
        return target, CLOSE, aligned and np.linalg.norm((target - hand)[:2]) < 0.006

    def lower(self, obs: Obs, hand: np.ndarray) -> Stage:
        return self.over_peg(obs, hand, 0.80), CLOSE, self.nut(obs)[0][2] < 0.86

    def release(self, obs: Obs, hand: np.ndarray) -> Stage:
        return hand.copy(), OPEN, self.waited >= 4

    def away(self, obs: Obs, hand: np.ndarray) -> Stage:
        return np.array([hand[0], hand[1], 1.1]), OPEN, False


def heading(quaternion: np.ndarray) -> float:
    """Angle of a body's x axis about the vertical; quaternion (4,): x, y, z, w."""
    x, y, z, w = quaternion
    return np.arctan2(2 * (x * y + w * z), 1 - 2 * (y * y + z * z))


def whole_turn(angle: float) -> float:
    """The same angle in [-pi, pi)."""
    return (angle + np.pi) % (2 * np.pi) - np.pi


EXPERTS: dict[str, type[ScriptedExpert]] = {"lift": LiftExpert, "can": CanExpert, "square": SquareExpert}


def make_expert(task: str, rng: np.random.Generator) -> ScriptedExpert:
    """The expert of a task; its variations are drawn from `rng`."""
    if task not in EXPERTS:
        raise ConfigError(f"no scripted expert for {task!r}; experts exist for: {', '.join(EXPERTS)}.")
    return EXPERTS[task](rng)
