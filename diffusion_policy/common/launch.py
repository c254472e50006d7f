"""Which of several processes this is, from the variables that torchrun and accelerate launch set."""

from __future__ import annotations

import os


def world_size() -> int:
    """Number of processes, the ranks, that train together; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1


def rank() -> int:
    """Number of this process among them. Rank 0, the main one, alone logs, saves and evaluates."""
    return int(os.environ["RANK"]) if world_size() > 1 else 0
