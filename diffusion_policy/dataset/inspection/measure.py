"""The facts about a recording that the checks and the page need, in two passes over its numbers."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator

import numpy as np
from tqdm import tqdm

from diffusion_policy.dataset.inspection.vectors import Vector
from diffusion_policy.dataset.recordings import Recordings

IDLE_SECONDS = 0.5
IDLE_SHARE = 0.05  # of its range: a dimension that moves less within IDLE_SECONDS stands still
NOISE = 0.3  # dimensions above are noise, which never stands still
MAX_LAG = 10
DRAWN_EPISODES, DRAWN_POINTS = 3, 160


@dataclasses.dataclass
class Jump:
    """A change within one step that is too large for a motion."""

    episode: int
    step: int
    label: str
    size: float
    wrapped: bool


@dataclasses.dataclass
class Facts:
    """What `measure` found. Episodes are indices of the recordings."""

    recordings: Recordings
    vectors: dict[str, Vector]
    same: list[list[int]]  # episodes with the same numbers
    late: dict[int, float]  # seconds by which the time stamps of an episode drift
    uneven: dict[int, int]  # steps of an episode that took more than 1.5 times as long as they should
    idle: np.ndarray  # share of idle steps per episode
    idle_ends: np.ndarray  # share of idle steps before the first and after the last motion
    jumps: list[Jump]
    relation: Relation | None
    missing: dict[str, list[int]]  # camera: episodes without images
    frame_counts: dict[str, list[tuple[int, int]]]  # camera: (episode, images) where they are not one per step
    drawn: dict[int, dict[str, np.ndarray]]  # a few episodes, thinned out

    @property
    def whole(self) -> list[int]:
        """Episodes with the images of all cameras."""
        without = {index for indices in self.missing.values() for index in indices}
        return [index for index in range(len(self.recordings)) if index not in without]


class Relation:
    """How the action relates to an observation of the same shape."""

    def __init__(self, key: str, action: Vector):
        self.key = key
        self.mean, self.variance = action.mean, action.std**2
        self.errors = np.zeros((MAX_LAG + 1, action.size))
        self.counts = np.zeros(MAX_LAG + 1)
        self.products = np.zeros((3, action.size))

    def add(self, state: np.ndarray, action: np.ndarray) -> None:
        for lag in range(min(MAX_LAG, len(state) - 1) + 1):
            difference = action[: len(action) - lag] - state[lag:]
            self.errors[lag] += (difference**2).sum(axis=0)
            self.counts[lag] += len(difference)
        change, centred = np.diff(state, axis=0), action[:-1] - self.mean
        self.products += [(change * centred).sum(axis=0), (change**2).sum(axis=0), (centred**2).sum(axis=0)]

    @property
    def is_itself(self) -> bool:
        """Whether the action is the observation of the same step."""
        return self.lag == 0 and self.position > 0.9999

    @property
    def is_position_control(self) -> bool:
        """Whether the action is where the observation goes."""
        return self.position > 0.8 and not self.is_itself

    def finish(self) -> None:
        """position: variance of the action that the observation explains, at its best lag; delta: by its change."""
        moving = self.variance > 1e-12
        with np.errstate(divide="ignore", invalid="ignore"):
            explained = 1 - self.errors / np.maximum(self.counts, 1)[:, None] / self.variance
            correlation = self.products[0] ** 2 / (self.products[1] * self.products[2])
        scores = np.median(explained[:, moving], axis=1) if moving.any() else np.zeros(MAX_LAG + 1)
        self.lag, self.position = int(scores.argmax()), float(scores.max())
        self.delta = float(np.nan_to_num(np.median(correlation[moving]))) if moving.any() else 0.0


def measure(recordings: Recordings, quiet: bool = False) -> Facts:
    """Read all numbers twice, first for the ranges, then for what is compared with them."""
    steps = sum(recordings.lengths)
    vectors = {key: Vector(key, feature, steps) for key, feature in recordings.features.items()}
    facts = Facts(recordings, vectors, [], {}, {}, np.zeros(0), np.zeros(0), [], None, {}, {}, {})
    seen: dict[bytes, list[int]] = {}
    for index, numbers in _episodes(recordings, "reading", quiet):
        digest = hashlib.sha256()
        for key, values in numbers.items():
            vectors[key].add(index, values)
            digest.update(np.ascontiguousarray(values).data)
        seen.setdefault(digest.digest(), []).append(index)
        _check_times(facts, index)
    facts.same = [indices for indices in seen.values() if len(indices) > 1]
    for vector in vectors.values():
        vector.finish()
    _second_pass(facts, quiet)
    _check_cameras(facts)
    return facts


def _episodes(recordings: Recordings, text: str, quiet: bool) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    for index in tqdm(range(len(recordings)), desc=text, unit="episode", disable=True if quiet else None, leave=False):
        yield index, recordings.episode(index)


def _check_times(facts: Facts, index: int) -> None:
    times, fps = facts.recordings.timestamps(index), facts.recordings.fps
    if times is None or fps is None or len(times) < 2:
        return
    late = abs(float(times[-1] - times[0]) - (len(times) - 1) / fps)
    uneven = int((np.abs(np.diff(times.astype(np.float64)) * fps - 1) > 0.5).sum())
    if late > 0.5 / fps:
        facts.late[index] = late
    if uneven:
        facts.uneven[index] = uneven


def _second_pass(facts: Facts, quiet: bool) -> None:
    recordings = facts.recordings
    moving = [key for key in recordings.obs_keys if facts.vectors[key].detailed]
    moving = moving or [key for key in [recordings.action_key] if key and facts.vectors[key].detailed]
    facts.relation = _relation(facts, moving)
    middle = np.linspace(0, len(recordings) - 1, DRAWN_EPISODES).astype(int).tolist()
    idle: list[tuple[float, float]] = []
    for index, numbers in _episodes(recordings, "checking", quiet):
        flat = {key: values.reshape(len(values), -1).astype(np.float64) for key, values in numbers.items()}
        idle.append(_idle(facts, [(facts.vectors[key], flat[key]) for key in moving]))
        for key in dict.fromkeys([*moving, *filter(None, [recordings.action_key])]):
            _find_jumps(facts, index, facts.vectors[key], flat[key])
        if facts.relation and np.isfinite(flat[facts.relation.key]).all():
            facts.relation.add(flat[facts.relation.key], flat[recordings.action_key or ""])
        if index in middle:
            thin = max(1, recordings.lengths[index] // DRAWN_POINTS)
            facts.drawn[index] = {key: flat[key][::thin] for key in flat if facts.vectors[key].detailed}
    facts.idle, facts.idle_ends = np.array(idle).T
    if facts.relation:
        facts.relation.finish()


def _relation(facts: Facts, keys: list[str]) -> Relation | None:
    action = facts.recordings.action_key
    same = [key for key in keys if action and key != action and facts.vectors[key].size == facts.vectors[action].size]
    if not same or not action or facts.vectors[action].not_finite or not facts.vectors[action].detailed:
        return None
    return Relation(same[0], facts.vectors[action])


def _idle(facts: Facts, parts: list[tuple[Vector, np.ndarray]]) -> tuple[float, float]:
    """(share of idle steps, share before the first and after the last motion) of an episode."""
    window = max(2, round(IDLE_SECONDS * facts.recordings.fps)) if facts.recordings.fps else 5
    still: np.ndarray | None = None
    for vector, values in parts:
        used = (vector.noise < NOISE) & (vector.inner > 0)
        if len(values) > window and used.any():
            moved = np.abs(values[window:, used] - values[:-window, used]) / vector.inner[used]
            part = (moved < IDLE_SHARE).all(axis=1)
            still = part if still is None else still & part
    if still is None:
        return 0.0, 0.0
    ends = 1.0 if still.all() else (still.argmin() + still[::-1].argmin()) / len(still)
    return float(still.mean()), float(ends)


def _find_jumps(facts: Facts, index: int, vector: Vector, values: np.ndarray) -> None:
    if not vector.detailed or len(values) < 2:
        return
    changes = np.abs(np.diff(values, axis=0))
    turn = [np.abs(changes - full) < 0.1 * full for full in (2 * np.pi, 360.0)]
    wrapped = (turn[0] | turn[1]) & (changes > 0.7 * vector.range)
    large = (changes > 0.5 * vector.inner) & (changes > 30 * vector.step)
    for step, dimension in zip(*np.nonzero((wrapped | large) & ~vector.binary & (vector.noise < NOISE))):
        facts.jumps.append(
            Jump(
                index,
                int(step) + 1,
                vector.label(dimension),
                float(changes[step, dimension]),
                bool(wrapped[step, dimension]),
            )
        )


def _check_cameras(facts: Facts) -> None:
    recordings = facts.recordings
    for camera in recordings.cameras:
        there = [recordings.has_frames(index, camera) for index in range(len(recordings))]
        facts.missing[camera] = [index for index, found in enumerate(there) if not found]
        counts = [(index, recordings.frame_count(index, camera)) for index, found in enumerate(there) if found]
        facts.frame_counts[camera] = [
            (index, count) for index, count in counts if count is not None and count != recordings.lengths[index]
        ]
