"""The videos of a LeRobotDataset v3: many episodes in a file, until it is large enough."""

from __future__ import annotations

import fractions
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from diffusion_policy.dataset.recordings import Camera

FILE_BYTES = 200e6
OPTIONS = {"crf": "20", "g": "2", "preset": "veryfast"}  # every second frame can be decoded by itself


class VideoWriter:
    """Encodes one camera with H.264. `add` an episode, and `close` at the end."""

    def __init__(self, folder: Path, template: str, key: str, camera: Camera, fps: float):
        self.folder, self.template, self.key, self.camera = folder, template, key, camera
        self.rate = fractions.Fraction(fps).limit_denominator(1001)
        self.number = -1
        self.file: Any = None

    def add(self, frames: Iterable[np.ndarray]) -> dict[str, Any]:
        """Encode the frames of an episode, and return where they are."""
        import av

        if self.file is None or self.path.stat().st_size > FILE_BYTES:
            self._next_file()
        first = self.frames
        for frame in frames:
            image = av.VideoFrame.from_ndarray(frame, format="rgb24")
            image.pts, image.time_base = self.frames, 1 / self.rate
            self.file.mux(self.stream.encode(image))
            self.frames += 1
        prefix = f"videos/{self.key}"
        return {
            f"{prefix}/chunk_index": 0,
            f"{prefix}/file_index": self.number,
            f"{prefix}/from_timestamp": float(first / self.rate),
            f"{prefix}/to_timestamp": float(self.frames / self.rate),
        }

    def _next_file(self) -> None:
        import av

        self.close()
        self.number, self.frames = self.number + 1, 0
        self.path = self.folder / self.template.format(video_key=self.key, chunk_index=0, file_index=self.number)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = av.open(str(self.path), "w")
        self.stream = self.file.add_stream("libx264", rate=self.rate, options=OPTIONS)
        self.stream.height, self.stream.width = self.camera.height, self.camera.width
        self.stream.time_base = 1 / self.rate
        even = self.camera.height % 2 == 0 and self.camera.width % 2 == 0
        self.stream.pix_fmt = "yuv420p" if even else "yuv444p"

    def close(self) -> None:
        """Finish the last file."""
        if self.file is not None:
            self.file.mux(self.stream.encode())
            self.file.close()
            self.file = None

    def feature(self) -> dict[str, Any]:
        """The entry of meta/info.json."""
        camera = self.camera
        facts = {
            "video.height": camera.height,
            "video.width": camera.width,
            "video.codec": "h264",
            "video.pix_fmt": self.stream.pix_fmt,
            "video.fps": round(float(self.rate)),
            "video.channels": 3,
            "has_audio": False,
            "is_depth_map": False,
        }
        return {"dtype": "video", "shape": camera.shape, "names": ["height", "width", "channels"], "info": facts}
