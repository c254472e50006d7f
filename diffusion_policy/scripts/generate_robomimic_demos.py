"""Demonstrations of Lift, Can, Square and Tool-Hang by scripted experts, in robomimic's hdf5 layout.

    python -m diffusion_policy.scripts.generate_robomimic_demos --task lift --episodes 200
    python -m diffusion_policy.scripts.generate_robomimic_demos --task lift --episodes 100 --obs image

Only successful episodes are kept; the attribute `expert` of 'data' records the expert's success rate. The files are
data/robomimic/datasets/<task>/scripted/low_dim.hdf5 or image.hdf5, and the same with absolute actions, *_abs.hdf5.
Train on them with `task=lift_ph_lowdim task.dataset_type=scripted`. They do not replace robomimic's human
demonstrations: results on them must name their source.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import pathlib

import numpy as np
from tqdm import tqdm

from diffusion_policy.common.errors import UserError
from diffusion_policy.env.robomimic.robosuite_task import RobosuiteTask
from diffusion_policy.env.robomimic.scripted_experts import EXPERTS, env_args, make_expert
from diffusion_policy.scripts.robomimic_abs_actions import convert

_env: RobosuiteTask  # of a worker process
CAMERAS = ("agentview", "robot0_eye_in_hand")
LOWDIM = ("object", "robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos", "robot0_joint_pos", "robot0_joint_vel")
SIZE = 84
MAX_STEPS = {"tool_hang": 700}  # of an attempt, as in the tasks' configurations; others 400
STEPS_AFTER = 5  # steps recorded after the success


def generate(
    task: str,
    episodes: int,
    folder: str | os.PathLike,
    obs: str = "low_dim",
    seed: int = 0,
    workers: int = 1,
    verify: int | None = None,
) -> float:
    """Write `episodes` demonstrations to <folder>/<obs>.hdf5 and <obs>_abs.hdf5; returns the expert's success rate."""
    import h5py

    folder = pathlib.Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    path, partial = folder / f"{obs}.hdf5", folder / f"{obs}.part"
    # Not fork: the simulator uses threads.
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("forkserver"), _start, (task, obs == "image")
    )
    kept = tried = steps = 0
    try:
        with (
            pool,
            h5py.File(partial, "w") as file,
            tqdm(total=episodes, desc=f"{task}, scripted", unit="demo", disable=None) as bar,
        ):
            data = file.create_group("data")
            pending: list[concurrent.futures.Future] = []
            while kept < episodes:
                while len(pending) < 2 * workers:
                    pending.append(pool.submit(_episode, task, seed + tried + len(pending), obs == "image"))
                success, record, model = pending.pop(0).result()
                tried += 1
                if success:
                    demo = data.create_group(f"demo_{kept}")
                    for key, values in record.items():
                        options = {}
                        if values.dtype == np.uint8:  # one chunk per image, so that single images can be decoded
                            options = {"chunks": (1, *values.shape[1:]), "compression": "gzip"}
                        demo.create_dataset(key, data=values, **options)
                    demo.attrs.update(num_samples=len(record["actions"]), model_file=model)
                    kept, steps = kept + 1, steps + len(record["actions"])
                    bar.update()
                bar.set_postfix(success=f"{kept / tried:.0%}")
                if tried >= 20 and kept < tried / 2:
                    raise UserError(
                        f"the scripted expert for {task} succeeded in only {kept} of {tried} episodes: is this "
                        "robosuite 1.5.1?"
                    )
            for job in pending:
                job.cancel()
            data.attrs.update(
                total=steps,
                env_args=json.dumps(env_args(task)),
                expert=json.dumps(
                    {"source": "scripted expert, not human", "attempts": tried, "successes": kept, "seed": seed}
                ),
            )
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    convert(path, workers=workers, verify=verify)
    return kept / tried


def _start(task: str, images: bool) -> None:
    global _env
    _env = RobosuiteTask(env_args(task), render_offscreen=images)


def _episode(task: str, seed: int, images: bool) -> tuple[bool, dict[str, np.ndarray], str]:
    """Play one episode: whether the expert solved it, its steps {key: (T, ...)}, and the scene as XML."""
    observation, expert = _env.reset(seed), make_expert(task, np.random.default_rng(seed))
    steps: list[dict] = []
    left: int | None = None
    while len(steps) < MAX_STEPS.get(task, 400) and left != 0:
        action = expert.act(observation)
        step = {
            "states": _env.get_state()["states"],
            **{f"obs/{key}": observation[key] for key in LOWDIM},
            "actions": action,
        }
        if images:
            step.update(
                {f"obs/{camera}_image": _env.render(height=SIZE, width=SIZE, camera_name=camera) for camera in CAMERAS}
            )
        observation, _, _, _ = _env.step(action)
        success = _env.is_success()["task"]
        left = STEPS_AFTER if left is None and success else left if left is None else left - 1
        steps.append({**step, "rewards": float(success), "dones": int(left == 0)})
    return left == 0, {key: np.stack([step[key] for step in steps]) for key in steps[0]}, _env.get_model()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True, choices=sorted(EXPERTS))
    parser.add_argument("--episodes", type=int, default=200, help="demonstrations to keep (default 200)")
    parser.add_argument(
        "--obs",
        choices=("low_dim", "image"),
        default="low_dim",
        help="image adds 84x84 images of two cameras; slow without a GPU",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the first episode; the others follow (default 0)")
    parser.add_argument("--output_dir", help="default: data/robomimic/datasets/<task>/scripted")
    parser.add_argument("--num_workers", type=int, default=os.cpu_count(), help="processes (default: one per core)")
    parser.add_argument(
        "--verify", type=int, default=50, help="demonstrations to replay with absolute actions (default 50)"
    )
    options = parser.parse_args()
    if options.episodes < 1 or options.num_workers < 1:
        parser.error("--episodes and --num_workers must be at least 1")
    folder = options.output_dir or f"data/robomimic/datasets/{options.task}/scripted"
    try:
        rate = generate(
            options.task, options.episodes, folder, options.obs, options.seed, options.num_workers, options.verify
        )
    except UserError as error:
        parser.exit(1, f"error: {error}\n")
    print(
        f"{options.episodes} demonstrations of {options.task} in {folder}; the expert succeeded in {rate:.1%} of its "
        "episodes"
    )


if __name__ == "__main__":
    main()
