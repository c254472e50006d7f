"""Off-screen drawing of PushT scenes; pygame surfaces need neither a display nor `pygame.init`."""

import itertools
import os
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")

import cv2
import numpy as np
import pygame
import pymunk

from diffusion_policy.env.pusht import tee
from diffusion_policy.env.pusht.pusht_env import WINDOW

WHITE = (255, 255, 255)
GOAL = (144, 238, 144)
OUTLINE_RADIUS = 2


class Renderer(pymunk.SpaceDebugDrawOptions):
    """Draws the physics world at 512 x 512, the size of the published images before they were scaled down.

    The engine calls the draw methods below for the shapes and for the contact points, which are visible in the
    published images as red dashes.
    """

    def __init__(self) -> None:
        super().__init__()
        # Red first in memory: the buffer is an RGBX image without a copy.
        self.surface = pygame.Surface((WINDOW, WINDOW), depth=32, masks=(0xFF, 0xFF00, 0xFF0000, 0))
        buffer: Any = self.surface.get_buffer()
        self._pixels = np.frombuffer(buffer, np.uint8).reshape(WINDOW, WINDOW, 4)

    def draw(self, space: pymunk.Space, goal_pose: Sequence[float], size: int) -> np.ndarray:
        """Draw a frame (size, size, 3) uint8."""
        self.surface.fill(WHITE)
        for rect in (tee.BAR, tee.STEM):
            goal = tee.to_world(tee.corners(rect), goal_pose)
            pygame.draw.polygon(self.surface, GOAL, [_pixel(p) for p in goal])
        space.debug_draw(self)
        return np.ascontiguousarray(cv2.resize(self._pixels, (size, size))[..., :3])

    def draw_circle(self, pos: Any, angle: float, radius: float, outline_color: Any, fill_color: Any) -> None:
        centre = _pixel(pos)
        pygame.draw.circle(self.surface, _rgb(fill_color), centre, round(radius))
        pygame.draw.circle(self.surface, _lighter(fill_color), centre, round(radius - 4))

    def draw_segment(self, a: Any, b: Any, color: Any) -> None:
        pygame.draw.aalines(self.surface, _rgb(color), False, [_pixel(a), _pixel(b)])

    def draw_fat_segment(self, a: Any, b: Any, radius: float, outline_color: Any, fill_color: Any) -> None:
        """Draw a line with round ends.

        The offsets are absolute values, which distorts the band in some directions, as in the published images.
        """
        color = _rgb(fill_color)
        (ax, ay), (bx, by) = _pixel(a), _pixel(b)
        pygame.draw.lines(self.surface, color, False, [(ax, ay), (bx, by)], round(2 * radius))
        dx, dy = abs(bx - ax), abs(by - ay)
        if dx == 0 and dy == 0:
            return
        scale = radius / (dx * dx + dy * dy) ** 0.5
        ox, oy = round(dy * scale), round(dx * scale)
        pygame.draw.polygon(
            self.surface, color, [(ax - ox, ay - oy), (ax + ox, ay + oy), (bx + ox, by + oy), (bx - ox, by - oy)]
        )
        pygame.draw.circle(self.surface, color, (ax, ay), round(radius))
        pygame.draw.circle(self.surface, color, (bx, by), round(radius))

    def draw_polygon(self, verts: Any, radius: float, outline_color: Any, fill_color: Any) -> None:
        pygame.draw.polygon(self.surface, _lighter(fill_color), [_pixel(v) for v in verts])
        for a, b in zip(verts, [*verts[1:], verts[0]], strict=True):
            self.draw_fat_segment(a, b, OUTLINE_RADIUS, outline_color, fill_color)

    def draw_dot(self, size: float, pos: Any, color: Any) -> None:
        pygame.draw.circle(self.surface, _rgb(color), _pixel(pos), round(size))

    @staticmethod
    def mark_action(frame: np.ndarray, action: np.ndarray) -> None:
        """Draw a red cross at `action` (2,) pixels of the window onto `frame`, in place."""
        size = frame.shape[0]
        x, y = (int(float(v) / WINDOW * size) for v in action)
        cv2.drawMarker(
            frame,
            (x, y),
            (255, 0, 0),
            markerType=cv2.MARKER_CROSS,
            markerSize=int(8 / 96 * size),
            thickness=max(1, int(1 / 96 * size)),
        )

    @staticmethod
    def mark_path(frame: np.ndarray, positions: np.ndarray) -> None:
        """Draw a chunk of target positions (H, 2), from light (first) to dark (last), onto `frame`, in place."""
        points = [(int(x), int(y)) for x, y in np.clip(positions, -WINDOW, 2 * WINDOW) / WINDOW * frame.shape[0]]
        for i, (a, b) in enumerate(itertools.pairwise(points)):
            color = (255, int(200 - 160 * i / len(points)), 0)
            cv2.line(frame, a, b, color, 2, cv2.LINE_AA)
            cv2.circle(frame, b, 3, color, -1, cv2.LINE_AA)

    @staticmethod
    def mark_keypoints(frame: np.ndarray, keypoints: np.ndarray, color: Sequence[int]) -> None:
        """Draw dots at `keypoints` (K, 2) pixels of the window onto `frame`, in place."""
        size = frame.shape[0]
        for x, y in keypoints / WINDOW * size:
            cv2.circle(frame, (int(x), int(y)), max(1, size // 96), color, -1)


def _pixel(point: Any) -> tuple[int, int]:
    return round(point[0]), round(point[1])


def _rgb(color: Any) -> tuple[int, int, int]:
    return round(color.r), round(color.g), round(color.b)


def _lighter(color: Any) -> tuple[int, ...]:
    return tuple(round(min(1.2 * c, 255)) for c in (color.r, color.g, color.b))
