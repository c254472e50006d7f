"""What the training loop evaluates at the end of an epoch."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig
from torch.nn.functional import mse_loss

from diffusion_policy.common.batch_stream import BatchStream
from diffusion_policy.common.config_util import build
from diffusion_policy.common.pytorch_util import dict_apply
from diffusion_policy.common.random_state import isolated_random_state
from diffusion_policy.workspace.open_loop import can_replay, evaluate_open_loop

#: Held-out episodes that are replayed during training; eval.py --open-loop replays all.
VAL_EPISODES = 16

if TYPE_CHECKING:
    from diffusion_policy.workspace.train_workspace import TrainWorkspace


@contextlib.contextmanager
def make_runner(cfg: DictConfig, folder: pathlib.Path, seed: int) -> Iterator[Any]:
    """The runner that evaluates the policy; None if task.env_runner is null, which trains without a simulator."""
    runner: Any = None
    if cfg.task.env_runner is not None:
        with isolated_random_state(seed):
            runner = build(cfg, "task.env_runner", output_dir=str(folder))
    try:
        yield runner
    finally:
        if hasattr(runner, "close"):
            runner.close()


def evaluate(run: TrainWorkspace, runner: Any, due: Callable[[int], bool]) -> dict[str, Any]:
    """The metrics that are due at the end of an epoch. Leaves the training's random state as it is.

    due(interval): whether an evaluation that happens every `interval` epochs is due.
    """
    s, policy, record = run.settings, run.policy, {}
    policy.eval()
    policy.set_progress(run.global_step / max(1, run.total_steps))
    with isolated_random_state(s.seed), torch.no_grad():
        if due(s.val_every) and run.val_stream is not None:
            record["val_loss"] = validation_loss(policy, run.val_stream, run.device, s.max_val_steps)
        if due(s.sample_every):
            record["train_action_mse_error"] = action_error(policy, run.stream, run.device)
        if due(s.rollout_every) and runner is not None:
            record |= runner.run(policy)
        # Last, so that a policy that samples draws the same numbers in the rollouts with and without held-out episodes.
        if due(s.sample_every) and run.val_stream is not None:
            record["val_action_mse_error"] = action_error(policy, run.val_stream, run.device)
            held_out = run.val_stream.source.dataset
            if can_replay(held_out):
                found = evaluate_open_loop(policy, held_out, run.cfg.task.get("fps"), VAL_EPISODES)
                record |= {f"val/{key}": value for key, value in found.items()}
    return record


def to_device(batch: Any, device: torch.device) -> Any:
    return dict_apply(batch, lambda x: x.to(device, non_blocking=True))


def validation_loss(policy: Any, stream: BatchStream, device: torch.device, max_batches: int | None) -> float:
    """Mean loss over one pass, or over its first `max_batches` batches."""
    count = min(stream.batches_per_pass, max_batches or stream.batches_per_pass)
    losses = [policy.compute_loss(to_device(stream.batch(i), device)).item() for i in range(count)]
    return sum(losses) / len(losses)


def action_error(policy: Any, stream: BatchStream, device: torch.device) -> float:
    """Mean squared error, in the dataset's units, of the actions predicted for the first batch."""
    batch = to_device(stream.batch(0), device)
    obs = batch["obs"] if isinstance(batch["obs"], dict) else {"obs": batch["obs"]}
    prediction, target = policy.predict_action(obs)["action_pred"], batch["action"]
    if prediction.shape[1] != target.shape[1]:  # the policy predicts only the steps it executes
        first = policy.n_obs_steps - 1 if getattr(policy, "oa_step_convention", True) else policy.n_obs_steps
        target = target[:, first : first + prediction.shape[1]]
    return mse_loss(prediction, target).item()
