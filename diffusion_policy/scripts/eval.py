"""Evaluate a checkpoint: the code behind eval.py.

Writes eval_log.json (upstream's keys and further ones) and videos of the first episodes into an output folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from diffusion_policy.common.config_util import build, resolve_device
from diffusion_policy.common.errors import ConfigError, EvaluationError, UserError
from diffusion_policy.common.random_state import seed_everything
from diffusion_policy.common.statistics import mean_interval
from diffusion_policy.policy.loading import policy_of
from diffusion_policy.storage import atomic, checkpoint_io

#: First seed of each named set. `mip` shares its starts with the public PushT demonstrations, `heldout` does not.
SEED_SETS = {"mip": 0, "heldout": 100000}


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="eval.py", description="Evaluate a checkpoint in its task's environment.")
    out.add_argument(
        "-c", "--checkpoint", required=True, help="a .ckpt file of a training run, or a folder of exported weights"
    )
    out.add_argument(
        "-o",
        "--output_dir",
        help="folder for eval_log.json and videos (default: eval_<name> beside checkpoints/ or in the export)",
    )
    out.add_argument("-d", "--device", default="auto", help="auto (default), cpu, cuda, cuda:1, mps")
    out.add_argument("-n", "--n_episodes", type=int, help="number of test episodes (default: the task's n_test)")
    out.add_argument(
        "--seeds", choices=sorted(SEED_SETS), help="set of starting seeds (default: the task's test_start_seed)"
    )
    out.add_argument(
        "--nfe", type=int, help="network calls per action chunk, for policies that can trade calls for quality"
    )
    out.add_argument(
        "--overwrite", action="store_true", help="replace an output folder that already holds an evaluation"
    )
    out.add_argument(
        "--trust-checkpoint",
        action="store_true",
        help="open a pickled (upstream) checkpoint, or one that names "
        "classes of other packages; both run code from the file",
    )
    return out


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    try:
        evaluate(options)
    except (UserError, ValueError) as error:
        sys.exit(f"error: {error}")


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    checkpoint = pathlib.Path(options.checkpoint)
    beside = checkpoint if checkpoint.is_dir() else checkpoint.parent.parent
    output = pathlib.Path(options.output_dir) if options.output_dir else beside / f"eval_{checkpoint.stem}"
    if (output / "eval_log.json").exists() and not options.overwrite:
        raise ConfigError(f"{output} already holds an evaluation: choose another --output_dir, or pass --overwrite")
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output} is a file, not a folder")
    if options.n_episodes is not None and options.n_episodes < 1:
        raise ConfigError(f"--n_episodes {options.n_episodes}: at least one episode is needed")
    device = resolve_device(options.device)
    payload = checkpoint_io.load(checkpoint, trust=options.trust_checkpoint, sections=("policy", "task.env_runner"))
    cfg = OmegaConf.create(payload["cfg"])
    policy = policy_of(payload, device)
    if options.nfe is not None:
        set_nfe(policy, options.nfe)
    # Nothing is written before this line: a checkpoint that does not load leaves the folder unchanged.
    if options.overwrite and (output / "eval_log.json").exists():
        shutil.rmtree(output / "media", ignore_errors=True)
    output.mkdir(parents=True, exist_ok=True)
    runner = make_runner(cfg, options, output)
    seed_everything(cfg.training.seed)
    with counting(policy) as counter:
        scores = runner.run(policy)
    log = dict(scores) | report(runner, policy, counter, device)
    log |= {
        "checkpoint": str(checkpoint),
        "global_step": payload.get("attributes", {}).get("global_step"),
        "name": cfg.get("name"),
        "seeds": options.seeds or "task",
        "versions": checkpoint_io.versions(),
        "torch_threads": torch.get_num_threads(),
    }
    text = json.dumps(log, indent=2, sort_keys=True)
    atomic.write_text(output / "eval_log.json", text)
    if log["lost"]:
        raise EvaluationError(
            f"{len(log['lost'])} of {len(log['lost']) + log['n_episodes']} episodes could not be played (seeds "
            f"{', '.join(str(episode['seed']) for episode in log['lost'])}), so there is no mean score; "
            f"{output / 'eval_log.json'} has the reasons and the episodes that were played"
        )
    low, high = log["interval_95"]
    latency = log["latency_ms"]
    print(
        f"mean score {log['test/mean_score']:.3f}  (95 % interval {low:.3f} to {high:.3f}, "
        f"{log['n_episodes']} episodes, best {log['best_score']:.3f})"
    )
    print(
        f"inference  p50 {latency['p50']:.2f} ms, p90 {latency['p90']:.2f} ms, p99 {latency['p99']:.2f} ms at batch 1; "
        f"{log['nfe']:g} network call(s)"
    )
    print(f"written to {output / 'eval_log.json'}")
    return log


def set_nfe(policy: Any, nfe: int) -> None:
    """Set the number of network calls that a policy makes per action chunk."""
    if nfe < 1:
        raise ConfigError(f"--nfe {nfe}: at least one network call is needed")
    if policy.nfe:
        try:
            policy.nfe = nfe
        except ValueError as error:
            raise ConfigError(f"--nfe {nfe} does not fit this policy: {error}") from error
    elif hasattr(policy, "noise_scheduler"):  # a diffusion policy written for upstream, without hooks
        policy.num_inference_steps = nfe
    else:
        raise ConfigError(f"{type(policy).__name__} makes a fixed number of network calls; omit --nfe")


def make_runner(cfg: DictConfig, options: argparse.Namespace, output: pathlib.Path) -> Any:
    """The task's runner on test episodes only."""
    if cfg.task.env_runner is None:
        raise ConfigError(
            "this policy was trained without a simulator (task.env_runner=null), so eval.py cannot evaluate it"
        )
    changes: dict[str, Any] = {"n_train": 0, "n_train_vis": 0}
    if "n_heldout" in cfg.task.env_runner:
        changes["n_heldout"] = 0
    if options.n_episodes is not None:
        changes["n_test"] = options.n_episodes
    if options.seeds is not None:
        changes["test_start_seed"] = SEED_SETS[options.seeds]
    return build(cfg, "task.env_runner", output_dir=str(output), **changes)


