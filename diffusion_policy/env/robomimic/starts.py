"""Recorded starts of test episodes, as simulator states, so that scores do not depend on how a version draws them.

python -m diffusion_policy.env.robomimic.starts      # records them again
"""

import functools
import pathlib

import numpy as np

FOLDER = pathlib.Path(__file__).parent / "starts"
FIRST_SEED, COUNT = 100000, 50


@functools.cache
def _recorded(env_name: str) -> dict[int, np.ndarray]:
    path = FOLDER / f"{env_name}.npz"
    if not path.is_file():
        return {}
    with np.load(path) as file:
        return dict(zip(file["seeds"].tolist(), file["states"], strict=True))


def recorded_start(env_name: str, seed: int) -> np.ndarray | None:
    """The state (n,) recorded for this seed, or None."""
    return _recorded(env_name).get(seed)


def record(task: str) -> None:
    """Record the starts of a task."""
    from diffusion_policy.env.robomimic.robosuite_task import RobosuiteTask
    from diffusion_policy.env.robomimic.scripted_experts import env_args

    env, states = RobosuiteTask(env_args(task)), []
    seeds = np.arange(FIRST_SEED, FIRST_SEED + COUNT)
    for seed in seeds:
        env.reset(int(seed))
        states.append(env.get_state()["states"])
    FOLDER.mkdir(exist_ok=True)
    np.savez_compressed(FOLDER / f"{env.name}.npz", seeds=seeds, states=np.stack(states))


if __name__ == "__main__":
    from diffusion_policy.env.robomimic.scripted_experts import TASKS

    for name in TASKS:
        record(name)
        print(f"recorded {COUNT} starts of {name}")
