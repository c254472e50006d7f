"""Checks before and at the first step: do data, policy, runner and settings fit together?"""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig, OmegaConf

from diffusion_policy.common.command_line import nearest
from diffusion_policy.common.errors import ConfigError, UserError
from diffusion_policy.common.random_state import isolated_random_state
from diffusion_policy.workspace.evaluation import to_device

if TYPE_CHECKING:
    from diffusion_policy.workspace.train_workspace import TrainWorkspace

#: What the training loop logs for any policy, and what the runners of this package do.
METRICS = ("epoch", "global_step", "lr", "train_loss", "val_loss", "train_action_mse_error", "val_action_mse_error")
OPEN_LOOP = ("val_open_loop_rmse", "val_variance_explained", "val_jerk_ratio", "val_step_size_ratio")
SCORES = ("test_mean_score", "train_mean_score", "heldout_mean_score")


def check_fit(run: TrainWorkspace, runner: Any) -> None:
    """Raise ConfigError unless the policy can act on the data's and the runner's observations. Draws no random number.

    A runner without a method `check` is not tried.
    """
    policy = run.policy.eval()
    with isolated_random_state(run.settings.seed), torch.no_grad():
        batch = run.stream.sample(2)
        check_batch(run.cfg.task, batch)
        batch = to_device(batch, run.device)
        obs: Any = batch["obs"] if isinstance(batch["obs"], Mapping) else {"obs": batch["obs"]}
        check_action(policy, _predicted(policy, obs), tuple(batch["action"].shape))
        if hasattr(runner, "check"):
            runner.check(policy)


def check_batch(task: DictConfig, batch: Any) -> None:
    """Raise ConfigError unless a batch of the dataset has the sizes that the task states."""
    if not isinstance(batch, Mapping) or not {"obs", "action"} <= batch.keys():
        raise ConfigError(f"a sample of {task.dataset._target_} must have the entries 'obs' and 'action'")
    if task.get("representation"):  # the policy converts; its sizes are not those of the data
        return None
    shape_meta: Any = OmegaConf.to_container(task.shape_meta) if task.get("shape_meta") else {}
    action = (task.get("action_dim"),) if "action_dim" in task else shape_meta.get("action", {}).get("shape")
    _compare("task.action_dim", action and action[0], "actions", batch["action"])
    if not isinstance(batch["obs"], Mapping):
        return _compare("task.obs_dim", task.get("obs_dim"), "observations", batch["obs"])
    for key, entry in shape_meta.get("obs", {}).items():
        if key not in batch["obs"]:
            raise ConfigError(f"task.shape_meta has {key!r}, the data has {', '.join(map(str, batch['obs']))}")
        check_entry(key, entry, batch["obs"][key])
    return None


def check_entry(key: str, entry: dict[str, Any], value: torch.Tensor) -> None:
    """Raise ConfigError unless one entry of an observation has the shape of shape_meta, and floats of an image fit."""
    shape, seen = tuple(entry["shape"]), tuple(value.shape[2:])
    if shape != seen:
        raise ConfigError(f"task.shape_meta.obs.{key}.shape={shape} does not fit the data, which has {seen}")
    if entry.get("type") == "rgb" and value.is_floating_point() and not (value.min() >= -1e-3 and value.max() <= 1.001):
        raise ConfigError(
            f"the images {key!r} of the dataset are floats from {value.min():g} to {value.max():g}: give bytes (uint8, "
            "0 to 255), or divide them by 255"
        )


def _compare(name: str, stated: Any, what: str, value: torch.Tensor) -> None:
    if stated is not None and value.shape[-1] != stated:
        raise ConfigError(f"{name}={stated} does not fit the data, whose {what} have {value.shape[-1]} numbers")


def _predicted(policy: Any, obs: dict[str, torch.Tensor]) -> Any:
    try:
        return policy.predict_action(obs)
    except UserError:
        raise
    except (ValueError, RuntimeError) as error:
        shapes = ", ".join(f"{key} {tuple(value.shape)}" for key, value in obs.items())
        raise ConfigError(
            f"{type(policy).__name__} cannot act on the observations of the dataset ({shapes}): {error}"
        ) from error


def check_action(policy: Any, result: Any, chunk: tuple[int, ...]) -> None:
    """Raise ConfigError unless predict_action returned actions for data of the shape `chunk` (B, T, Da)."""
    name = f"{type(policy).__name__}.predict_action"
    for key in ("action", "action_pred"):
        action = result.get(key) if isinstance(result, Mapping) else None
        if not isinstance(action, torch.Tensor):
            raise ConfigError(f"{name} must return a dictionary with a tensor {key!r}")
        if action.dim() != 3 or (action.shape[0], action.shape[2]) != (chunk[0], chunk[2]) or action.shape[1] < 1:
            raise ConfigError(
                f"{name} returns {key!r} of shape {tuple(action.shape)} for {chunk[0]} observations; it must be "
                f"({chunk[0]}, steps, {chunk[2]})"
            )


def training_loss(policy: Any, batch: Any) -> torch.Tensor:
    """Return the loss of a batch, which must be a scalar tensor with a gradient."""
    name = f"{type(policy).__name__}.compute_loss"
    try:
        loss = policy.compute_loss(batch)
    except UserError:
        raise
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ConfigError(f"{name} returns {got}; it must return one number, such as loss.mean()")
    if not loss.requires_grad:
        raise ConfigError(f"{name} returns a loss that does not depend on the weights: is something detached?")
    return loss


def check_monitor(run: TrainWorkspace, runner: Any) -> None:
    """Raise ConfigError if no record will have the metrics that checkpoint.topk names. Called after the first step.

    A runner without a method `check` may log scores of its own.
    """
    topk = run.cfg.checkpoint.topk
    known = [*METRICS, *SCORES, *OPEN_LOOP, *(key.replace("/", "_") for key in run.model.metrics())]
    named = {"monitor_key": [topk.monitor_key]}
    named["format_str"] = [field for _, field, _, _ in string.Formatter().parse(topk.format_str) if field is not None]
    for setting, keys in named.items() if topk.k > 0 else ():
        for key in keys:
            close = nearest(key, known, cutoff=0.5 if runner is None or hasattr(runner, "check") else 0.8)
            if key not in known and (close or runner is None or hasattr(runner, "check")):
                hint = f"nearest: {', '.join(close)}" if close else f"there are: {', '.join(known)}"
                raise ConfigError(f"checkpoint.topk.{setting}: no metric is called {key!r}; {hint}")
