"""Convert the actions of a robomimic dataset from changes of the hand's pose to absolute poses.

    python -m diffusion_policy.scripts.robomimic_abs_actions -i data/robomimic/datasets/lift/ph/low_dim.hdf5

For each step the simulator is set to the recorded state, the action goes to the arm's controller, and the controller's
goal is read: position and rotation (axis-angle), in the frame named by the dataset's env_args. The gripper stays.
The result, <name>_abs.hdf5, is a copy of the file with the new actions. Demonstrations are then replayed open-loop with
both kinds of actions; the share of successes that absolute actions reproduce is printed and stored in the file
(attribute abs_replay of 'data').
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import pathlib
import shutil
from typing import Any

import numpy as np
from tqdm import tqdm

from diffusion_policy.common.arm_actions import ARM_DIM
from diffusion_policy.common.errors import DataError, UserError
from diffusion_policy.env.robomimic.robosuite_task import RobosuiteTask
from diffusion_policy.storage.hdf5_reader import read_demos

_delta: RobosuiteTask  # of a worker process
_absolute: RobosuiteTask
SETTLE = 10  # steps that a replay may take after the last action, such as to finish a lift


@dataclasses.dataclass
class Replay:
    """Replayed demonstrations: how many succeed with their own actions, and how many of these with absolute ones."""

    demos: int
    delta_successes: int
    abs_successes: int

    @property
    def share(self) -> float:
        return self.abs_successes / self.delta_successes if self.delta_successes else 0.0


def convert(
    source: str | os.PathLike,
    target: str | os.PathLike | None = None,
    workers: int = 1,
    verify: int | None = None,
    minimum: float = 0.95,
) -> Replay | None:
    """Write `target` (default: <source>_abs.hdf5). verify: demonstrations to replay, None for all, 0 for none.

    Raises DataError, and writes no file, if less than the share `minimum` of their successes is reproduced.
    """
    import h5py

    source = pathlib.Path(source).expanduser()
    target = pathlib.Path(target or source.with_name(f"{source.stem}_abs{source.suffix}")).expanduser()
    demos = read_demos(source, ["states", "actions"])
    RobosuiteTask(demos.env_args).close()  # reports errors of the environment here, once
    ends = demos.episode_ends
    states, actions = (np.split(demos.arrays[key], ends[:-1]) for key in ("states", "actions"))
    episodes = list(zip(states, actions, strict=True))
    with workers_for(demos.env_args, workers) as pool:
        goals = list(
            tqdm(pool.map(_goals, episodes), total=len(episodes), desc="absolute actions", unit="demo", disable=None)
        )
        chosen = range(len(episodes))[:verify]
        outcomes = list(
            tqdm(
                pool.map(_replay, [(episodes[i][0][0], episodes[i][1], goals[i]) for i in chosen]),
                total=len(chosen),
                desc="replays",
                unit="demo",
                disable=None,
            )
        )
    replay = None
    if outcomes:
        replay = Replay(
            len(outcomes), sum(delta for delta, _ in outcomes), sum(delta and absolute for delta, absolute in outcomes)
        )
        if replay.share < minimum:
            raise DataError(
                f"{source}: of {replay.delta_successes} demonstrations that succeed when replayed, only "
                f"{replay.abs_successes} do with absolute actions; at least {minimum:.0%} is expected. Was it recorded "
                "with another robosuite?"
            )
    partial = target.with_suffix(".part")
    try:
        shutil.copyfile(source, partial)
        with h5py.File(partial, "r+") as file:
            for i, goal in enumerate(goals):
                file[f"data/demo_{i}/actions"][...] = goal
            if replay:
                file["data"].attrs["abs_replay"] = json.dumps({**dataclasses.asdict(replay), "share": replay.share})
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return replay


def workers_for(env_args: Any, count: int) -> concurrent.futures.ProcessPoolExecutor:
    """Processes with one delta and one absolute environment each, built once."""
    # Not fork: the simulator uses threads.
    return concurrent.futures.ProcessPoolExecutor(count, multiprocessing.get_context("forkserver"), _start, (env_args,))


def _start(env_args: Any) -> None:
    global _delta, _absolute
    _delta, _absolute = RobosuiteTask(env_args), RobosuiteTask(env_args, abs_action=True)


def _goals(episode: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """(states (T, n), actions (T, 7 or 14)) -> absolute actions of the same shape."""
    from scipy.spatial.transform import Rotation

    states, actions = episode
    out = actions.astype(np.float64)
    for t, (state, action) in enumerate(zip(states, actions.reshape(len(actions), -1, ARM_DIM), strict=True)):
        _delta.reset_to({"states": state})
        for arm, (robot, controller) in enumerate(zip(_delta.env.robots, _delta.controllers(), strict=True)):
            controller.update(force=True)  # it may have cached the pose of the arm
            robot.control(action[arm], policy_step=True)
            goal = out[t, arm * ARM_DIM :]
            goal[:3], goal[3:6] = controller.goal_pos, Rotation.from_matrix(controller.goal_ori).as_rotvec()
    return out


def _replay(job: tuple[np.ndarray, np.ndarray, np.ndarray]) -> tuple[bool, bool]:
    """(first state, delta actions, absolute actions) -> whether each kind of actions solves the task."""
    state, delta, absolute = job
    return _solves(_delta, state, delta), _solves(_absolute, state, absolute)


def _solves(env: RobosuiteTask, state: np.ndarray, actions: np.ndarray) -> bool:
    env.start_at({"states": state})
    for action in [*actions, *[actions[-1]] * SETTLE]:
        env.step(action)
        if env.is_success()["task"]:
            return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-i", "--input", required=True, help="dataset with delta actions")
    parser.add_argument("-o", "--output", help="file to write (default: <name>_abs.hdf5 beside the input)")
    parser.add_argument(
        "-n", "--num_workers", type=int, default=os.cpu_count(), help="processes (default: one per core)"
    )
    parser.add_argument("--verify", type=int, default=None, help="demonstrations to replay (default: all; 0: none)")
    options = parser.parse_args()
    try:
        replay = convert(options.input, options.output, options.num_workers, options.verify)
    except UserError as error:
        parser.exit(1, f"error: {error}\n")
    if replay:
        print(
            f"replayed {replay.demos} demonstrations open-loop: {replay.delta_successes} succeed with their own "
            f"actions, {replay.abs_successes} of these with absolute ones ({replay.share:.1%})"
        )


if __name__ == "__main__":
    main()
