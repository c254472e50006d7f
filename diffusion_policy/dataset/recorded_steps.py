"""The steps of a recording, as arrays in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from diffusion_policy.common.errors import ConfigError, DataError
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.common.representation import Representation
from diffusion_policy.common.sampler import SequenceSampler
from diffusion_policy.dataset.base_dataset import check_steps
from diffusion_policy.dataset.recordings import Recordings
from diffusion_policy.workspace.console import say


def with_frames(recordings: Recordings, cameras: Sequence[str], skip_broken: bool) -> list[int]:
    """The episodes that have the images of all cameras; without `skip_broken` all must have them."""
    missing = {i: camera for i in range(len(recordings)) for camera in cameras if not recordings.has_frames(i, camera)}
    if missing:
        first, camera = next(iter(missing.items()))
        text = (
            f"{len(missing)} of {len(recordings)} episodes have no images of a camera, the first is "
            f"{recordings.episode_names[first]} ({camera})"
        )
        if not skip_broken or len(missing) == len(recordings):
            raise DataError(f"{recordings.path}: {text}. task.skip_broken=true trains on the others.")
        say(f"left out: {text}")
    return [i for i in range(len(recordings)) if i not in missing]


def read_steps(
    recordings: Recordings, episodes: Sequence[int], names: Mapping[str, str], action_key: str, drop_idle: float | None
) -> tuple[ReplayBuffer, list[np.ndarray]]:
    """The arrays {key: name} and the action as float32 (steps, D), and the steps of each episode that are kept."""
    names = {**names, action_key: "action"}
    read: list[dict[str, np.ndarray]] = []
    for index in episodes:
        arrays = recordings.episode(index)
        read.append({name: arrays[key].reshape(len(arrays[key]), -1).astype(np.float32) for key, name in names.items()})
    kept = [np.arange(len(episode["action"])) for episode in read]
    if drop_idle is not None:
        kept = moving_steps([np.concatenate(list(episode.values()), axis=1) for episode in read], drop_idle)
        dropped = sum(len(episode["action"]) for episode in read) - sum(map(len, kept))
        say(f"dropped {dropped} idle steps (task.drop_idle={drop_idle:g}), {sum(map(len, kept))} are left")
    data = {
        name: np.concatenate([episode[name][rows] for episode, rows in zip(read, kept, strict=True)])
        for name in names.values()
    }
    buffer = ReplayBuffer({"data": data, "meta": {"episode_ends": np.cumsum([len(rows) for rows in kept])}})
    check_steps(buffer, {name: values.shape[1:] for name, values in data.items()})
    return buffer, kept


def moving_steps(episodes: Sequence[np.ndarray], threshold: float) -> list[np.ndarray]:
    """The steps to keep of each episode (T, D): those that moved since the last kept step, and the first.

    A step moved if a number changed by more than `threshold` of its range over all episodes. Slow motion is thinned
    out, not removed, because steps are compared with the last kept one.
    """
    if not isinstance(threshold, (int, float)) or not 0 <= threshold < 1:
        raise ConfigError(f"task.drop_idle={threshold!r} must be a share of the range, such as 0.001, or null")
    least = threshold * np.ptp([ends for values in episodes for ends in (values.min(0), values.max(0))], axis=0)
    out = []
    for values in episodes:
        kept = [0]
        for step in range(1, len(values)):
            if (np.abs(values[step] - values[kept[-1]]) > least).any():
                kept.append(step)
        out.append(np.array(kept))
    return out


def action_steps(replay_buffer: ReplayBuffer, representation: Representation | None) -> torch.Tensor:
    """(steps, Da), rotations in the form that a policy returns: a quaternion and its negative are one rotation."""
    action = torch.from_numpy(replay_buffer["action"])
    return action if representation is None else representation.action.decode(representation.action.encode(action))


def represented_fields(dataset: Any, fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the network sees of {field: (steps, D)}; relative actions depend on the window they are in."""
    representation = dataset.representation
    if representation is None:
        return fields
    action = fields["action"]
    encoded = representation.encode_obs({key: value for key, value in fields.items() if key != "action"})
    if representation.relative is None:
        return {**encoded, "action": representation.encode_action(action, 0.0)}
    sampler = SequenceSampler(dataset.replay_buffer, dataset.horizon, dataset.pad_before, dataset.pad_after)
    rows = torch.from_numpy(sampler.index_table)  # (N, T)
    windows = {key: value[rows[:, : dataset.n_obs_steps]] for key, value in encoded.items()}
    reference = representation.reference(windows, dataset.n_obs_steps - 1)
    return {**encoded, "action": representation.encode_action(action[rows], reference)}
