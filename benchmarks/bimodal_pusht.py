"""Demonstrations of PushT in which the agent goes left or right around the block, from the same observations.

    python -m benchmarks.bimodal_pusht [--pairs 50] [--seed 0] [--output data/pusht_bimodal.zarr]

The T starts on the axis of symmetry x + y = 512, away from its goal, and the agent on the axis, at the T's foot. It has
to be pushed at its bar, at the other side: a scripted expert goes around it, with varied speed, distance and tremor,
and pushes it into the goal. PushT is its own mirror image about the axis, so the mirror image of an episode is an
episode of the same start that goes around on the other side: one half goes left, one half right.
"""

from __future__ import annotations

import argparse
import math
import pathlib
from typing import Any

import numpy as np
import torch

from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.env.pusht.pusht_env import AGENT_RADIUS, PushTEnv
from diffusion_policy.env.pusht.symmetry import mirror_positions, mirror_states
from diffusion_policy.env.pusht.tee import STEM
from diffusion_policy.env_runner.pusht_state_runner import PushTStateRunner

DATA = pathlib.Path("data/pusht_bimodal.zarr")
#: Coordinates (u, v) about the goal: u along the axis of symmetry, the way of the push, and v sideways.
AXES = np.array([[-1.0, 1.0], [1.0, 1.0]]) / math.sqrt(2)
GOAL = np.array([256.0, 256.0])
MAX_STEPS = 120
REACH = 1.6  # targets are this many steps ahead: the agent's controller lags behind


def to_axes(xy: np.ndarray) -> np.ndarray:
    """(..., 2) in pixels of the window -> (u, v)."""
    return (xy - GOAL) @ AXES.T


def to_window(uv: np.ndarray) -> np.ndarray:
    return GOAL + uv @ AXES


def start(rng: np.random.Generator) -> np.ndarray:
    """A state (5,) on the axis: the block short of the goal, the agent in front of its foot."""
    u = -rng.uniform(60, 110)
    agent = u + STEM[3] + AGENT_RADIUS + rng.uniform(20, 60)
    return np.array([*to_window(np.array([agent, 0.0])), *to_window(np.array([u, 0.0])), math.pi / 4])


def demonstrate(rng: np.random.Generator, side: int = 1) -> dict[str, np.ndarray] | None:
    """An episode {state, action} that goes around at v > 0 (side 1) or v < 0 (side -1); None if it fails."""
    env = PushTEnv()
    obs, _ = env.reset(options={"state": start(rng)})
    u = to_axes(obs[2:4])[0]
    speed, clearance = rng.uniform(14, 22), rng.uniform(90, 115)
    corners = [(rng.uniform(20, 60), 1.0), (-rng.uniform(20, 40), 1.0), (-rng.uniform(60, 80), 0.5), (-55.0, 0.0)]
    way = [np.array([u + du, side * clearance * v]) for du, v in corners]
    tremor = np.zeros(2)
    states, actions = [], []
    for _ in range(MAX_STEPS):
        agent, block = to_axes(obs[:2]), to_axes(obs[2:4])
        tremor = 0.8 * tremor + rng.normal(0, 1.5, 2)
        if way and np.linalg.norm(way[0] - agent) < 25:
            way.pop(0)
        if way:
            step = way[0] - agent
            target = agent + step * min(1.0, REACH * speed / np.linalg.norm(step)) + tremor
        else:  # push, slower near the goal, and stay on the axis
            target = agent + REACH * np.array([np.clip(-block[0] / 2, 1.5, 12), np.clip(-agent[1], -10, 10)])
        states.append(obs)
        actions.append(np.clip(to_window(target), 0, 512))
        obs, _, done, _, _ = env.step(actions[-1])
        if done:
            return {"state": np.stack(states).astype(np.float32), "action": np.stack(actions).astype(np.float32)}
    return None


def write(path: pathlib.Path, pairs: int, seed: int) -> int:
    """Write `pairs` episodes and their mirror images; return how many episodes the expert tried."""
    rng, buffer, tried, made = np.random.default_rng(seed), ReplayBuffer.create_empty_numpy(), 0, 0
    while made < pairs:
        episode = demonstrate(rng)
        tried += 1
        if episode is None:
            continue
        state, action = torch.from_numpy(episode["state"]), torch.from_numpy(episode["action"])
        buffer.add_episode(episode)
        buffer.add_episode({"state": mirror_states(state).numpy(), "action": mirror_positions(action).numpy()})
        made += 1
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer.save_to_path(str(path))
    return tried


class BimodalPushTRunner(PushTStateRunner):
    """PushT from the starts of the demonstrations: the start of a seed, with chance of its own."""

    def start_options(self, split: str, seed: int) -> dict[str, Any]:
        return {"state": start(np.random.default_rng([seed, 1]))}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bimodal_pusht", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=50, help="episodes to each side (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the expert (default: %(default)s)")
    parser.add_argument("--output", type=pathlib.Path, default=DATA, help="zarr folder (default: %(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.pairs < 1:
        parser.error(f"--pairs {arguments.pairs}: needs at least 1")
    tried = write(arguments.output, arguments.pairs, arguments.seed)
    print(f"{2 * arguments.pairs} episodes in {arguments.output}; the expert succeeded in {arguments.pairs} of {tried}")


if __name__ == "__main__":
    main()
