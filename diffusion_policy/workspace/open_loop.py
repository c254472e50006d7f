"""Open-loop evaluation: what a policy would have done in recorded episodes that it was not trained on.

An episode is replayed chunk by chunk: the policy sees the recorded observations up to a step, its executed actions are
compared with the recorded ones, and the next chunk starts behind them. Its actions change nothing, so the numbers show
what a policy has learned, not whether it succeeds.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import torch

from diffusion_policy.common.pytorch_util import dict_apply

#: A dimension is still if its deviation in the held-out episodes is below this share of that in all data.
STILL = 1e-3


@dataclasses.dataclass(frozen=True)
class Episode:
    """One replayed episode; actions are in the units of the dataset."""

    number: int
    """In the dataset."""
    predicted: np.ndarray
    """(steps, D)."""
    recorded: np.ndarray
    """(steps, D)."""
    chunk_step: np.ndarray
    """(steps,): the step of its chunk that predicted it; 0 starts a chunk."""


def can_replay(dataset: Any) -> bool:
    """Whether a dataset has windows over episodes, those of WindowedDataset."""
    return hasattr(dataset, "index_table") and hasattr(dataset, "replay_buffer") and hasattr(dataset, "val_mask")


@torch.no_grad()
def replay(policy: Any, held_out: Any, limit: int | None = None, batch_size: int = 64) -> list[Episode]:
    """Replay the episodes of a validation dataset, the first `limit` of them."""
    numbers = np.flatnonzero(held_out.val_mask)[:limit].tolist()
    ends = held_out.replay_buffer.episode_ends.tolist()
    starts, rows = [], []  # (episode, first step) and steps of the window of every chunk
    late = int(not getattr(policy, "oa_step_convention", True))  # actions start one step after the observation
    for number in numbers:
        begin, end = ends[number - 1] if number else 0, ends[number]
        for step in range(late, end - begin, policy.n_action_steps):
            window = np.arange(held_out.index_table.shape[1]) + step - late - policy.n_obs_steps + 1
            starts.append((number, step))
            rows.append(begin + np.clip(window, 0, end - begin - 1))
    windows = copy.copy(held_out)
    windows.index_table = torch.from_numpy(np.stack(rows))
    chunks = [
        _chunks(policy, windows.get_batch(range(i, min(i + batch_size, len(rows)))))
        for i in range(0, len(rows), batch_size)
    ]
    predicted, recorded = (np.concatenate(each) for each in zip(*chunks, strict=True))
    out = []
    for number in numbers:
        length = ends[number] - (ends[number - 1] if number else 0)
        mine = [i for i, (episode, _) in enumerate(starts) if episode == number]
        if mine:
            steps = slice(0, length - late)  # the last chunk may reach beyond the end
            acted, expert = (values[mine].reshape(-1, values.shape[2])[steps] for values in (predicted, recorded))
            position = np.tile(np.arange(predicted.shape[1]), len(mine))[steps]
            out.append(Episode(number, acted, expert, position))
    return out


def _chunks(policy: Any, batch: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The executed actions that are predicted for a batch, and the recorded ones: (B, Ta, D) each."""
    obs = batch["obs"] if isinstance(batch["obs"], dict) else {"obs": batch["obs"]}
    predicted = policy.predict_action(dict_apply(obs, lambda value: value.to(policy.device)))["action"].cpu()
    first = policy.n_obs_steps - int(getattr(policy, "oa_step_convention", True))
    recorded = batch["action"][:, first : first + predicted.shape[1]]
    return predicted.double().numpy(), recorded.double().numpy()


