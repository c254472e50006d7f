"""Upstream's import path of gymnasium's SyncVectorEnv."""

from gymnasium.vector import SyncVectorEnv

__all__ = ["SyncVectorEnv"]
