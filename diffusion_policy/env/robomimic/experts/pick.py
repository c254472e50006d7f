"""Experts of Lift and Can."""

import numpy as np

from diffusion_policy.env.robomimic.experts.base import CLOSE, OPEN, Obs, ScriptedExpert, Stage


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
