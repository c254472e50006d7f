"""What the facts mean for training, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from diffusion_policy.dataset.inspection.dimension_checks import binary, constant, quaternions, relation, saturated
from diffusion_policy.dataset.inspection.finding import NOTE, PROBLEM, WARNING, Finding, listed
from diffusion_policy.dataset.inspection.measure import Facts

IDLE_LIMIT, SHORT = 0.1, 16


def find(facts: Facts) -> list[Finding]:
    """All findings, the most serious first."""
    checks = (_left_out, _not_finite, _cameras, _frame_counts, _times, _same, _short, _idle, _jumps)
    more = (constant, saturated, binary, quaternions, relation)
    found = [finding for check in (*checks, *more) for finding in check(facts)]
    return sorted(found, key=lambda finding: (PROBLEM, WARNING, NOTE).index(finding.level))


def _left_out(facts: Facts) -> Iterator[Finding]:
    reasons = facts.recordings.left_out
    if reasons:
        yield Finding(PROBLEM, f"{len(reasons)} episodes or files are left out", listed(reasons, 3))


def _not_finite(facts: Facts) -> Iterator[Finding]:
    for vector in facts.vectors.values():
        if vector.not_finite:
            episode, step = vector.not_finite[0]
            yield Finding(
                PROBLEM,
                f"{vector.key} has NaN or infinity in {len(vector.not_finite)} episodes",
                f"Training stops at such a number. First: {facts.recordings.episode_names[episode]}, step {step}. "
                "Remove these episodes, or repair them where they were recorded.",
            )


def _cameras(facts: Facts) -> Iterator[Finding]:
    total = len(facts.recordings)
    for camera, missing in facts.missing.items():
        if missing:
            yield Finding(
                WARNING,
                f"camera {camera}: {len(missing)} of {total} episodes have no images",
                f"With task.cameras, training needs task.skip_broken=true and uses the other {total - len(missing)}; "
                f"without images it uses all. First: {facts.recordings.episode_names[missing[0]]}.",
            )


def _frame_counts(facts: Facts) -> Iterator[Finding]:
    for camera, wrong in facts.frame_counts.items():
        if wrong:
            index, count = wrong[0]
            yield Finding(
                PROBLEM,
                f"camera {camera}: {len(wrong)} videos do not have one frame per step",
                f"Images and numbers would not belong together. First: {facts.recordings.episode_names[index]}, "
                f"{count or 'no readable'} frames for {facts.recordings.lengths[index]} steps. Remove these episodes.",
            )


def _times(facts: Facts) -> Iterator[Finding]:
    names = facts.recordings.episode_names
    if facts.late:
        worst = max(facts.late, key=lambda index: facts.late[index])
        yield Finding(
            WARNING,
            f"the time stamps of {len(facts.late)} episodes drift from {facts.recordings.fps:g} Hz",
            f"Up to {facts.late[worst]:.2f} s ({names[worst]}). The policy would move faster or slower than you did. "
            "Record at a fixed rate, or resample.",
        )
    if facts.uneven:
        worst = max(facts.uneven, key=lambda index: facts.uneven[index])
        yield Finding(
            WARNING,
            f"{sum(facts.uneven.values())} steps in {len(facts.uneven)} episodes are too long or too short",
            f"Most in {names[worst]}: {facts.uneven[worst]}. Steps were dropped or doubled; motions look jerky to the "
            "policy. A few are harmless.",
        )


def _same(facts: Facts) -> Iterator[Finding]:
    if facts.same:
        pairs = [" = ".join(facts.recordings.short_name(index) for index in same[:3]) for same in facts.same]
        yield Finding(
            WARNING,
            f"{sum(len(same) - 1 for same in facts.same)} episodes are copies of others",
            f"{listed(pairs, 3)}. Copies count twice, and one in the validation split makes its error too small: "
            "remove them.",
        )


def _short(facts: Facts) -> Iterator[Finding]:
    short = [index for index, length in enumerate(facts.recordings.lengths) if length < SHORT]
    if short:
        yield Finding(
            WARNING,
            f"{len(short)} episodes have fewer than {SHORT} steps",
            f"Shorter than a chunk of actions; often false starts. First: {facts.recordings.episode_names[short[0]]}.",
        )


def _idle(facts: Facts) -> Iterator[Finding]:
    share = float(np.average(facts.idle, weights=facts.recordings.lengths))
    many = np.flatnonzero(facts.idle > 2 * IDLE_LIMIT)
    if share <= IDLE_LIMIT and not len(many):
        return
    worst = [f"{facts.recordings.short_name(i)} {facts.idle[i]:.0%}" for i in np.argsort(-facts.idle)[:3]]
    ends = float(np.average(facts.idle_ends, weights=facts.recordings.lengths))
    yield Finding(
        WARNING if share > IDLE_LIMIT else NOTE,
        f"the robot stands still in {share:.0%} of the steps ({ends:.0%} before the first or after the last motion)",
        f"A policy can learn to freeze there. Most: {listed(worst)}. Cut the pauses, or try task.drop_idle=0.01.",
    )


def _jumps(facts: Facts) -> Iterator[Finding]:
    for wrapped in (True, False):
        jumps = [jump for jump in facts.jumps if jump.wrapped == wrapped]
        if not jumps:
            continue
        first = f"First: {facts.recordings.episode_names[jumps[0].episode]}, step {jumps[0].step}."
        labels = listed(sorted({jump.label for jump in jumps}))
        if wrapped:
            advice = "Close angles look far apart, and the average of both sides points the wrong way. Unwrap it, or"
            advice += f" use sine and cosine or a rotation matrix. {first}"
            yield Finding(WARNING, f"angles wrap around, {len(jumps)} times: {labels}", advice)
        else:
            advice = f"No robot moves like that: lost steps, a reset, or a changed unit. Look at them. {first}"
            yield Finding(WARNING, f"{len(jumps)} jumps within one step: {labels}", advice)
