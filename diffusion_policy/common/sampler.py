"""Windows of consecutive steps of one episode; beyond its ends they repeat its first or last step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from diffusion_policy.common.errors import ConfigError


def create_indices(
    episode_ends: np.ndarray,
    sequence_length: int,
    episode_mask: np.ndarray,
    pad_before: int = 0,
    pad_after: int = 0,
    debug: bool = True,
) -> np.ndarray:
    """All windows of the episodes in `episode_mask` (episodes,), as int64 (N, 4); (0, 4) if none fits.

    A row is buffer_start, buffer_end (the steps to read), sample_start, sample_end (their place in the window). An
    episode of length n has windows that start at -pad_before to n - sequence_length + pad_after, with the pads clipped
    to [0, sequence_length - 1]. `debug` is accepted for compatibility and ignored.
    """
    pad_before, pad_after = np.clip([pad_before, pad_after], 0, sequence_length - 1)
    ends = np.asarray(episode_ends, dtype=np.int64)
    begins = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    begins, lengths = begins[episode_mask], (ends - begins)[episode_mask]

    counts = np.maximum(lengths - sequence_length + pad_after + pad_before + 1, 0)
    begins, lengths = np.repeat(begins, counts), np.repeat(lengths, counts)  # (N,): those of each window's episode
    first = np.repeat(np.cumsum(counts) - counts, counts)  # index of its episode's first window
    start = np.arange(counts.sum()) - first - pad_before  # relative to its episode
    inside_start, inside_end = np.maximum(start, 0), np.minimum(start + sequence_length, lengths)
    return np.stack(
        [begins + inside_start, begins + inside_end, inside_start - start, inside_end - start], axis=1
    ).astype(np.int64)


def get_val_mask(n_episodes: int, val_ratio: float, seed: int = 0) -> np.ndarray:
    """(n_episodes,) bool, True for validation: at least one episode if val_ratio > 0, but never all."""
    mask = np.zeros(n_episodes, dtype=bool)
    if val_ratio > 0:
        n_val = min(max(1, round(n_episodes * val_ratio)), n_episodes - 1)
        mask[np.random.default_rng(seed).choice(n_episodes, size=n_val, replace=False)] = True
    return mask


def downsample_mask(mask: np.ndarray, max_n: int | None, seed: int = 0) -> np.ndarray:
    """`mask` with at most `max_n` of its True entries, drawn at random."""
    if max_n is None or mask.sum() <= max_n:
        return mask
    chosen = np.random.default_rng(seed).choice(mask.sum(), size=int(max_n), replace=False)
    result = np.zeros_like(mask)
    result[np.flatnonzero(mask)[chosen]] = True
    return result


class SequenceSampler:
    """The windows of a replay buffer: one by `sample_sequence`, all as a table of buffer rows by `index_table`."""

    def __init__(
        self,
        replay_buffer: Any,
        sequence_length: int,
        pad_before: int = 0,
        pad_after: int = 0,
        keys: Sequence[str] | None = None,
        key_first_k: dict[str, int] | None = None,
        episode_mask: np.ndarray | None = None,
    ):
        """keys: the arrays to read, all if None. key_first_k: {key: number of steps of a window to read}."""
        if sequence_length < 1:
            raise ConfigError(f"A window needs at least one step: sequence_length is {sequence_length}.")
        episode_ends = replay_buffer.episode_ends[:]
        if episode_mask is None:
            episode_mask = np.ones(len(episode_ends), dtype=bool)
        self.replay_buffer = replay_buffer
        self.sequence_length = sequence_length
        self.keys = list(replay_buffer.keys()) if keys is None else list(keys)
        self.key_first_k = key_first_k or {}
        self.indices = create_indices(episode_ends, sequence_length, episode_mask, pad_before, pad_after)

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def index_table(self) -> np.ndarray:
        """(N, sequence_length) int64, the buffer row of each step of each window: array[table[i]] is window i."""
        return self._rows(self.indices)

    def sample_sequence(self, idx: int) -> dict[str, np.ndarray]:
        """{key: (sequence_length, ...)}; steps that key_first_k leaves out are NaN, or 0 in integer arrays."""
        start, stop = self.indices[idx, :2]
        rows = self._rows(self.indices[idx]) - start
        result = {}
        for key in self.keys:
            array = self.replay_buffer[key]
            n_read = min(self.key_first_k.get(key, stop - start), stop - start)
            steps = array[start : start + n_read]
            if n_read < stop - start:
                unread = np.full(
                    (stop - start - n_read, *array.shape[1:]), np.nan if array.dtype.kind == "f" else 0, array.dtype
                )
                steps = np.concatenate([steps, unread])
            result[key] = steps[rows]
        return result

    def _rows(self, indices: np.ndarray) -> np.ndarray:
        """indices: (..., 4) -> (..., sequence_length)."""
        buffer_start, buffer_end, sample_start, _ = (column[..., None] for column in np.moveaxis(indices, -1, 0))
        steps = np.arange(self.sequence_length) - sample_start
        return buffer_start + np.clip(steps, 0, buffer_end - buffer_start - 1)
