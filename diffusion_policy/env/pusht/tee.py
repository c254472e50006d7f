"""The T block as two rectangles in its frame, and the area that two T blocks share.

The two rectangles of a T only touch along an edge, so the shared area is the sum over the four pairs of rectangles. In
the frame of one T its rectangles are aligned with the axes, so each pair is a convex polygon cut by four axis-aligned
lines. This is exact, and several times faster than general polygon set operations.
"""

import math
from collections.abc import Sequence

Point = tuple[float, float]
Rect = tuple[float, float, float, float]

# (xmin, ymin, xmax, ymax), pixels
BAR = (-60.0, 0.0, 60.0, 30.0)
STEM = (-15.0, 30.0, 15.0, 120.0)
AREA = 120.0 * 30.0 + 30.0 * 90.0


def corners(rect: Rect) -> list[Point]:
    """The 4 corners of a rectangle, in upstream's order for the physics engine."""
    xmin, ymin, xmax, ymax = rect
    return [(xmin, ymin), (xmax, ymin), (xmax, ymax), (xmin, ymax)]


_CORNERS = (corners(BAR), corners(STEM))


def to_world(points: Sequence[Point], pose: Sequence[float]) -> list[Point]:
    """Transform [(x, y)] from the frame of `pose` = (x, y, angle) to the world."""
    x0, y0, angle = pose
    c, s = math.cos(angle), math.sin(angle)
    return [(x0 + c * x - s * y, y0 + s * x + c * y) for x, y in points]


def shared_area(pose_a: Sequence[float], pose_b: Sequence[float]) -> float:
    """Area of the intersection of two T blocks at poses (x, y, angle)."""
    ax, ay, a_angle = pose_a
    bx, by, b_angle = pose_b
    c, s = math.cos(a_angle), math.sin(a_angle)
    dx, dy = bx - ax, by - ay
    relative = (c * dx + s * dy, c * dy - s * dx, b_angle - a_angle)
    area = 0.0
    for points in _CORNERS:
        polygon = to_world(points, relative)
        for rect in (BAR, STEM):
            area += _area_inside(polygon, rect)
    return area


def _area_inside(polygon: list[Point], rect: Rect) -> float:
    """Area of the part of a convex polygon that lies inside an axis-aligned rectangle."""
    xmin, ymin, xmax, ymax = rect
    polygon = _cut(polygon, 0, xmin, 1.0)
    polygon = _cut(polygon, 0, xmax, -1.0)
    polygon = _cut(polygon, 1, ymin, 1.0)
    polygon = _cut(polygon, 1, ymax, -1.0)
    twice = 0.0
    if polygon:
        px, py = polygon[-1]
        for x, y in polygon:
            twice += px * y - x * py
            px, py = x, y
    return 0.5 * abs(twice)


def _cut(polygon: list[Point], axis: int, bound: float, sign: float) -> list[Point]:
    """The part of a convex polygon where sign * (coordinate - bound) >= 0."""
    heights = [sign * (point[axis] - bound) for point in polygon]
    if not heights or min(heights) >= 0.0:
        return polygon
    if max(heights) <= 0.0:
        return []
    kept: list[Point] = []
    before, h_before = polygon[-1], heights[-1]
    for point, h in zip(polygon, heights, strict=True):
        if (h_before < 0.0) != (h < 0.0):
            t = h_before / (h_before - h)
            kept.append((before[0] + t * (point[0] - before[0]), before[1] + t * (point[1] - before[1])))
        if h >= 0.0:
            kept.append(point)
        before, h_before = point, h
    return kept
