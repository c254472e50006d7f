"""PushT observed through a camera image and the agent's position."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from einops import rearrange
from gymnasium import spaces

from diffusion_policy.env.pusht.pusht_env import WINDOW, PushTEnv


class PushTImageEnv(PushTEnv):
    """Image PushT.

    Observation: {'image': (3, H, W) float32 in [0, 1], 'agent_pos': (2,) pixels}. `render()` returns the same image
    with a cross at the last action. Arguments: see `PushTEnv`.
    """

    def __init__(
        self,
        legacy: bool = False,
        block_cog: Sequence[float] | None = None,
        damping: float | None = None,
        render_size: int = 96,
        reset_to_state: Sequence[float] | np.ndarray | None = None,
        render_mode: str = "rgb_array",
    ):
        super().__init__(
            legacy=legacy,
            block_cog=block_cog,
            damping=damping,
            render_action=False,
            render_size=render_size,
            reset_to_state=reset_to_state,
            render_mode=render_mode,
        )
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0.0, 1.0, shape=(3, render_size, render_size), dtype=np.float32),
                "agent_pos": spaces.Box(0.0, float(WINDOW), shape=(2,), dtype=np.float64),
            }
        )

    def _get_obs(self) -> dict[str, np.ndarray]:
        self._frame = self._render_frame(mark_action=False)
        image = rearrange(self._frame.astype(np.float32) / 255.0, "h w c -> c h w")
        return {"image": image, "agent_pos": np.array(self.agent.position)}

    def render(self) -> Any:
        """Frame (render_size, render_size, 3) uint8 of the last observation, with the last action."""
        frame = self._frame.copy()
        if self.latest_action is not None:
            self._renderer.mark_action(frame, self.latest_action)
        return frame
