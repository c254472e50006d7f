"""Statistics of an episode: its final reward, how far the tool moved, and whether it stood still at the end."""

from typing import Any

import gymnasium as gym
import numpy as np

STILL_STEPS = 20  # control steps without motion at the end of an episode that count as standing still


class DiaryWrapper(gym.Wrapper):
    """Keeps the last reward and the path of the tool, for environments that have `tool_position`.

    Squared errors average experts who disagree: policies then stop between two ways, which a score does not show.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        result = self.env.reset(seed=seed, options=options)
        self.reward, self.path = 0.0, [self._position()]
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = self.env.step(action)
        self.reward = float(result[1])
        self.path.append(self._position())
        return result

    def _position(self) -> np.ndarray:
        return np.array(getattr(self.env.unwrapped, "tool_position", ()), dtype=np.float64)

    def report(self) -> dict[str, Any]:
        """final_reward and, if the tool's position is known, path_length and ends_still.

        An episode ends still if its tool stays within the environment's `still_distance` over the last steps. What an
        environment's `outcome()` tells is reported, too.
        """
        outcome = getattr(self.env.unwrapped, "outcome", dict)
        report: dict[str, Any] = {"final_reward": self.reward, **outcome()}
        path = np.array(self.path)
        if path.shape[1]:
            report["path_length"] = float(np.linalg.norm(np.diff(path, axis=0), axis=1).sum())
            last = path[-STILL_STEPS - 1 :]
            moved = np.linalg.norm(last - path[-1], axis=1).max()
            limit = self.env.unwrapped.still_distance  # type: ignore[attr-defined]
            report["ends_still"] = bool(len(path) > STILL_STEPS and moved < limit)
        return report