@contextlib.contextmanager
def counting(policy: Any) -> Iterator[dict[str, Any]]:
    """Count calls of the network and of predict_action, and keep one observation for the latency measurement."""
    counter: dict[str, Any] = {"network": 0, "chunks": 0, "obs": None}
    predict = policy.predict_action

    def predict_action(obs_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        counter["chunks"] += 1
        if counter["obs"] is None:
            counter["obs"] = {key: value[:1].clone() for key, value in obs_dict.items()}
        return predict(obs_dict)

    def called(*_: Any) -> None:
        counter["network"] += 1

    handle = policy.model.register_forward_hook(called)
    policy.predict_action = predict_action
    try:
        yield counter
    finally:
        handle.remove()
        del policy.predict_action


def report(runner: Any, policy: Any, counter: dict[str, Any], device: torch.device) -> dict[str, Any]:
    episodes = [episode for episode in runner.episodes if episode["split"] == "test"]
    lost = list(getattr(runner, "lost", ()))
    out = {"episodes": episodes, "n_episodes": len(episodes), "lost": lost, "device": str(device)}
    if not lost:  # statistics over fewer episodes are not comparable
        scores = np.array([episode["max_reward"] for episode in episodes])
        out |= {"best_score": float(scores.max()), "interval_95": mean_interval(scores)}
    if counter["chunks"]:
        out |= {"nfe": counter["network"] / counter["chunks"], "latency_ms": latency(policy, counter["obs"], device)}
    return out


@torch.no_grad()
def latency(
    policy: Any, obs: dict[str, torch.Tensor], device: torch.device, calls: int = 100, seconds: float = 20.0
) -> dict[str, float]:
    """Percentiles of predict_action at batch 1, end to end, after a warm-up; fewer calls if they are slow."""

    def wait() -> None:
        if device.type in ("cuda", "mps"):
            getattr(torch, device.type).synchronize()

    for _ in range(3):
        policy.predict_action(obs)
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < calls and (len(times) < 5 or time.perf_counter() < deadline):
        wait()
        start = time.perf_counter()
        policy.predict_action(obs)
        wait()
        times.append(1000 * (time.perf_counter() - start))
    p50, p90, p99 = np.percentile(times, [50, 90, 99])
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99), "max": max(times), "calls": len(times)}


if __name__ == "__main__":
    main()
