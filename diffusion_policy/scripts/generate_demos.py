"""Demonstrations of MetaWorld and Adroit with point clouds, in DP3's layout, and of Pick Peach as ALOHA episodes.

    python -m diffusion_policy.scripts.generate_demos metaworld --task assembly --episodes 10
    python -m diffusion_policy.scripts.generate_demos adroit --task hammer --episodes 10 --expert hammer_weights.npz
    python -m diffusion_policy.scripts.generate_demos pick_peach --episodes 100 --images

MetaWorld has scripted experts; Adroit's are DAPG policies in an .npz file (see DAPGExpert). Only successful episodes
are kept. The result is a replay buffer (zarr) with point_cloud (points, 6: position and colour), state, action, img and
depth; its attributes record the number of attempts. An interrupted run continues when it is started again. Train with
`task=metaworld task.name=assembly`.

Pick Peach has a scripted expert, too. The result is a folder of ALOHA's hdf5 episodes, of which one half puts the peach
on the left of the plate and the other half on the right, and expert.json, which records the attempts. Train with
`task=pick_peach_qpos` or, with --images, `task=pick_peach_image`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import io
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
    play = functools.partial(
        _episode, parts=str(parts), max_steps=max_steps, min_success_steps=needed, stop_after=stop_after
    )
    start = (suite, task, num_points, expert)
    kept, _, tried = collect(task, play, episodes, seed, workers, _start, start)
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


def collect(
    title: str,
    play: Callable[[int], bool],
    episodes: int,
    seed: int,
    workers: int,
    initializer: Callable[..., None] | None = None,
    initargs: tuple = (),
    wanted: Callable[[int, list[int]], bool] = lambda seed, kept: True,
) -> tuple[list[int], int, int]:
    """Play seeds in several processes until enough succeed: the seeds that are kept, successes, attempts.

    Args:
        title: of the progress bar.
        play: plays the episode of a seed; returns whether it succeeded.
        episodes: how many to keep.
        seed: the first one.
        workers: how many processes.
        initializer: called at the start of each of them.
        initargs: its arguments.
        wanted: whether to keep an episode that succeeded, given those that are kept already.
    """
    kept: list[int] = []
    tried = successes = 0
    # Not fork: the simulators use threads. Each process has its own renderer.
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("forkserver"), initializer, initargs
    )
    with pool, tqdm(total=episodes, desc=f"{title}, expert", unit="demo", disable=None) as bar:
        pending: list[concurrent.futures.Future] = []
        try:
            while len(kept) < episodes:
                while len(pending) < min(2 * workers, episodes - len(kept)):  # no more than needed if all succeed
                    pending.append(pool.submit(play, seed + tried + len(pending)))
                if pending.pop(0).result():
                    successes += 1
                    if wanted(seed + tried, kept):
                        kept.append(seed + tried)
                        bar.update()
                tried += 1
                bar.set_postfix(success=f"{successes / tried:.0%}")
                if tried >= MIN_ATTEMPTS and 4 * successes < tried:
                    raise UserError(
                        f"the expert for {title} succeeded in only {successes} of {tried} episodes: is it for this "
                        "task?"
                    )
        finally:
            for job in pending:
                job.cancel()
    return kept, successes, tried


def generate_pick_peach(
    episodes: int,
    output: str | os.PathLike,
    images: bool = False,
    image_size: int = 96,
    seed: int = 0,
    workers: int = 1,
) -> float:
    """Write `episodes` demonstrations of Pick Peach to the folder `output`; returns the expert's success rate."""
    from diffusion_policy.env.pick_peach.expert import placement_of

    output = pathlib.Path(output).expanduser()
    if output.exists():
        raise ConfigError(f"{output} exists already; remove it, or choose another --output")
    if episodes % 2 or seed % 4:
        raise ConfigError(
            f"--episodes {episodes} --seed {seed}: the number of episodes must be even and the seed a multiple of 4, "
            "so that each side of the plate has one half"
        )
    settings = {"task": "pick_peach", "images": images, "image_size": image_size if images else None}
    parts = _open_parts(output, settings)
    quota = [(episodes + 3 - combination) // 4 for combination in range(4)]  # of places of the peach and sides

    def wanted(number: int, kept: list[int]) -> bool:
        return sum(other % 4 == number % 4 for other in kept) < quota[number % 4]

    play = functools.partial(_peach_episode, parts=str(parts), images=images, image_size=image_size)
    kept, successes, tried = collect("pick_peach", play, episodes, seed, workers, wanted=wanted)
    folder = parts / "episodes"
    folder.mkdir(exist_ok=True)
    for number, one in enumerate(kept):  # if this is interrupted, the seeds that were moved are played again
        os.replace(parts / f"{one}.hdf5", folder / f"episode_{number}.hdf5")
    expert = {
        "source": "scripted expert of Pick Peach",
        "attempts": tried,
        "successes": successes,
        "success_rate": successes / tried,
        "episode_seeds": kept,
        "placements": [placement_of(one) for one in kept],
    }
    record_of = {"expert": expert, "settings": settings, "versions": versions()}
    write_text(folder / "expert.json", json.dumps(record_of, indent=1))
    os.replace(folder, output)
    shutil.rmtree(parts)
    return successes / tried


def _peach_episode(seed: int, parts: str, images: bool, image_size: int) -> bool:
    """Whether the episode of this seed succeeded, from an earlier run or played now."""
    from diffusion_policy.env.pick_peach import expert
    from diffusion_policy.env.pick_peach.pick_peach_env import CONTROL_HZ, PickPeachEnv
    from diffusion_policy.env.pick_peach.simulation import CAMERAS

    done, failed = pathlib.Path(parts) / f"{seed}.hdf5", pathlib.Path(parts) / f"{seed}.failed"
    if done.exists() or failed.exists():
        return done.exists()
    env = PickPeachEnv(CAMERAS if images else (), image_size, terminate_on_success=False)
    steps = expert.record(env, seed)
    if steps is None:
        write_text(failed, "")
        return False
    attributes = {"seed": seed, "start": env.start, "placement": expert.placement_of(seed), "fps": CONTROL_HZ}
    write_episode(done, steps, attributes)
    return True


def write_episode(path: pathlib.Path, steps: dict[str, np.ndarray], attributes: dict[str, Any]) -> None:
    """Write an episode as ALOHA does: action, and under observations the images and all else."""
    import h5py

    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        file.attrs.update({"sim": True, "compress": False, **attributes})
        for key, values in steps.items():
            if values.dtype == np.uint8:  # one chunk per image, so that single images can be decoded
                name, options = f"observations/images/{key}", {"chunks": (1, *values.shape[1:]), "compression": "gzip"}
            else:
                name, options = key if key == "action" else f"observations/{key}", {}
            file.create_dataset(name, data=values, **options)
    write_atomically(path, lambda file: file.write(content.getbuffer()))


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
    parser.add_argument("suite", choices=sorted([*POINTS, "pick_peach"]))
    parser.add_argument(
        "--task",
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
    parser.add_argument("--images", action="store_true", help="record the front and the head camera (Pick Peach)")
    parser.add_argument("--image_size", type=int, default=96, help="height and width of the images (default 96)")
    parser.add_argument(
        "-o",
        "--output",
        help="the folder to write (default: data/<suite>/<suite>_<task>_expert.zarr, or data/pick_peach)",
    )
    parser.add_argument("--num_workers", type=int, default=os.cpu_count(), help="processes (default: one per core)")
    options = parser.parse_args(arguments)
    if options.episodes < 1 or options.num_workers < 1 or (options.num_points is not None and options.num_points < 1):
        parser.error("--episodes, --num_workers and --num_points must be at least 1")
    if options.suite == "pick_peach":
        _main_pick_peach(parser, options)
        return
    if options.task is None:
        parser.error(f"{options.suite} has several tasks: choose one with --task")
    if options.images:
        parser.error(f"--images is for pick_peach; demonstrations of {options.suite} have images already")
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


def _main_pick_peach(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    for name in ("task", "expert", "num_points", "stop_after"):
        if getattr(options, name) is not None:
            parser.error(f"--{name} is not for pick_peach")
    if options.image_size < 16:
        parser.error("--image_size must be at least 16")
    output = options.output or "data/pick_peach"
    try:
        rate = generate_pick_peach(
            options.episodes, output, options.images, options.image_size, options.seed, options.num_workers
        )
    except UserError as error:
        parser.exit(1, f"error: {error}\n")
    print(
        f"{options.episodes} demonstrations of Pick Peach in {output}, one half to each side of the plate; the expert "
        f"succeeded in {rate:.1%} of its episodes"
    )


if __name__ == "__main__":
    main()
