"""Demonstrations of MetaWorld and Adroit with point clouds, in DP3's layout.

    python -m diffusion_policy.scripts.generate_demos metaworld --task assembly --episodes 10
    python -m diffusion_policy.scripts.generate_demos adroit --task hammer --episodes 10 --expert hammer_weights.npz

MetaWorld has scripted experts; Adroit's are DAPG policies in an .npz file (see DAPGExpert). Only successful episodes
are kept. The result is a replay buffer (zarr) with point_cloud (points, 6: position and colour), state, action, img and
depth; its attributes record the number of attempts. An interrupted run continues when it is started again. Train with
`task=metaworld task.name=assembly`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import multiprocessing
import os
import pathlib
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import zarr
from tqdm import tqdm

from diffusion_policy.common.errors import ConfigError, UserError
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.env.adroit import adroit
from diffusion_policy.env.metaworld import metaworld_wrapper as metaworld
from diffusion_policy.env.point_cloud_env import known_task
from diffusion_policy.storage.atomic import write_atomically, write_text
from diffusion_policy.storage.checkpoint_io import versions

POINTS = {"metaworld": 1024, "adroit": 512}  # as in DP3
MIN_SUCCESS_STEPS = 5  # in MetaWorld: the goal state is held, not only passed
MIN_ATTEMPTS = 20  # after these, an expert that succeeds in less than a quarter is an error


def make_env(suite: str, task: str, num_points: int, expert: str | None) -> tuple[Any, Any]:
    """The environment, and its expert with `get_action(raw observation) -> action`."""
    if suite == "metaworld":
        env = metaworld.MetaWorldEnv(task, num_points, terminate_on_success=False)
        return env, metaworld.expert_policy(task)
    hand = adroit.AdroitEnv(task, num_points)
    return hand, adroit.DAPGExpert(str(expert), hand)


def record(
    env: Any, expert: Any, seed: int, max_steps: int, min_success_steps: int, stop_after: int | None = None
) -> tuple[bool, dict[str, np.ndarray]]:
    """Play one episode: whether it succeeded, and its steps {key: (T, ...)}, each observation with its action.

    stop_after: end the episode after this number of solved steps, instead of after max_steps.
    """
    env.reset(seed=seed)
    env.observing = False  # `frame` renders instead, with colours
    steps: list[dict[str, np.ndarray]] = []
    solved, over = 0, False
    while len(steps) < max_steps and not over and (stop_after is None or solved < stop_after):
        frame = env.frame()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MetaWorld's experts warn at every step that they exceed action limits
            action = np.asarray(expert.get_action(env.raw), dtype=np.float32)
        _, reward, over, _, _ = env.step(action)
        solved += reward > 0
        steps.append({**frame, "action": action})
    return solved >= min_success_steps, {key: np.stack([step[key] for step in steps]) for key in steps[0]}


def generate(
    suite: str,
    task: str,
    episodes: int,
    output: str | os.PathLike,
    num_points: int | None = None,
    expert: str | None = None,
    seed: int = 0,
    workers: int = 1,
    stop_after: int | None = None,
) -> float:
    """Write `episodes` demonstrations to the zarr folder `output`; returns the expert's success rate."""
    tasks = metaworld.TASKS if suite == "metaworld" else tuple(adroit.TASKS)
    known_task(task, tasks, "MetaWorld" if suite == "metaworld" else "Adroit")
    if suite == "adroit" and expert is None:
        raise ConfigError(
            "Adroit has no scripted expert: pass the weights of one with --expert (an .npz file, see DAPGExpert)"
        )
    output = pathlib.Path(output).expanduser()
    if output.exists():
        raise ConfigError(f"{output} exists already; remove it, or choose another --output")
    num_points = num_points or POINTS[suite]
    max_steps, needed = (
        (metaworld.MAX_STEPS, MIN_SUCCESS_STEPS) if suite == "metaworld" else (adroit.MAX_STEPS[task], 1)
    )
    if stop_after is not None and stop_after < needed:
        raise ConfigError(f"--stop_after {stop_after}: a demonstration is solved in at least {needed} steps")
    settings = {
        "suite": suite,
        "task": task,
        "num_points": num_points,
        "expert": expert and os.path.basename(expert),
        "stop_after": stop_after,
    }
    parts = _open_parts(output, settings)
    kept: list[int] = []
    tried = 0
    # Not fork: the simulators use threads. Each process has its own renderer.
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("forkserver"), _start, (suite, task, num_points, expert)
    )
    with pool, tqdm(total=episodes, desc=f"{task}, expert", unit="demo", disable=None) as bar:
        pending: list[concurrent.futures.Future] = []
        try:
            while len(kept) < episodes:
                while len(pending) < min(2 * workers, episodes - len(kept)):  # no more than needed if all succeed
                    pending.append(
                        pool.submit(_episode, seed + tried + len(pending), str(parts), max_steps, needed, stop_after)
                    )
                if pending.pop(0).result():
                    kept.append(seed + tried)
                    bar.update()
                tried += 1
                bar.set_postfix(success=f"{len(kept) / tried:.0%}")
                if tried >= MIN_ATTEMPTS and 4 * len(kept) < tried:
                    raise UserError(
                        f"the expert for {task} succeeded in only {len(kept)} of {tried} episodes: is it for this task?"
                    )
        finally:
            for job in pending:
                job.cancel()
    buffer = ReplayBuffer.create_empty_numpy()
    for number in kept:
        with np.load(parts / f"{number}.npz") as part:
            buffer.add_episode(dict(part))
    buffer.save_to_path(str(output), compressors="disk")
    source = "scripted expert of MetaWorld" if suite == "metaworld" else f"DAPG policy {settings['expert']}"
    zarr.open_group(str(output), mode="r+").attrs.update(
        {
            "description": f"{task} ({suite}), episodes of an expert that succeeded",
            "expert": {
                "source": source,
                "attempts": tried,
                "successes": len(kept),
                "success_rate": len(kept) / tried,
                "episode_seeds": kept,
            },
            "settings": settings,  # type: ignore[dict-item]
            "versions": versions(),
        }
    )
    shutil.rmtree(parts)
    return len(kept) / tried


