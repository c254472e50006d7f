"""State machines that solve a task with the objects' poses: the parts that tasks share."""

import dataclasses

import numpy as np
from scipy.spatial.transform import Rotation

REACH = 0.05  # metres for an action of 1, as in the controllers of `env_args`
TURN = 0.5  # radians for an action of 1
OPEN, CLOSE = -1.0, 1.0

Obs = dict[str, np.ndarray]
Stage = tuple[np.ndarray, float, bool | np.bool_]


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


@dataclasses.dataclass
class Goal:
    """What a stage wants now.

    Args:
        position: (3,) where the hand shall be.
        turn: the rotation that the hand has still to make, in the world frame.
        gripper: OPEN or CLOSE.
        over: whether the stage is over.
        speed: share of the episode's speed.
        calm: share of the episode's trembling.
    """

    position: np.ndarray
    turn: Rotation
    gripper: float
    over: bool | np.bool_
    speed: float = 1.0
    calm: float = 1.0


class PoseExpert:
    """`act(obs)` -> (7,) action in [-1, 1], for tasks that need the hand's whole pose.

    A stage is a method obs -> Goal. A stage that takes too long, or loses its object, begins the task again with other
    draws, so that no episode stands still.
    """

    stages: tuple[str, ...] = ()
    patience = 100  # steps until a stage has failed

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        self.stage, self.waited = 0, 0
        self.speed = rng.uniform(0.6, 1.0)
        self.noise = rng.uniform(0.01, 0.03)
        self.drift = np.zeros(3)
        self.draw()

    def draw(self) -> None:
        """Draw what varies between attempts."""
        raise NotImplementedError

    def again(self, obs: Obs) -> str | None:
        """The stage from which to try again if the present one has failed, else None."""
        return self.stages[0] if self.waited > self.patience else None

    def act(self, obs: Obs) -> np.ndarray:
        """Action for an observation of `RobosuiteTask`."""
        if (name := self.again(obs)) is not None:
            self.stage, self.waited = self.stages.index(name), 0
            self.draw()
        goal = getattr(self, self.stages[self.stage])(obs)
        if goal.over and self.stage < len(self.stages) - 1:
            self.stage, self.waited = self.stage + 1, 0
            goal = getattr(self, self.stages[self.stage])(obs)
        self.waited += 1
        self.drift = 0.8 * self.drift + self.rng.normal(0.0, 0.6 * self.noise, size=3)  # its deviation is `noise`
        move = shorten((goal.position - obs["robot0_eef_pos"]) / REACH, goal.speed * self.speed)
        turn = shorten(goal.turn.as_rotvec() / TURN, 0.6 * goal.speed * self.speed)
        return np.clip(np.concatenate([move + goal.calm * self.drift, turn, [goal.gripper]]), -1.0, 1.0)


def shorten(vector: np.ndarray, limit: float) -> np.ndarray:
    """The vector, not longer than `limit`."""
    return vector * min(1.0, limit / max(float(np.linalg.norm(vector)), 1e-9))


def heading(quaternion: np.ndarray) -> float:
    """Angle of a body's x axis about the vertical; quaternion (4,): x, y, z, w."""
    x, y, z, w = quaternion
    return np.arctan2(2 * (x * y + w * z), 1 - 2 * (y * y + z * z))


def whole_turn(angle: float) -> float:
    """The same angle in [-pi, pi)."""
    return (angle + np.pi) % (2 * np.pi) - np.pi
