"""Encoded images (JPEG, PNG) of known size, decoded in the child process of reader_process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffusion_policy.common.errors import DataError


def decoded(encoded: Sequence[Any], shape: Sequence[int], where: str, first: int, swap: bool = True) -> Any:
    """uint8 (N, H, W, 3); swap: from OpenCV's BGR to RGB. The size in a header is compared before decoding."""
    import cv2
    import numpy as np

    frames = np.empty((len(encoded), *shape), np.uint8)
    for number, content in enumerate(encoded):
        data = np.frombuffer(content, np.uint8)
        size = image_size(data.tobytes())
        if size != tuple(shape[:2]):
            raise DataError(f"{where} {first + number} is an image of {size}, not of {tuple(shape[:2])}.")
        image = cv2.imdecode(data, cv2.IMREAD_COLOR)
        if image is None:
            raise DataError(f"{where} {first + number} is not an image that can be decoded.")
        frames[number] = image[..., ::-1] if swap else image
    return frames


def image_size(data: bytes) -> tuple[int, int] | None:
    """(height, width) from the header of a PNG or JPEG; None if it is neither."""
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big")
    position = 2 if data[:2] == b"\xff\xd8" else len(data)
    while position + 9 < len(data) and data[position] == 0xFF:
        marker, length = data[position + 1], int.from_bytes(data[position + 2 : position + 4], "big")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # a start of frame
            return (
                int.from_bytes(data[position + 5 : position + 7], "big"),
                int.from_bytes(data[position + 7 : position + 9], "big"),
            )
        position += 2 + length
    return None
