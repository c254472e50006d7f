"""Upstream's import path of gymnasium's AsyncVectorEnv."""

from gymnasium.vector import AsyncVectorEnv

__all__ = ["AsyncVectorEnv"]
