"""H.264 video files, written frame by frame through ffmpeg."""

import math
import os
from collections.abc import Generator
from typing import Any

import imageio_ffmpeg
import numpy as np


class VideoRecorder:
    """Writes frames (H, W, 3) uint8 to one file at a time.

    `start` -> `write_frame` ... -> `stop`. `stop` waits until ffmpeg has completed the file; a stopped recorder can be
    started again. Odd sizes are scaled to even ones, which 4:2:0 colour requires.

    Args:
        options: further ffmpeg output options, such as crf=22.
    """

    def __init__(self, fps: float, codec: str, input_pix_fmt: str, output_pix_fmt: str = "yuv420p", **options: Any):
        self.fps = fps
        self.codec = codec
        self.input_pix_fmt = input_pix_fmt
        self.output_pix_fmt = output_pix_fmt
        self.options = options
        self._reset_state()

    @classmethod
    def create_h264(
        cls,
        fps: float,
        codec: str = "h264",
        input_pix_fmt: str = "rgb24",
        output_pix_fmt: str = "yuv420p",
        crf: int = 18,
        profile: str = "high",
        **kwargs: Any,
    ) -> "VideoRecorder":
        """Build a recorder of H.264 files."""
        codec = "libx264" if codec == "h264" else codec
        return cls(fps, codec, input_pix_fmt, output_pix_fmt, crf=crf, profile=profile, **kwargs)

    def _reset_state(self) -> None:
        self.file_path: str | None = None
        self.shape: tuple[int, ...] | None = None
        self.start_time: float | None = None
        self._writer: Generator[Any, Any, None] | None = None
        self._n_frames = 0

    def is_ready(self) -> bool:
        """Whether a file has been started."""
        return self.file_path is not None

    def start(self, file_path: str | os.PathLike, start_time: float | None = None) -> None:
        """Begin a file.

        With `start_time`, frames are placed by their time: late ones are repeated and early ones dropped, so that the
        video runs in real time.
        """
        self.stop()
        self.file_path = str(file_path)
        self.start_time = start_time

    def write_frame(self, img: np.ndarray, frame_time: float | None = None) -> None:
        """Append `img` (H, W, 3) uint8."""
        if not self.is_ready():
            raise RuntimeError("start the recorder before writing frames")
        n_repeats = 1
        if self.start_time is not None:
            if frame_time is None:
                raise ValueError("a recorder started with a time needs the time of every frame")
            # The small constant prevents rounding from moving a punctual frame one slot back.
            slot = math.floor((frame_time - self.start_time) * self.fps + 1e-5)
            n_repeats = max(0, slot + 1 - self._n_frames)
        writer = self._writer or self._open(img)
        if img.shape != self.shape or img.dtype != np.uint8:
            raise ValueError(f"expected a uint8 frame of shape {self.shape}, got {img.dtype} {img.shape}")
        for _ in range(n_repeats):
            writer.send(np.ascontiguousarray(img))
        self._n_frames += n_repeats

    def _open(self, img: np.ndarray) -> Generator[Any, Any, None]:
        self.shape = img.shape
        output_params = [
            str(part)
            for key, value in self.options.items()
            for part in ("-profile:v" if key == "profile" else f"-{key}", value)
        ]
        self._writer = writer = imageio_ffmpeg.write_frames(
            self.file_path,
            (img.shape[1], img.shape[0]),
            fps=self.fps,
            codec=self.codec,
            pix_fmt_in=self.input_pix_fmt,
            pix_fmt_out=self.output_pix_fmt,
            quality=None,
            macro_block_size=2,
            ffmpeg_log_level="error",
            output_params=output_params,
        )
        writer.send(None)
        return writer

    def stop(self) -> None:
        """Complete the file, if one was started."""
        if self._writer is not None:
            self._writer.close()
        self._reset_state()

    def __del__(self) -> None:
        if getattr(self, "_writer", None) is not None:
            self.stop()
