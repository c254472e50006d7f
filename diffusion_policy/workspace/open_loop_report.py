"""The report of `eval.py --open-loop`: numbers, latency and figures."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from diffusion_policy.common.config_util import build
from diffusion_policy.common.errors import ConfigError
from diffusion_policy.common.pytorch_util import dict_apply
from diffusion_policy.common.random_state import seed_everything
from diffusion_policy.dataset.identity import dataset_identity
from diffusion_policy.workspace.measurement import counting, latency
from diffusion_policy.workspace.open_loop import can_replay, metrics, replay, spread_of, summary
from diffusion_policy.workspace.open_loop_plot import plot_episode, plot_errors

FIGURES = 3  # episodes that are drawn


def held_out_episodes(cfg: DictConfig) -> Any:
    """The validation dataset of a run, built from the config in its checkpoint."""
    dataset = build(cfg, "task.dataset")
    held_out = dataset.get_validation_dataset()
    if not len(held_out):
        raise ConfigError("the run held out no episodes: train with task.dataset.val_ratio=0.1")
    if not can_replay(held_out):
        raise ConfigError(f"{type(dataset).__name__} is not a WindowedDataset, so its episodes cannot be replayed")
    return held_out


def report(cfg: DictConfig, policy: Any, held_out: Any, limit: int | None, figures: pathlib.Path) -> dict[str, Any]:
    """Replay the episodes and draw the first ones; returns what eval_log.json holds."""
    seed_everything(OmegaConf.select(cfg, "training.seed", default=0))
    fps = OmegaConf.select(cfg, "task.fps")
    with counting(policy) as counter:
        episodes = replay(policy, held_out, limit)
    found = metrics(episodes, spread_of(held_out), fps)
    names = list(OmegaConf.select(cfg, "task.action_names") or range(len(found["rmse"])))
    names = [str(name) for name in names]
    figures.mkdir(parents=True, exist_ok=True)
    drawn = [plot_episode(each, names, fps, figures / f"episode_{each.number}.png") for each in episodes[:FIGURES]]
    drawn.append(plot_errors(found, names, figures / "errors.png"))
    one = dict_apply(counter["obs"], lambda value: value[:1])
    return {
        **{f"val/{key}": value for key, value in summary(found).items()},
        "open_loop": {"names": names, **found},
        "evaluated_on": dataset_identity(held_out, cfg.task.dataset),
        "nfe": counter["network"] / counter["chunks"],
        "latency_ms": latency(policy, one, policy.device),
        "device": str(policy.device),
        "torch_threads": torch.get_num_threads(),
        "figures": [str(path) for path in drawn],
    }


def table(log: dict[str, Any]) -> str:
    """A line per dimension, and the mean numbers."""
    found = log["open_loop"]
    width = max(9, *(len(name) for name in found["names"]))
    lines = [f"{'dimension':<{width}}  RMSE      explained  hold     step size (expert)     jerk (expert)"]
    for dim, name in enumerate(found["names"]):
        explained, hold = (
            "still" if each["variance_explained"][dim] is None else f"{each['variance_explained'][dim]:.3f}"
            for each in (found, found["hold"])
        )
        sizes = [
            f"{found[key]['policy'][dim]:.3g} ({found[key]['expert'][dim]:.3g})" if found[key]["expert"] else "-"
            for key in ("step_size", "jerk")
        ]
        lines.append(f"{name:<{width}}  {found['rmse'][dim]:<9.3g} {explained:<10} {hold:<8} {sizes[0]:<22} {sizes[1]}")
    lines.append(
        f"mean variance explained {log['val/variance_explained']:.3f} (holding the last action "
        f"{log['val/hold_variance_explained']:.3f}), jerk {log.get('val/jerk_ratio', float('nan')):.2f} of the "
        f"expert's, steps {log.get('val/inside_ratio', float('nan')):.2f} within and "
        f"{log.get('val/seams_ratio', float('nan')):.2f} between chunks, over "
        f"{len(found['episodes'])} held-out episodes, {found['steps']} steps"
    )
    times = log["latency_ms"]
    lines.append(
        f"inference  p50 {times['p50']:.2f} ms, p90 {times['p90']:.2f} ms, p99 {times['p99']:.2f} ms at batch 1; "
        f"{log['nfe']:g} network call(s)"
    )
    return "\n".join(lines)
