"""PushT observed through keypoints on the block and optionally on the agent."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from diffusion_policy.env.pusht.keypoints import BLOCK_KEYPOINTS
from diffusion_policy.env.pusht.pusht_env import WINDOW, PushTEnv

AGENT_KEYPOINTS = np.array(
    [
        [-9.57731277880234, 3.028319671145463],
        [14.124283276499565, -2.32937558530637],
        [-1.35281048842575, -14.384614888518746],
    ]
)
COLORS = {"block": (31, 119, 180), "agent": (255, 127, 14)}


class PushTKeypointsEnv(PushTEnv):
    """Keypoint PushT.

    Observation (2 D,): D = 20 coordinates (xy of 9 block keypoints, agent xy), then their visibility (D,) as 0 or 1.
    With `agent_keypoints` the agent's 3 keypoints replace its position and D = 24. Each keypoint is visible with
    probability `keypoint_visible_rate`, drawn at every observation from the environment's generator. Hidden coordinates
    stay in the observation; the policy masks them.

    Args:
        local_keypoint_map: {'block': (K, 2), 'agent': (M, 2)} in the frames of the bodies.
        color_map: {'block': rgb, 'agent': rgb} used by `draw_keypoints`.

    Other arguments: see `PushTEnv`.
    """

    def __init__(
        self,
        legacy: bool = False,
        block_cog: Sequence[float] | None = None,
        damping: float | None = None,
        render_size: int = 96,
        keypoint_visible_rate: float = 1.0,
        agent_keypoints: bool = False,
        draw_keypoints: bool = False,
        reset_to_state: Sequence[float] | np.ndarray | None = None,
        render_action: bool = True,
        local_keypoint_map: Mapping[str, np.ndarray] | None = None,
        color_map: Mapping[str, tuple[int, int, int]] | None = None,
        render_mode: str = "rgb_array",
    ):
        super().__init__(
            legacy=legacy,
            block_cog=block_cog,
            damping=damping,
            render_action=render_action,
            render_size=render_size,
            reset_to_state=reset_to_state,
            render_mode=render_mode,
        )
        params = self.genenerate_keypoint_manager_params()
        self.local_keypoint_map = local_keypoint_map or params["local_keypoint_map"]
        self.color_map = color_map or params["color_map"]
        self.keypoint_visible_rate = keypoint_visible_rate
        self.agent_keypoints = agent_keypoints
        self.draw_keypoints = draw_keypoints
        self._drawn_keypoints: dict[str, np.ndarray] = {}

        n_block = len(self.local_keypoint_map["block"])
        n_agent = len(self.local_keypoint_map["agent"]) if agent_keypoints else 1
        dim = 2 * (n_block + n_agent)
        high = np.concatenate([np.full(dim, float(WINDOW)), np.ones(dim)])
        self.observation_space = spaces.Box(np.zeros(2 * dim), high, dtype=np.float64)

    @classmethod
    def genenerate_keypoint_manager_params(cls) -> dict[str, Any]:
        """Keyword arguments for the constructor: keypoints in body frames, and their colours; upstream's spelling."""
        return {
            "local_keypoint_map": {"block": BLOCK_KEYPOINTS.copy(), "agent": AGENT_KEYPOINTS.copy()},
            "color_map": dict(COLORS),
        }

    def _keypoints(self) -> dict[str, np.ndarray]:
        """World coordinates {'block': (9, 2)}, and 'agent': (3, 2) if observed."""
        x, y, angle = self._block_pose
        c, s = np.cos(angle), np.sin(angle)
        rotation = np.array([[c, -s], [s, c]])
        keypoints = {"block": self.local_keypoint_map["block"] @ rotation.T + (x, y)}
        if self.agent_keypoints:
            keypoints["agent"] = self.local_keypoint_map["agent"] + self.agent.position
        return keypoints

    def _get_obs(self) -> np.ndarray:
        keypoints = self._keypoints()
        points = np.concatenate(list(keypoints.values()))
        visible = self.np_random.random(len(points)) < self.keypoint_visible_rate
        if self.draw_keypoints:
            n_block = len(keypoints["block"])
            self._drawn_keypoints = {
                "block": points[:n_block][visible[:n_block]],
                "agent": points[n_block:][visible[n_block:]],
            }
        if not self.agent_keypoints:
            points = np.concatenate([points, [self.agent.position]])
            visible = np.append(visible, True)
        return np.concatenate([points.ravel(), np.repeat(visible, 2)])

    def _render_frame(self, mark_action: bool, size: int | None = None) -> np.ndarray:
        frame = super()._render_frame(mark_action, size)
        for name, points in self._drawn_keypoints.items():
            self._renderer.mark_keypoints(frame, points, self.color_map[name])
        return frame
