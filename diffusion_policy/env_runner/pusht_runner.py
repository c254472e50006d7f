"""Rollouts on PushT, shared by the state, keypoint and image runners."""

from collections.abc import Callable
from typing import Any

from diffusion_policy.env_runner.rollout import RolloutRunner


class PushTRunner(RolloutRunner):
    """Base class of the PushT runners.

    A PushT step is cheaper than sending its result to another process, so vector='sync' is faster.

    Args:
        legacy_test: place the block in every episode, train episodes included, as for published scores. See `PushTEnv`.
        rollouts: see `RolloutRunner`.
    """

    title = "PushT rollouts"
    draws_chunk = True

    def __init__(
        self,
        output_dir: str,
        env_cls: Callable[..., Any],
        env_kwargs: dict[str, Any],
        legacy_test: bool = False,
        **rollouts: Any,
    ):
        super().__init__(output_dir, env_cls, dict(env_kwargs, legacy=legacy_test), **rollouts)
