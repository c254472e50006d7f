"""Recordings of robots in the common formats, read one episode at a time.

from diffusion_policy.dataset.recordings import open_recordings

recordings = open_recordings("path")
numbers = recordings.episode(0)                 # {"action": (T, A), ...}
for frame in recordings.frames(0, "camera"):    # uint8 (H, W, 3)
    ...
"""

from diffusion_policy.dataset.recordings.base import Recordings
from diffusion_policy.dataset.recordings.layout import Camera, Feature
from diffusion_policy.dataset.recordings.opening import KINDS, open_recordings

__all__ = ["KINDS", "Camera", "Feature", "Recordings", "open_recordings"]
