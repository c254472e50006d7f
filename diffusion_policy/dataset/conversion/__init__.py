"""Recordings of any format, written as a replay buffer or as a LeRobotDataset v3. Numbers keep their exact values."""

from diffusion_policy.dataset.conversion.lerobot import to_lerobot
from diffusion_policy.dataset.conversion.replay_buffer import to_zarr

__all__ = ["to_lerobot", "to_zarr"]
