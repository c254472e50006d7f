"""Rollouts on PushT, shared by the state, keypoint and image runners."""

from diffusion_policy.env_runner.rollout import RolloutRunner


class PushTRunner(RolloutRunner):
    """legacy_test: place the block of every episode, train ones included, the way published scores
    did (see `PushTEnv`). Other arguments: see `RolloutRunner`. A PushT step is cheaper than sending
    its result to another process, so vector='sync' is the faster one."""

    title = "PushT rollouts"

    def __init__(self, output_dir, env_cls, env_kwargs, legacy_test=False, **rollouts):
        super().__init__(output_dir, env_cls, dict(env_kwargs, legacy=legacy_test), **rollouts)
