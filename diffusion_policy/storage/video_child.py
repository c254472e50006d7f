"""Videos in the child process of reader_process. Only the containers and codecs below are opened.

FFmpeg chooses a demuxer by content, and some of them (playlists) open other files and addresses: it is told which one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from diffusion_policy.common.errors import DataError

CONTAINERS = {".mp4": "mp4", ".mkv": "matroska"}
CODECS = ("av1", "libdav1d", "libaom-av1", "h264", "hevc", "vp8", "vp9", "libvpx-vp9", "mpeg4", "mjpeg")


def load() -> None:
    """Import what the questions need, before memory is limited."""
    import av  # noqa: F401
    import numpy  # noqa: F401


def _open(path: str) -> tuple[Any, Any]:
    import av

    container = CONTAINERS.get(os.path.splitext(path)[1].lower())
    if container is None:
        raise DataError(f"{path} is not one of the videos that are read: {', '.join(CONTAINERS)}.")
    file = av.open(path, format=container, options={"protocol_whitelist": "file"}, metadata_errors="replace")
    if not file.streams.video:
        raise DataError(f"{path} has no video.")
    stream = file.streams.video[0]
    if stream.codec_context.name not in CODECS:
        raise DataError(f"{path} is encoded with {stream.codec_context.name}; read are {', '.join(CODECS)}.")
    stream.codec_context.thread_count = 1  # several videos are decoded in several processes
    return file, stream


def video_facts(path: str) -> Iterator[tuple[dict, dict]]:
    """{height, width, rate, frames} as the file declares them; frames is 0 if it does not."""
    file, stream = _open(path)
    with file:
        context = stream.codec_context
        rate = float(stream.average_rate) if stream.average_rate else None
        yield {"height": context.height, "width": context.width, "rate": rate, "frames": stream.frames}, {}


def video_frames(
    path: str, shape: list[int], rate: float | None, start: float, count: int, block: int
) -> Iterator[tuple[dict, dict]]:
    """`count` frames (H, W, 3) from `start` seconds on, at `rate` per second, `block` of them at a time."""
    import numpy as np

    file, stream = _open(path)
    with file:
        context = stream.codec_context
        if [context.height, context.width] != shape[:2]:
            raise DataError(f"{path} has frames of {context.height} x {context.width}, not of {shape[0]} x {shape[1]}.")
        found = float(stream.average_rate or 0)
        if rate and abs(found / rate - 1) > 0.01:
            raise DataError(
                f"{path} has {found:g} frames per second, but the recording has {rate:g}: the rates differ."
            )
        if start > 0:
            file.seek(int(start / stream.time_base), stream=stream, backward=True)
        frames: list[Any] = []
        left = count
        for frame in file.decode(stream):
            if start > 0 and (frame.time is None or frame.time < start - 0.5 / (rate or found or 30)):
                continue
            if [frame.height, frame.width] != shape[:2]:
                raise DataError(f"{path} has a frame of {frame.height} x {frame.width}: its size changes.")
            frames.append(frame.to_ndarray(format="rgb24"))
            left -= 1
            if len(frames) == block or not left:
                yield {}, {"frames": np.stack(frames)}
                frames.clear()
            if not left:
                return
    raise DataError(f"{path} has {count - left} of {count} frames: it was cut short, or its episode lasts longer.")
