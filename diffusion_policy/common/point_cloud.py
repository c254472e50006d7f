"""Depth images to point clouds of a fixed size: back-projection, crop, farthest-point sampling."""

from __future__ import annotations

import dataclasses

import numpy as np

from diffusion_policy.common.errors import ConfigError, DataError

BUCKET_HEIGHT = 5  # of fpsample's tree; the fastest of 3 to 9 for a few thousand points


@dataclasses.dataclass(frozen=True)
class View:
    """From a camera's depth to a point cloud: p = rotation @ p_camera + offset, kept where low < p < high.

    p_camera is in metres, x to the right, y down, z forward.
    """

    rotation: np.ndarray
    offset: np.ndarray
    low: np.ndarray
    high: np.ndarray


def back_project(depth: np.ndarray, fovy: float) -> np.ndarray:
    """Depth (H, W) in metres, of a camera with a vertical view of `fovy` degrees -> points (H * W, 3) in its frame.

    z = depth,    x = (u - W / 2) z / f,    y = (v - H / 2) z / f,    f = H / (2 tan(fovy / 2))
    """
    height, width = depth.shape
    if not np.isfinite(depth).all() or depth.min() <= 0:
        bad = int((~np.isfinite(depth) | (depth <= 0)).sum())
        raise DataError(
            f"the depth image has {bad} of {depth.size} pixels that are not finite or not in front of the camera: the "
            "renderer is broken (try another MUJOCO_GL), or two renderers are active in one process."
        )
    focal = height / (2 * np.tan(np.radians(fovy) / 2))
    z = depth.astype(np.float32)
    x = (np.arange(width, dtype=np.float32) - width / 2) / np.float32(focal) * z
    y = ((np.arange(height, dtype=np.float32) - height / 2) / np.float32(focal))[:, None] * z
    return np.stack([x, y, z], axis=-1).reshape(-1, 3)


def points_in_view(depth: np.ndarray, fovy: float, view: View) -> tuple[np.ndarray, np.ndarray]:
    """Depth (H, W) -> the points (N, 3) inside the crop, and the indices (N,) of their pixels."""
    points = back_project(depth, fovy) @ view.rotation.T.astype(np.float32) + view.offset.astype(np.float32)
    inside = np.ones(len(points), dtype=bool)
    for axis in range(3):  # column by column: four times faster than comparing rows
        column = points[:, axis]
        inside &= (column > view.low[axis]) & (column < view.high[axis])
    kept = np.flatnonzero(inside)
    return points[kept], kept


def farthest_points(points: np.ndarray, count: int) -> np.ndarray:
    """Indices (count,) into points (N, 3), each the farthest from those before it; the first k are a sample of k.

    Fewer than `count` points are repeated, which does not change a max-pool over points. The start is deterministic.
    """
    if len(points) == 0:
        raise DataError(
            "the crop holds no point: the camera does not see the workspace. Is it the right task, and are depths in "
            "metres?"
        )
    if count < 1:
        raise ConfigError(f"a point cloud needs at least one point, not {count}")
    if len(points) <= count:
        return np.arange(count) % len(points)
    import fpsample

    chosen = fpsample.bucket_fps_kdline_sampling(
        np.ascontiguousarray(points, dtype=np.float32), count, h=BUCKET_HEIGHT, start_idx=0
    )
    return chosen.astype(np.int64)
