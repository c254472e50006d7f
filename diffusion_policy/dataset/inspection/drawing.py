"""Small figures for the page, as SVG and JPEG: they need no script and no other file."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np

COLOURS = ("#2a78b5", "#e08214", "#4d9a4d")


def bars(counts: np.ndarray, width: int = 120, height: int = 28) -> str:
    """A histogram."""
    step, top = width / len(counts), max(int(counts.max()), 1)
    heights = [max(0.8, height * count / top) if count else 0 for count in counts.tolist()]
    shapes = "".join(
        f'<rect x="{number * step:.1f}" y="{height - tall:.1f}" width="{step - 0.6:.1f}" height="{tall:.1f}"/>'
        for number, tall in enumerate(heights)
        if tall
    )
    return _svg(width, height, f'<g fill="{COLOURS[0]}">{shapes}</g>')


def lines(series: Sequence[np.ndarray], low: float, high: float, width: int = 220, height: int = 28) -> str:
    """Curves between `low` and `high`, each over the whole width of the longest."""
    longest, span = max(map(len, series), default=1), (high - low) or 1.0
    paths = ""
    for colour, values in zip(COLOURS, series):
        across = np.arange(len(values)) * (width / max(longest - 1, 1))
        down = height - 1 - (height - 2) * (np.nan_to_num(values) - low) / span
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across.tolist(), down.tolist()))
        paths += f'<polyline points="{points}" stroke="{colour}"/>'
    return _svg(width, height, f'<g fill="none" stroke-width="1">{paths}</g>')


def columns(values: np.ndarray, limit: float, width: int = 900, height: int = 60) -> str:
    """A column per episode, for shares; those above `limit` stand out. At most 300, of evenly spread episodes."""
    values = values[np.linspace(0, len(values) - 1, min(len(values), 300)).astype(int)]
    step, top = width / len(values), max(float(values.max()), 2 * limit)
    shapes = "".join(
        f'<rect x="{number * step:.1f}" y="{height * (1 - value / top):.1f}" width="{max(step - 1, 0.5):.1f}" '
        f'height="{height * value / top:.1f}" fill="{COLOURS[1] if value > limit else COLOURS[0]}"/>'
        for number, value in enumerate(values.tolist())
    )
    line = height * (1 - limit / top)
    return _svg(width, height, f'{shapes}<path d="M0 {line:.1f}H{width}" stroke="#999" stroke-dasharray="4"/>')


def _svg(width: int, height: int, content: str) -> str:
    return f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}">{content}</svg>'


def photograph(frame: np.ndarray, height: int = 150) -> str:
    """An image as a data URL."""
    import cv2

    width = max(1, round(frame.shape[1] * height / frame.shape[0]))
    small = cv2.resize(frame, (width, height), interpolation=cv2.INTER_AREA)
    data = cv2.imencode(".jpg", small[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 80])[1]
    return f"data:image/jpeg;base64,{base64.b64encode(data.tobytes()).decode()}"
