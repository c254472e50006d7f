"""The last observations of one robot."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np


class ObservationHistory:
    """The last `n_steps` observations {key: array}; at the start, the first one counts as all of them."""

    def __init__(self, n_steps: int):
        self._steps: deque[dict[str, np.ndarray]] = deque(maxlen=n_steps)

    def clear(self) -> None:
        self._steps.clear()

    def add(self, observation: Mapping[str, np.ndarray]) -> None:
        """Add the observation of the next control step; it is copied, because drivers reuse their buffers."""
        step = {key: np.array(value) for key, value in observation.items()}
        missing = (self._steps.maxlen or 1) if not self._steps else 1
        self._steps.extend([step] * missing)

    def stacked(self) -> dict[str, np.ndarray]:
        """{key: (n_steps, ...)}, oldest first."""
        return {key: np.stack([step[key] for step in self._steps]) for key in self._steps[-1]}
