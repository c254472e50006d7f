"""Evaluations on robomimic's tasks: environment steps per second by task and number of workers; gain of skipped images.

A policy that does not move, at no cost, is rolled out from the recorded starts. Building environments is not counted.
"""

import json
import pathlib
import statistics
import tempfile
import time

import h5py
import numpy as np

from benchmarks.common import Still, row, steps_per_s
from diffusion_policy.env.robomimic.robomimic_image_wrapper import RobomimicImageWrapper
from diffusion_policy.env.robomimic.robosuite_task import RobosuiteTask
from diffusion_policy.env.robomimic.scripted_experts import TASKS, env_args
from diffusion_policy.env_runner.robomimic_image_runner import RobomimicImageRunner
from diffusion_policy.env_runner.robomimic_lowdim_runner import RobomimicLowdimRunner
from diffusion_policy.gym_util.multistep_wrapper import MultiStepWrapper

WORKERS = (1, 2)
SHAPE_META = {
    "obs": {
        "agentview_image": {"shape": [3, 84, 84], "type": "rgb"},
        "robot0_eye_in_hand_image": {"shape": [3, 84, 84], "type": "rgb"},
        "robot0_eef_pos": {"shape": [3]},
    }
}


def write_dataset(path: pathlib.Path, task: str, action_dim: int) -> str:
    """Write a dataset with only what a runner reads."""
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs.update(env_args=json.dumps(env_args(task)), total=1)
        demo = data.create_group("demo_0")
        demo.attrs["num_samples"] = 1
        demo["actions"] = np.zeros((1, action_dim))
    return str(path)


def evaluation(task: str, workers: int, steps: int, rounds: int, folder: pathlib.Path, images: bool = False) -> float:
    action_dim = 14 if task == "transport" else 7
    path = write_dataset(folder / f"{task}.hdf5", task, action_dim)
    common = dict(
        n_train=0,
        n_train_vis=0,
        n_test=2 * max(WORKERS),
        n_test_vis=0,
        test_start_seed=100000,
        max_steps=steps,
        n_envs=workers,
        vector="async",
    )
    runner = (
        RobomimicImageRunner(str(folder), path, SHAPE_META, **common)
        if images
        else RobomimicLowdimRunner(str(folder), path, ["object", "robot0_eef_pos"], **common)
    )
    return steps_per_s(runner, Still(action_dim), rounds)


def skipping(rounds: int) -> float:
    """Speedup of a chunk of eight steps of Lift from images if only the two observed steps are rendered."""
    env = RobomimicImageWrapper(RobosuiteTask(env_args("lift"), render_offscreen=True), SHAPE_META)
    chunks = {name: MultiStepWrapper(env, n_obs_steps=n, n_action_steps=8) for name, n in (("seen", 2), ("all", 8))}
    times: dict[str, list[float]] = {name: [] for name in chunks}
    for number in range(-1, rounds):
        for name, chunk in chunks.items():
            chunk.reset(seed=0)
            started = time.perf_counter()
            chunk.step(np.zeros((8, 7)))
            if number >= 0:
                times[name].append(time.perf_counter() - started)
    env.close()
    return statistics.median(a / b for a, b in zip(times["all"], times["seen"], strict=True))


def run(quick: bool = False) -> list[dict]:
    steps, rounds = (24, 1) if quick else (80, 3)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for task in ("lift",) if quick else TASKS:
            rates = {workers: evaluation(task, workers, steps, rounds, folder) for workers in WORKERS}
            rows.append(
                row(
                    f"evaluation of {task} from state, {WORKERS[-1]} workers / 1",
                    rates[WORKERS[-1]] / rates[1],
                    "x",
                    None,
                    ", ".join(f"{workers} worker(s) {rate:.0f} steps/s" for workers, rate in rates.items()),
                )
            )
        rates = {
            workers: evaluation("lift", workers, 16 if quick else 40, 1, folder, images=True) for workers in WORKERS
        }
        rows.append(
            row(
                f"evaluation of lift from images, {WORKERS[-1]} workers / 1",
                rates[WORKERS[-1]] / rates[1],
                "x",
                None,
                ", ".join(f"{workers} worker(s) {rate:.1f} steps/s" for workers, rate in rates.items()),
            )
        )
        rows.append(
            row("chunk of lift from images, all drawn / seen ones drawn", skipping(2 if quick else 8), "x", "> 1")
        )
    return rows
