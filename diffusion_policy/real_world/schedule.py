"""The actions that are due at each control step."""

from __future__ import annotations

import numpy as np


class ActionSchedule:
    """Actions by control step, from the newest chunk.

    Args:
        first: the first chunk (T, ...), due from step 0 on.
        blend: number of steps over which a new chunk fades in where the old one still has actions; 0 switches at once.
            It averages actions, which is wrong for quaternions and where two chunks chose different ways around.
    """

    def __init__(self, first: np.ndarray, blend: int = 0):
        self.blend = blend
        self._first = 0
        self._actions = first
        self._standing_since: int | None = None

    def due(self, step: int) -> np.ndarray | None:
        """The action of a control step; None if no chunk has one."""
        index = step - self._first
        return self._actions[index] if 0 <= index < len(self._actions) else None

    def begin(self, step: int) -> None:
        """Note whether the robot stands still at this stepbecause it has no action."""
        if self.due(step) is None and self._standing_since is None:
            self._standing_since = step

    def offer(self, actions: np.ndarray | None, observed: int, now: int) -> str:
        """Take a chunk whose first action belongs to the observation of step `observed`, and which arrived at `now`.

        Actions that were due meanwhile are dropped, unless the robot has been standing still since that observation.
        Returns 'accepted', or why the old chunk stays: 'failed' (there is none), 'rejected' (not finite, or of another
        shape), 'too_late' (nothing is left).
        """
        if actions is None:
            return "failed"
        if actions.shape[1:] != self._actions.shape[1:] or not np.isfinite(actions).all():
            return "rejected"
        standing = self._standing_since is not None and observed >= self._standing_since
        fresh = np.array(actions[0 if standing else now - observed :], dtype=np.float64)
        if len(fresh) == 0:
            return "too_late"
        self._fade_in(fresh, now)
        self._first, self._actions, self._standing_since = now, fresh, None
        return "accepted"

    def _fade_in(self, fresh: np.ndarray, now: int) -> None:
        for j in range(min(self.blend, len(fresh))):
            old = self.due(now + j)
            if old is None:
                return
            weight = (j + 1) / (self.blend + 1)
            fresh[j] = (1 - weight) * old + weight * fresh[j]
