"""Rollouts in Franka Kitchen."""

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from diffusion_policy.common.errors import DataError
from diffusion_policy.dataset.kitchen_lowdim_dataset import load_array
from diffusion_policy.env.kitchen.kitchen_lowdim_env import TASKS, KitchenLowdimEnv, require_kitchen
from diffusion_policy.env_runner.base_lowdim_runner import BaseLowdimRunner
from diffusion_policy.env_runner.rollout import RolloutRunner


class KitchenLowdimRunner(RolloutRunner, BaseLowdimRunner):
    """The policy gets 'obs' (N, To, 60) float32; the score of an episode is the share of the seven tasks it solved.

    '<split>/p_<n>' is the share of episodes that solved at least n tasks, as upstream reports.

    Args:
        dataset_dir: its all_init_qpos.npy and all_init_qvel.npy hold the starts of train episodes.
        abs_action, robot_noise_ratio, render_hw: see `KitchenLowdimEnv`.
        n_envs: environments in parallel, by default one per core.
        rollouts: see `RolloutRunner`.
    """

    title = "kitchen rollouts"

    def __init__(
        self,
        output_dir: str,
        dataset_dir: str | os.PathLike,
        abs_action: bool = False,
        robot_noise_ratio: float = 0.1,
        render_hw: Sequence[int] = (240, 360),
        n_train: int = 10,
        train_start_seed: int = 0,
        max_steps: int = 280,
        n_obs_steps: int = 2,
        fps: float = 12.5,
        n_envs: int | None = None,
        vector: str = "async",
        **rollouts: Any,
    ):
        require_kitchen()
        self.train_start_seed = train_start_seed
        self.starts = read_starts(pathlib.Path(dataset_dir)) if n_train else []
        super().__init__(
            output_dir,
            KitchenLowdimEnv,
            {"abs_action": abs_action, "robot_noise_ratio": robot_noise_ratio, "render_hw": tuple(render_hw)},
            n_train=n_train,
            train_start_seed=train_start_seed,
            max_steps=max_steps,
            n_obs_steps=n_obs_steps,
            fps=fps,  # type: ignore[arg-type]  # upstream's 12.5
            n_envs=n_envs or os.cpu_count(),
            vector=vector,
            **rollouts,
        )

    def policy_input(self, obs: np.ndarray) -> dict[str, np.ndarray]:
        return {"obs": obs[:, : self.n_obs_steps].astype(np.float32)}

    def start_options(self, split: str, seed: int) -> dict[str, Any] | None:
        number = seed - self.train_start_seed
        return self.starts[number] if split == "train" and number < len(self.starts) else None

    @classmethod
    def summary(cls, episodes: list[dict[str, Any]], lost: list[dict[str, Any]]) -> dict[str, Any]:
        out = super().summary(episodes, lost)
        for split in sorted({episode["split"] for episode in episodes}):
            solved = np.array([round(e["max_reward"] * TASKS) for e in episodes if e["split"] == split])
            out |= {f"{split}/p_{n}": float(np.mean(solved >= n)) for n in range(1, TASKS + 1)}
        return out


def read_starts(folder: pathlib.Path) -> list[dict[str, np.ndarray]]:
    """The states in which the demonstrations start."""
    qpos, qvel = load_array(folder / "all_init_qpos.npy"), load_array(folder / "all_init_qvel.npy")
    if qpos.shape[1:] != (30,) or qvel.shape != (len(qpos), 29):
        raise DataError(
            f"{folder}: the starts must have 30 positions and 29 velocities, not {qpos.shape}, {qvel.shape}."
        )
    return [{"qpos": p, "qvel": v} for p, v in zip(qpos.astype(np.float64), qvel.astype(np.float64), strict=True)]