def metrics(episodes: list[Episode], spread: np.ndarray, fps: float | None = None) -> dict[str, Any]:
    """Error, variance explained, step size and jerk of replayed episodes; see `summary` for the mean numbers.

    Per dimension: `rmse` and `mae` (data units), `variance_explained` (1 - MSE / variance of the recorded actions; 1 is
    perfect, 0 equals the mean action), `step_size` (mean change per step), `jerk` (mean absolute third difference, per
    second cubed if the rate is known). `seams` has the step size between chunks, `inside` that within one. `hold` has
    the errors of repeating the last action before a chunk, `by_chunk_step` those of each executed step of a chunk.

    Args:
        episodes: of `replay`.
        spread: (D,) deviation of the actions in all data. A dimension that stands still in these episodes has None as
            its variance explained.
        fps: steps per second.
    """
    predicted = np.concatenate([episode.predicted for episode in episodes])
    recorded = np.concatenate([episode.recorded for episode in episodes])
    position = np.concatenate([episode.chunk_step for episode in episodes])
    moves = recorded.std(axis=0) > STILL * spread
    held = np.concatenate([_hold(episode) for episode in episodes])
    chunk_steps = [position == step for step in range(int(position.max()) + 1)]
    rate = 1.0 if fps is None else fps**3
    return {
        **_errors(predicted, recorded, moves),
        "hold": _errors(held, recorded, moves),
        "by_chunk_step": {
            key: [_errors(predicted[at], recorded[at], moves, recorded)[key] for at in chunk_steps]
            for key in ("rmse", "variance_explained")
        },
        "step_size": _differences(episodes, 1, 1.0),
        "seams": _differences(episodes, 1, 1.0, seams=True),
        "inside": _differences(episodes, 1, 1.0, seams=False),
        "jerk": _differences(episodes, 3, rate),
        "jerk_per": "step" if fps is None else "second",
        "moves": moves.tolist(),
        "episodes": [episode.number for episode in episodes],
        "steps": len(recorded),
        "chunks": int((position == 0).sum()),
    }


def summary(found: dict[str, Any]) -> dict[str, float]:
    """The mean numbers, as the log of a training has them under val/."""
    ratios = {
        key: np.array(found[key]["policy"])[found["moves"]] / np.maximum(1e-12, found[key]["expert"])[found["moves"]]
        for key in ("step_size", "seams", "inside", "jerk")
        if found[key]["expert"]
    }
    out = {
        "open_loop_rmse": float(np.sqrt(np.mean(np.square(found["rmse"])))),
        "variance_explained": _mean(found["variance_explained"]),
        "hold_variance_explained": _mean(found["hold"]["variance_explained"]),
    }
    return out | {f"{key}_ratio": float(np.median(values)) for key, values in ratios.items() if len(values)}


def evaluate_open_loop(policy: Any, held_out: Any, fps: float | None, limit: int | None = None) -> dict[str, float]:
    """The numbers of `summary` for a policy and a validation dataset."""
    return summary(metrics(replay(policy, held_out, limit), spread_of(held_out), fps))


def spread_of(dataset: Any) -> np.ndarray:
    """(D,) deviation of all recorded actions."""
    return dataset.get_all_actions().double().std(dim=0, correction=0).numpy()


def _hold(episode: Episode) -> np.ndarray:
    """(steps, D): the last recorded action before each chunk, all through it."""
    starts = np.flatnonzero(episode.chunk_step == 0)
    chunk = np.searchsorted(starts, np.arange(len(episode.recorded)), side="right") - 1
    return episode.recorded[np.maximum(starts - 1, 0)][chunk]


def _errors(
    predicted: np.ndarray, recorded: np.ndarray, moves: np.ndarray, reference: np.ndarray | None = None
) -> dict[str, list]:
    error = predicted - recorded
    mse = np.square(error).mean(axis=0)
    variance = (recorded if reference is None else reference).var(axis=0)
    explained = [
        float(1 - m / v) if moving else None for m, v, moving in zip(mse, variance, moves.tolist(), strict=True)
    ]
    return {
        "rmse": np.sqrt(mse).tolist(),
        "mae": np.abs(error).mean(axis=0).tolist(),
        "variance_explained": explained,
    }


def _differences(
    episodes: list[Episode], order: int, factor: float, seams: bool | None = None
) -> dict[str, list[float]]:
    """Mean absolute difference of an order, per dimension, within episodes; [] if all are too short.

    With `seams`, of those steps alone that start a chunk (True) or do not (False).
    """
    out = {}
    used: list[Any] = [
        slice(None) if seams is None else (episode.chunk_step[order:] == 0) == seams for episode in episodes
    ]
    for who, name in (("policy", "predicted"), ("expert", "recorded")):
        parts = [np.diff(getattr(episode, name), order, axis=0) for episode in episodes]
        values = np.concatenate([part[at] for part, at in zip(parts, used, strict=True)])
        out[who] = (factor * np.abs(values).mean(axis=0)).tolist() if len(values) else []
    return out


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else float("nan")
