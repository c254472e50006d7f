"""What an evaluation measures besides the score: network calls, latency, the interval of the mean."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.common.statistics import mean_interval


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

    network = getattr(policy, "model", None)  # an exported graph has none
    handle = network.register_forward_hook(called) if network is not None else None
    policy.predict_action = predict_action
    try:
        yield counter
    finally:
        del policy.predict_action
        if handle is not None:
            handle.remove()
        else:
            counter["network"] = counter["chunks"] * policy.nfe


def report(runner: Any, policy: Any, counter: dict[str, Any], device: torch.device) -> dict[str, Any]:
    episodes = [episode for episode in runner.episodes if episode["split"] == "test"]
    out = statistics(episodes, list(getattr(runner, "lost", ()))) | {"device": str(device)}
    if counter["chunks"]:
        out |= {"nfe": counter["network"] / counter["chunks"], "latency_ms": latency(policy, counter["obs"], device)}
    return out


def statistics(episodes: list[dict[str, Any]], lost: list[dict[str, Any]]) -> dict[str, Any]:
    """What eval_log.json says about all test episodes, beside the means of the runner."""
    out = {"episodes": episodes, "n_episodes": len(episodes), "lost": lost}
    if not lost:  # statistics over fewer episodes are not comparable
        scores = np.array([episode["max_reward"] for episode in episodes])
        out |= {"best_score": float(scores.max()), "interval_95": mean_interval(scores)}
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
