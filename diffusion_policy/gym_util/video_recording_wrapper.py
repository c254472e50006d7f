"""A wrapper that records an episode as video."""

from typing import Any

import gymnasium as gym
import numpy as np

from diffusion_policy.real_world.video_recorder import VideoRecorder

__all__ = ["VideoRecorder", "VideoRecordingWrapper"]


class VideoRecordingWrapper(gym.Wrapper):
    """Writes the frame after every `steps_per_render`-th step to `file_path`; None records nothing.

    `render()` completes the file and returns its path; `reset` completes it, too.
    """

    def __init__(
        self,
        env: gym.Env,
        video_recoder: VideoRecorder,
        mode: str = "rgb_array",
        file_path: str | None = None,
        steps_per_render: int = 1,
    ):
        super().__init__(env)
        if mode != env.render_mode:
            raise ValueError(f"the environment renders {env.render_mode!r}, the recorder needs {mode!r}")
        self.video_recoder = video_recoder
        self.mode = mode
        self.file_path = file_path
        self.steps_per_render = steps_per_render
        self.step_count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.video_recoder.stop()
        self.step_count = 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = self.env.step(action)
        self.step_count += 1
        if self.file_path is not None and self.step_count % self.steps_per_render == 0:
            if not self.video_recoder.is_ready():
                self.video_recoder.start(self.file_path)
            frame = self.frame(float(result[1]))
            if frame.dtype != np.uint8:
                raise TypeError(f"the environment must render uint8 frames, got {frame.dtype}")
            self.video_recoder.write_frame(frame)
        return result

    def frame(self, reward: float) -> Any:
        """The frame to record after a step with this reward."""
        return self.env.render()

    def render(self) -> Any:
        self.video_recoder.stop()
        return self.file_path

    def close(self) -> None:
        self.video_recoder.stop()
        super().close()
