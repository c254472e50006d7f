"""Findings about single dimensions, and about what the action is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from diffusion_policy.dataset.inspection.finding import NOTE, WARNING, Finding, listed
from diffusion_policy.dataset.inspection.measure import Facts
from diffusion_policy.dataset.inspection.vectors import Vector
from diffusion_policy.dataset.recorded_keys import PREFIX

SATURATED_LIMIT = 0.05


def _used(facts: Facts) -> list[Vector]:
    """The features that a policy would see: observations and actions."""
    keys = [*facts.recordings.obs_keys, facts.recordings.action_key]
    return [facts.vectors[key] for key in keys if key and facts.vectors[key].detailed]


def _labels(vectors: Sequence[Vector], name: str) -> list[str]:
    return [vector.label(int(number)) for vector in vectors for number in np.flatnonzero(getattr(vector, name))]


def constant(facts: Facts) -> Iterator[Finding]:
    """Dimensions that never change."""
    labels = _labels(_used(facts), "constant")
    if labels:
        yield Finding(
            NOTE,
            f"dimensions that never change: {listed(labels)}",
            "They carry no information. Harmless, unless the robot moves there: then the recording is wrong.",
        )


def saturated(facts: Facts) -> Iterator[Finding]:
    """Dimensions at their limit."""
    labels = []
    for vector in _used(facts):
        share = np.maximum(vector.at_low, vector.at_high)
        for number in np.flatnonzero((share > SATURATED_LIMIT) & ~vector.constant & ~vector.binary):
            labels.append(f"{vector.label(int(number))} {share[number]:.0%}")
    if labels:
        yield Finding(
            NOTE,
            f"dimensions at their limit: {listed(labels)}",
            "The share of steps at exactly the lowest or highest value. Normal for fingers that close; for a joint, a "
            "limit cut off what was commanded.",
        )


def binary(facts: Facts) -> Iterator[Finding]:
    """Dimensions with two values."""
    labels = _labels(_used(facts), "binary")
    if labels:
        yield Finding(
            NOTE,
            f"dimensions with two values, like a gripper: {listed(labels)}",
            "A policy predicts numbers in between; use a threshold when you act.",
        )


def quaternions(facts: Facts) -> Iterator[Finding]:
    """Four dimensions that are a rotation."""
    for vector in _used(facts):
        if vector.quaternions:
            key = "action" if vector.key == facts.recordings.action_key else PREFIX.sub("", vector.key)
            places = listed([f"{vector.key}[{start}:{start + 4}]" for start in vector.quaternions])
            rotations = [f"{{start: {start}, from: quaternion}}" for start in vector.quaternions]
            yield Finding(
                NOTE,
                f"unit quaternions: {places}",
                f"A quaternion and its negative are one rotation, which spoils averages. Learn rotation_6d: "
                f"'task.rotations={{{key}: [{', '.join(rotations)}]}}', or quaternion_wxyz if w comes first.",
            )


def relation(facts: Facts) -> Iterator[Finding]:
    """What the action is, compared with the observation."""
    action, relation = facts.recordings.action_key, facts.relation
    if action is None:
        advice = f"Features: {listed(list(facts.vectors), 12)}. Name it: task.action_key=..."
        yield Finding(WARNING, "no feature is called action", advice)
    elif relation is None:
        yield Finding(
            NOTE, "position control or not cannot be told", f"No observation has the shape of {action} to compare with."
        )
    elif relation.position > 0.8:
        when = f"{relation.lag} steps later" if relation.lag else "at the same step"
        advice = "Position control. task.relative_actions=true, as below, learns actions relative to the current state."
        if relation.is_itself:
            advice = (
                f"The action is the observation itself, not what was commanded: shift it by a step, or use {action} = "
            )
            advice += "next observation."
        level = WARNING if relation.is_itself else NOTE
        yield Finding(level, f"{action} = {relation.key} {when} (explains {relation.position:.1%})", advice)
    elif relation.delta > 0.5:
        yield Finding(
            NOTE,
            f"{action} = change of {relation.key} (correlation {np.sqrt(relation.delta):.2f})",
            "Delta or velocity control. Errors add up over a chunk of actions; keep chunks short.",
        )
    else:
        yield Finding(
            NOTE,
            f"{action} is neither {relation.key} nor its change",
            "Torques, or another frame or unit. Nothing to do if that is meant.",
        )
