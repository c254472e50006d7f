"""Expert of Square."""

import numpy as np
from scipy.spatial.transform import Rotation

from diffusion_policy.env.robomimic.experts.base import CLOSE, OPEN, Goal, Obs, PoseExpert, heading, whole_turn

PEG = np.array([0.23, 0.1])  # fixed in the scene
PEG_TOP = 0.95
# Directions of the hand that the last joint reaches easily, at the nut and at the peg: more than half a turn, so that
# one of the two ways to grasp the handle is always within.
EASY = (-1.4, 3.3)


class SquareExpert(PoseExpert):
    """Above the nut's handle and turned across it, down, grasp, up, over the peg and aligned, down, open, away."""

    stages = ("above", "down", "grasp", "up", "over", "lower", "release", "away")

    def draw(self) -> None:
        rng = self.rng
        self.hover = rng.uniform(0.05, 0.11)
        self.grip = np.array([rng.uniform(0.056, 0.066), rng.normal(0.0, 0.003), rng.uniform(0.0, 0.005)])
        self.lean = Rotation.from_rotvec(rng.normal(0.0, 0.04, size=3))  # of the hand from across and upright
        self.detour = rng.normal(0.0, [0.04, 0.04, 0.02])  # of the way to the nut
        self.bend = rng.normal(0.0, [0.04, 0.04, 0.02])  # and to the peg
        self.squeeze = rng.integers(7, 14)
        self.carry = rng.uniform(1.01, 1.08)
        self.other_side = rng.random() < 0.5  # of the two ways to grasp the handle, if both are easy
        self.yaw: float | None = None  # of the hand at the nut
        self.grasped = np.zeros(2)  # the hand, when it lifts the nut
        self.side: float | None = None  # the nut's direction on the peg, a multiple of a right angle

    def again(self, obs: Obs) -> str | None:
        slipped = self.stages[self.stage] in ("up", "over", "lower") and np.ptp(obs["robot0_gripper_qpos"]) < 0.015
        return "above" if slipped else super().again(obs)

    def nut(self, obs: Obs) -> tuple[np.ndarray, Rotation, float]:
        """Centre of the nut (3,), its rotation, and the angle of its handle."""
        return obs["object"][7:10], Rotation.from_quat(obs["object"][10:14]), heading(obs["object"][10:14])

    def choose(self, angle: float) -> float:
        """Choose the nut's direction on the peg, and return the hand's on the nut, so that both are easy to reach."""
        angles = np.pi / 2 * np.array([-2, -1, 1, 2])  # with the handle beyond the peg the hand is out of reach
        self.side = angles[np.abs(angles - angle).argmin()]
        low, high = EASY[0] + max(0.0, angle - self.side), EASY[1] + min(0.0, angle - self.side)
        ways = [way for way in angle + np.pi * np.arange(-2, 3) if low <= way <= high]
        ways = ways or [low + (angle - low) % np.pi]
        return float(ways[-1 if self.other_side else 0])

    def to_nut(self, obs: Obs) -> tuple[np.ndarray, Rotation]:
        """Point of the grasp, and the hand's turn to it."""
        middle, _, angle = self.nut(obs)
        chosen = self.choose(angle) if self.yaw is None else self.yaw
        self.yaw = chosen + whole_turn(2 * (angle - chosen)) / 2  # the nut may have moved
        hand = Rotation.from_quat(obs["robot0_eef_quat"])
        now = heading(obs["robot0_eef_quat"])
        now += 2 * np.pi * (now < EASY[0] - 0.5)
        yaw = now + np.clip(self.yaw - now, -1.5, 1.5)  # the long way round, if it is the easy one
        point = middle + Rotation.from_rotvec([0, 0, angle]).apply(self.grip)
        return point, self.lean * facing_down(yaw) * hand.inv()

    def above(self, obs: Obs) -> Goal:
        point, turn = self.to_nut(obs)
        target = point + [0, 0, self.hover]
        away = np.linalg.norm((target - obs["robot0_eef_pos"])[:2])
        target = target + self.detour * np.clip(away / 0.1 - 0.2, 0.0, 1.0)
        return Goal(target, turn, OPEN, away < 0.008 and turn.magnitude() < 0.08)

    def down(self, obs: Obs) -> Goal:
        point, turn = self.to_nut(obs)
        return Goal(point, turn, OPEN, np.linalg.norm(point - obs["robot0_eef_pos"]) < 0.008, 0.8, 0.5)

    def grasp(self, obs: Obs) -> Goal:
        point, turn = self.to_nut(obs)
        return Goal(point, turn, CLOSE, self.waited >= self.squeeze, calm=0.0)

    def align(self, obs: Obs) -> tuple[np.ndarray, Rotation]:
        """The hand's way in the plane that brings the nut over the peg, and the turn that makes it level."""
        middle, rotation, _ = self.nut(obs)
        level = Rotation.from_rotvec([0, 0, self.side])
        return PEG - middle[:2], level * rotation.inv()

    def up(self, obs: Obs) -> Goal:
        hand = obs["robot0_eef_pos"]
        if self.waited == 0:
            self.grasped = hand[:2] + 0.04 * (PEG - hand[:2])
        target = np.array([*self.grasped, self.carry])
        return Goal(target, self.align(obs)[1], CLOSE, hand[2] > self.carry - 0.04, calm=0.5)

    def over(self, obs: Obs) -> Goal:
        hand = obs["robot0_eef_pos"]
        way, turn = self.align(obs)
        away = np.linalg.norm(way)
        target = np.array([*(hand[:2] + way), self.carry]) + self.bend * np.clip(away / 0.2 - 0.2, 0.0, 1.0)
        return Goal(target, turn, CLOSE, away < 0.005 and turn.magnitude() < 0.06, calm=0.5)

    def lower(self, obs: Obs) -> Goal:
        hand, nut = obs["robot0_eef_pos"], obs["object"][7:10]
        way, turn = self.align(obs)
        aligned = nut[2] < PEG_TOP - 0.01 or np.linalg.norm(way) < 0.005
        down = min(0.05, max(nut[2] - PEG_TOP, 0.03)) if aligned else 0.0
        return Goal(np.array([*(hand[:2] + way), hand[2] - down]), turn, CLOSE, nut[2] < 0.86, calm=0.3)

    def release(self, obs: Obs) -> Goal:
        return Goal(obs["robot0_eef_pos"], Rotation.identity(), OPEN, self.waited >= 4, calm=0.0)

    def away(self, obs: Obs) -> Goal:
        hand = obs["robot0_eef_pos"]
        return Goal(np.array([hand[0], hand[1], 1.1]), Rotation.identity(), OPEN, False)


def facing_down(yaw: float) -> Rotation:
    """Rotation of a hand that points down, its fingers closing across the direction `yaw`."""
    return Rotation.from_rotvec([0, 0, yaw]) * Rotation.from_rotvec([np.pi, 0, 0])
