"""Many PushT environments that move together, as one robot for the executor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from diffusion_policy.env.pusht.pusht_env import PushTEnv
from diffusion_policy.policy.interface import ChunkPredictor
from diffusion_policy.real_world import ActionChunkExecutor, DelayedPlanner, SimulatedClock

WAITS, RUNTIME = "waits for the policy", "with the runtime"


class Fleet:
    """Observes {'obs': (N, 5)}, takes actions (N, 2); `scores` are the best rewards so far. Its time is simulated."""

    def __init__(self, seeds: Iterable[int]):
        self.envs = [PushTEnv() for _ in seeds]
        self._observations = np.array([env.reset(seed=seed)[0] for env, seed in zip(self.envs, seeds, strict=True)])
        self.scores = np.zeros(len(self.envs))
        self._done = np.zeros(len(self.envs), dtype=bool)

    def read_observation(self) -> dict[str, np.ndarray]:
        return {"obs": self._observations}

    def send_action(self, actions: np.ndarray) -> None:
        for i in np.flatnonzero(~self._done):
            self._observations[i], reward, self._done[i], _, _ = self.envs[i].step(actions[i])
            self.scores[i] = max(self.scores[i], reward)


def play(policy: Any, delay: int, mode: str, seeds: Iterable[int], steps: int = 300) -> np.ndarray:
    """Scores (N,) of a policy whose plans arrive `delay` control steps late.

    WAITS: the robot stands still until the plan is there, and then executes all of its n_action_steps, as a plain loop
    does. RUNTIME: it goes on with the last plan, of which the whole prediction is used, and drops what is stale.
    """
    predict, fleet = ChunkPredictor(policy), Fleet(seeds)
    interface = predict.interface

    def plan(history: dict[str, np.ndarray]) -> np.ndarray:
        chunk = predict.whole({"obs": np.moveaxis(history["obs"], 0, 1)})
        return np.moveaxis(chunk[:, : interface.n_action_steps] if mode == WAITS else chunk, 0, 1)

    executor = ActionChunkExecutor(
        plan,
        fleet.read_observation,
        fleet.send_action,
        hz=10,
        n_obs_steps=interface.n_obs_steps,
        replan_every=10**9 if mode == WAITS else interface.n_action_steps,
        watchdog=1e9,
        planner=lambda function: DelayedPlanner(function, delay),
        clock=SimulatedClock(),
    )
    executor.run(steps=steps)
    return fleet.scores
