"""Steps per second of the PushT state environment, compared with gym-pusht if that is installed.

Both take the same random actions in the same process, in interleaved rounds, so that other load affects both.
"""

import statistics
import time

import numpy as np

from benchmarks.common import row
from diffusion_policy.env.pusht.pusht_env import PushTEnv

ROUNDS = 7
STEPS = 1000
EPISODE = 300


def _gym_pusht():
    try:
        import gym_pusht  # noqa: F401  registers the environment
    except ImportError:
        print("gym-pusht is not installed, so there is nothing to compare with: pip install --no-deps gym-pusht==0.1.8")
        return None
    import gymnasium

    return gymnasium.make("gym_pusht/PushT-v0", obs_type="state").unwrapped


def _steps_per_s(env, actions):
    """One round over `actions` (N, 2), with the resets an evaluation would make."""
    start = time.perf_counter()
    for i, action in enumerate(actions):
        if i % EPISODE == 0:
            env.reset(seed=i)
        env.step(action)
    return len(actions) / (time.perf_counter() - start)


def measure(rounds: int = ROUNDS, steps: int = STEPS) -> dict:
    """Medians of rounds {'ours_steps_per_s', 'gym_pusht_steps_per_s', 'ratio'}; the last two need gym-pusht."""
    ours, theirs = PushTEnv(), _gym_pusht()
    ours_rates, theirs_rates = [], []
    for seed in range(rounds):
        actions = np.random.default_rng(seed).uniform(50, 450, (steps, 2))
        ours_rates.append(_steps_per_s(ours, actions))
        if theirs is not None:
            theirs_rates.append(_steps_per_s(theirs, actions))
    result = {"ours_steps_per_s": round(statistics.median(ours_rates), 1)}
    if theirs is not None:
        ratios = [a / b for a, b in zip(ours_rates, theirs_rates, strict=True)]
        result["gym_pusht_steps_per_s"] = round(statistics.median(theirs_rates), 1)
        result["ratio"] = round(statistics.median(ratios), 2)
    return result


def run(quick: bool = False) -> list[dict]:
    result = measure(rounds=3) if quick else measure()
    theirs = result.get("gym_pusht_steps_per_s")
    return [
        row(
            "PushT state environment / gym-pusht, steps per second",
            result.get("ratio"),
            "x",
            ">= 1.5",
            f"ours {result['ours_steps_per_s']:.0f} steps/s, "
            f"gym-pusht {'not installed' if theirs is None else round(theirs)}",
        )
    ]