def _open_parts(output: pathlib.Path, settings: dict) -> pathlib.Path:
    """The folder of finished episodes beside the output; emptied if they have other settings."""
    parts = output.with_name(f"{output.name}.parts")
    file = parts / "settings.json"
    if parts.exists() and (not file.is_file() or json.loads(file.read_text()) != settings):
        shutil.rmtree(parts)
    write_text(file, json.dumps(settings))
    return parts


#: In a worker: how to make the environment, and the environment with its expert once it is needed.
_make: Callable[[], tuple[Any, Any]]
_env: tuple[Any, Any] | None = None


def _start(suite: str, task: str, num_points: int, expert: str | None) -> None:
    global _make
    _make = functools.partial(make_env, suite, task, num_points, expert)


def _episode(seed: int, parts: str, max_steps: int, min_success_steps: int, stop_after: int | None) -> bool:
    """Whether the episode of this seed succeeded, from an earlier run or played now."""
    global _env
    done, failed = pathlib.Path(parts) / f"{seed}.npz", pathlib.Path(parts) / f"{seed}.failed"
    if done.exists() or failed.exists():
        return done.exists()
    if _env is None:  # not in _start, where an error would only read "the pool is broken"
        _env = _make()
    env, expert = _env
    success, steps = record(env, expert, seed, max_steps, min_success_steps, stop_after)
    arrays: dict[str, Any] = steps if success else {}
    write_atomically(done if success else failed, lambda file: np.savez(file, **arrays) if success else None)
    return success


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=sorted(POINTS))
    parser.add_argument(
        "--task",
        required=True,
        help=f"MetaWorld: any of its 50 tasks, without '-v3'; Adroit: {', '.join(adroit.TASKS)}",
    )
    parser.add_argument("--episodes", type=int, default=10, help="demonstrations to keep (default 10)")
    parser.add_argument("--expert", help="weights of the expert, .npz (Adroit)")
    parser.add_argument(
        "--num_points",
        type=int,
        help=f"points per cloud (default: {', '.join(f'{suite} {n}' for suite, n in POINTS.items())})",
    )
    parser.add_argument(
        "--stop_after",
        type=int,
        help="end an episode of MetaWorld after this number of solved steps (default: 200 steps in all, as in DP3; "
        "experts often only jitter after a success)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the first episode; the others follow (default 0)")
    parser.add_argument("--output", help="the zarr folder to write (default: data/<suite>/<suite>_<task>_expert.zarr)")
    parser.add_argument("--num_workers", type=int, default=os.cpu_count(), help="processes (default: one per core)")
    options = parser.parse_args(arguments)
    if options.episodes < 1 or options.num_workers < 1 or (options.num_points is not None and options.num_points < 1):
        parser.error("--episodes, --num_workers and --num_points must be at least 1")
    output = options.output or f"data/{options.suite}/{options.suite}_{options.task}_expert.zarr"
    try:
        rate = generate(
            options.suite,
            options.task,
            options.episodes,
            output,
            options.num_points,
            options.expert,
            options.seed,
            options.num_workers,
            options.stop_after,
        )
    except UserError as error:
        parser.exit(1, f"error: {error}\n")
    print(
        f"{options.episodes} demonstrations of {options.task} in {output}; the expert succeeded in {rate:.1%} of its "
        "episodes"
    )


if __name__ == "__main__":
    main()
