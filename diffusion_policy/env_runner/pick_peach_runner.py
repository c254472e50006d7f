"""Rollouts on Pick Peach, from joint positions or with images."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from diffusion_policy.env.pick_peach.pick_peach_env import FAILURES, PLACEMENTS, STARTS, PickPeachEnv
from diffusion_policy.env_runner.base_lowdim_runner import BaseLowdimRunner
from diffusion_policy.env_runner.rollout import RolloutRunner


class PickPeachRunner(RolloutRunner, BaseLowdimRunner):
    """The policy gets 'obs' (N, To, 7) float32; with cameras 'qpos' (N, To, 7) and images (N, To, 3, H, W) in [0, 1].

    The score of an episode is 1 if the peach was grasped, lifted and put on the plate. Also logged, as shares of all
    episodes: '<split>/placement/left', 'right' and 'middle', where the peach came to rest on the plate, and
    '<split>/failure/<class>'. '<split>/success/left_start' and 'right_start' are the success rates by the peach's
    first place, of which seeds have one and the other in turn.

    Latency is that of a robot that acts while it waits for its policy: with n_latency_steps, each chunk starts that
    many steps late, its first actions are dropped, and the next call begins when the last has been answered. So at
    least n_latency_steps actions are executed of each chunk; if it has too few, the robot holds the last one.

    Args:
        cameras: the images that the policy sees: 'front', 'head'.
        image_size: their height and width.
        stop_on_success: end an episode when it is solved; its score cannot change after that.
        rollouts: see `RolloutRunner`.
    """

    title = "Pick Peach rollouts"

    def __init__(
        self,
        output_dir: str,
        cameras: Sequence[str] = (),
        image_size: int = 96,
        stop_on_success: bool = True,
        max_steps: int = 600,
        **rollouts: Any,
    ):
        kwargs: dict[str, Any] = {
            "cameras": tuple(cameras),
            "image_size": image_size,
            "terminate_on_success": stop_on_success,
        }
        PickPeachEnv(**kwargs)  # fail here rather than in the process of an environment
        super().__init__(output_dir, PickPeachEnv, kwargs, max_steps=max_steps, **rollouts)

    def policy_input(self, obs: Any) -> dict[str, np.ndarray]:
        if not isinstance(obs, dict):
            return {"obs": obs[:, : self.n_obs_steps]}
        seen = {key: value[:, : self.n_obs_steps] for key, value in obs.items()}
        return {
            key: np.moveaxis(value, -1, 2).astype(np.float32) / 255 if value.dtype == np.uint8 else value
            for key, value in seen.items()
        }

    def executed(self, action: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        if not self.n_latency_steps:
            return action
        steps = max(self.n_action_steps, self.n_latency_steps)
        late = chunk[:, self.n_latency_steps :][:, :steps]
        return np.concatenate([late, np.repeat(chunk[:, -1:], steps - late.shape[1], axis=1)], axis=1)

    @classmethod
    def summary(cls, episodes: list[dict[str, Any]], lost: list[dict[str, Any]]) -> dict[str, Any]:
        out = super().summary(episodes, lost)
        for split in [key.removesuffix("/mean_score") for key in out if key.endswith("/mean_score")]:
            of_split = [episode for episode in episodes if episode["split"] == split]
            shares = {f"placement/{side}": [e["placement"] == side for e in of_split] for side in PLACEMENTS}
            shares |= {f"failure/{name}": [e["failure"] == name for e in of_split] for name in FAILURES}
            for start in STARTS:
                shares[f"success/{start}_start"] = [e["max_reward"] for e in of_split if e["start"] == start]
            out |= {f"{split}/{name}": float(np.mean(values)) for name, values in shares.items() if values}
        return out
