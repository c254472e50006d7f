"""Add a task: an environment, a dataset, a runner and a task file; then train and evaluate.

    python examples/your_own_task.py

It records demonstrations and then runs the commands that you would type, which it prints. The task file is
examples/config/task/reach.yaml; `--config-dir` makes it known to `train.py`.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.dataset.base_dataset import BaseLowdimDataset, WindowedDataset, check_steps
from diffusion_policy.env_runner.base_lowdim_runner import BaseLowdimRunner
from diffusion_policy.env_runner.rollout import RolloutRunner

ROOT = pathlib.Path(__file__).resolve().parents[1]


class ReachEnv(gym.Env):
    """A point in the plane; the reward is 1 within 0.05 of the goal and falls with the distance.

    A runner needs two things beyond gymnasium's interface: `control_hz`, and `render` that returns an RGB image.
    """

    control_hz = 10
    metadata = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"
    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,))
    action_space = gym.spaces.Box(-0.2, 0.2, (2,))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.position, self.goal = self.np_random.uniform(-1, 1, (2, 2))
        return self._obs(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.position = self.position + np.clip(action, -0.2, 0.2)
        distance = np.linalg.norm(self.goal - self.position)
        return self._obs(), float(np.exp(-max(0.0, distance - 0.05))), bool(distance < 0.05), False, {}

    def render(self) -> np.ndarray:
        image = np.full((96, 96, 3), 255, dtype=np.uint8)
        for point, color in ((self.goal, (60, 160, 60)), (self.position, (40, 90, 200))):
            x, y = np.clip((point + 1.2) / 2.4 * 96, 4, 91).astype(int)
            image[y - 3 : y + 4, x - 3 : x + 4] = color
        return image

    def _obs(self) -> np.ndarray:
        return np.concatenate([self.position, self.goal]).astype(np.float32)


class ReachDataset(WindowedDataset, BaseLowdimDataset):
    """obs (T, 4): position and goal; action (T, 2)."""

    def __init__(self, zarr_path: str, **windows: Any):
        super().__init__(ReplayBuffer.copy_from_path(zarr_path, keys=["obs", "action"]), **windows)

    def _make_steps(self, replay_buffer: ReplayBuffer) -> dict[str, torch.Tensor]:
        check_steps(replay_buffer, {"obs": (4,), "action": (2,)})
        return {key: torch.from_numpy(replay_buffer[key]).float() for key in ("obs", "action")}


class ReachRunner(RolloutRunner, BaseLowdimRunner):
    """Roll the policy out from seeded starts; an episode's score is its best reward."""

    def __init__(self, output_dir: str, **rollouts: Any):
        super().__init__(output_dir, ReachEnv, {}, **rollouts)

    def policy_input(self, obs: np.ndarray) -> dict[str, np.ndarray]:
        """Stacked observations (N, To, 4) as the policy expects them."""
        return {"obs": obs[:, : self.n_obs_steps].astype(np.float32)}


def record_demonstrations(path: pathlib.Path, count: int = 50) -> None:
    """Play a simple expert and write a replay buffer."""
    buffer, env = ReplayBuffer.create_empty_numpy(), ReachEnv()
    for seed in range(count):
        steps: dict[str, list] = {"obs": [], "action": []}
        obs, _ = env.reset(seed=seed)
        done = False
        while not done:
            action = np.clip(obs[2:] - obs[:2], -0.15, 0.15)
            steps["obs"].append(obs)
            steps["action"].append(action)
            obs, _, done, _, _ = env.step(action)
        buffer.add_episode({key: np.array(values, dtype=np.float32) for key, values in steps.items()})
    buffer.save_to_path(str(path))


def command(*arguments: str) -> None:
    print("python", " ".join(arguments), flush=True)
    # A checkpoint may name classes of known packages only: this variable adds yours for eval.py.
    env = {**os.environ, "DIFFUSION_POLICY_ALLOWED_PACKAGES": "examples"}
    subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, check=True)


def main(folder: str) -> float:
    data, run = pathlib.Path(folder) / "reach.zarr", pathlib.Path(folder) / "run"
    record_demonstrations(data)
    command(
        "train.py",
        "--config-name=train_idp_mlp_lowdim",
        "--config-dir=examples/config",
        "task=reach",
        "preset=cpu",
        "horizon=8",
        "n_action_steps=4",
        "size.mlp.n_emb=64",
        "size.mlp.batch_size=64",
        "training.steps_per_epoch=300",
        "training.num_epochs=2",
        f"task.dataset.zarr_path={data}",
        f"hydra.run.dir={run}",
    )
    command("eval.py", f"--checkpoint={run}/checkpoints/latest.ckpt", f"--output_dir={run}/eval")
    score = json.loads((run / "eval/eval_log.json").read_text())["test/mean_score"]
    print(f"mean score {score:.3f}; standing still scores about 0.4")
    return score


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
