"""Videos of rollouts: large frames with a caption and the predicted chunk."""

import pathlib
from typing import Any

import gymnasium as gym
import numpy as np
from einops import rearrange

from diffusion_policy.gym_util.video_recording_wrapper import VideoRecorder, VideoRecordingWrapper

HEIGHT = 384  # of the scene, at least
CAPTION = 32  # height of the strip below it


class RolloutVideo(VideoRecordingWrapper):
    """Records the scene at least 384 pixels high, above a strip with seed, step, current and best score.

    An environment that has `render_large(size, chunk)` draws itself, with the predicted chunk; frames of others are
    scaled up.
    """

    def __init__(self, env: gym.Env, video_recoder: VideoRecorder, steps_per_render: int = 1):
        super().__init__(env, video_recoder, steps_per_render=steps_per_render)
        self.seed = 0
        self.chunk: np.ndarray | None = None  # predicted actions (H, Da), drawn until the next chunk
        self.best = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.seed, self.chunk, self.best = seed or 0, None, 0.0
        return super().reset(seed=seed, options=options)

    def frame(self, reward: float) -> Any:
        self.best = max(self.best, reward)
        caption = f"seed {self.seed}   step {self.step_count}   score {reward:.2f}   best {self.best:.2f}"
        return with_caption(self.scene(), caption)

    def scene(self) -> np.ndarray:
        import cv2  # here, because it delays the first training step

        large = getattr(self.env.unwrapped, "render_large", None)
        if large is not None:
            return large(HEIGHT, self.chunk)
        scene: Any = self.env.render()
        height, width = scene.shape[:2]
        if height < HEIGHT:
            size = (round(width * HEIGHT / height / 2) * 2, HEIGHT)
            scene = cv2.resize(scene, size, interpolation=cv2.INTER_CUBIC)
        return scene


def with_caption(scene: np.ndarray, text: str) -> np.ndarray:
    """The scene (H, W, 3) above a white strip with a line of text, scaled to fit the width."""
    import cv2  # here, because it delays the first training step

    strip = np.full((CAPTION, scene.shape[1], 3), 255, np.uint8)
    (width, _), _ = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, 0.5, 1)
    scale = 0.5 * min(1.0, (scene.shape[1] - 16) / width)
    cv2.putText(strip, text, (8, 21), cv2.FONT_HERSHEY_SIMPLEX, scale, (40, 40, 40), 1, cv2.LINE_AA)
    return np.concatenate([scene, strip])


def write_grid(runner: Any, folder: str | pathlib.Path) -> str | None:
    """Tile the first videos of a runner's last evaluation into folder/rollouts.mp4, if there are two or more."""
    videos = [episode["video"] for episode in getattr(runner, "episodes", ()) if episode["video"]]
    if len(videos) < 2:
        return None
    output = str(pathlib.Path(folder) / "rollouts.mp4")
    video_grid(videos[:9], output)
    return output


def video_grid(paths: list[str], output: str, fps: float = 10, columns: int = 3, height: int = 240) -> None:
    """Tile videos into one; those that end early show their last frame."""
    import imageio.v3 as iio

    videos = [[_small(frame, height) for frame in iio.imiter(path)] for path in paths]
    columns = min(columns, len(videos))
    blank = np.full_like(videos[0][0], 255)
    recorder = VideoRecorder.create_h264(fps=fps, crf=24)
    recorder.start(output)
    for step in range(max(len(video) for video in videos)):
        tiles = [video[min(step, len(video) - 1)] for video in videos]
        tiles += [blank] * (-len(tiles) % columns)
        recorder.write_frame(rearrange(np.stack(tiles), "(r c) h w d -> (r h) (c w) d", c=columns))
    recorder.stop()


def _small(frame: np.ndarray, height: int) -> np.ndarray:
    import cv2  # here, because it delays the first training step

    width = round(frame.shape[1] * height / frame.shape[0] / 2) * 2
    return cv2.resize(frame, (width, height), interpolation=cv2.INTER_AREA)
