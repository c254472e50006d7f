"""Run a trained policy on a robot: a control loop at the rate of the recording.

    python examples/your_own_robot.py data/outputs/DATE/TIME_NAME
    python examples/your_own_robot.py                       # records and trains something small first, in seconds

Replace `ReplayedRobot` by your robot. Everything else stays.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
import time
from collections import deque
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from diffusion_policy import load_policy
from diffusion_policy.dataset.recordings import open_recordings

ROOT = pathlib.Path(__file__).resolve().parents[1]


class ReplayedRobot:
    """REPLACE THIS by your robot: it answers with the observations of a recorded episode and only notes the actions."""

    def __init__(self, task: Any):
        arrays = open_recordings(task.path).episode(0)
        self.observations = np.concatenate([arrays[key] for key in task.obs_keys], axis=1)
        self.recorded, self.executed = arrays[task.action_key], []

    def observe(self) -> dict[str, np.ndarray]:
        """The observation now, in the units of the recording.

        A policy with cameras takes the entries of task.shape_meta instead: arrays, and images as uint8 (3, H, W) of the
        size there.
        """
        return {"obs": self.observations[min(len(self.executed), len(self.observations) - 1)]}

    def act(self, action: np.ndarray) -> None:
        """Start to execute an action, in the units of the recording."""
        self.executed.append(action)


def predict(policy: Any, history: deque) -> np.ndarray:
    """(n_action_steps, action_dim) from the last observations; before there are enough, the first one is repeated."""
    steps = [history[0]] * (policy.n_obs_steps - len(history)) + list(history)
    obs = {key: torch.from_numpy(np.stack([step[key] for step in steps]))[None] for key in steps[0]}
    result = policy.predict_action({key: value.to(policy.device) for key, value in obs.items()})
    return result["action"][0].cpu().numpy()


def control(policy: Any, robot: Any, fps: float, steps: int) -> int:
    """Control the robot for so many steps; returns how many came late.

    The robot is observed at every step, also while a chunk is executed: the network learned from observations that are
    one step apart. It waits while the policy computes; docs/deployment.md has a runtime that computes meanwhile.
    """
    history: deque = deque(maxlen=policy.n_obs_steps)
    plan: deque = deque()
    late, due = 0, time.monotonic()
    for _ in range(steps):
        history.append(robot.observe())
        if not plan:
            plan.extend(predict(policy, history))
        robot.act(plan.popleft())
        due += 1 / fps
        rest = due - time.monotonic()
        if rest < 0:  # do not hurry to catch up
            late, due = late + 1, time.monotonic()
        time.sleep(max(0.0, rest))
    return late


def record_and_train(folder: pathlib.Path) -> pathlib.Path:
    """A small recording and a run on it; returns the run folder."""
    (folder / "recording").mkdir()
    rng = np.random.default_rng(0)
    for number in range(40):
        goal = rng.uniform(-1, 1, 3)
        path = goal * (1 - np.cos(np.linspace(0, np.pi, 61)))[:, None] / 2
        state = np.concatenate([path, np.broadcast_to(goal, path.shape)], axis=1).astype(np.float32)
        np.savez(folder / f"recording/{number}.npz", state=state[:-1], action=state[1:, :3], fps=30)
    command = [sys.executable, str(ROOT / "train.py"), "--config-name=train_idp_mlp_lowdim", "preset=cpu"]
    command += ["task=my_data", f"task.path={folder / 'recording'}", f"hydra.run.dir={folder / 'run'}"]
    command += [
        "training.num_epochs=1",
        "training.steps_per_epoch=300",
        "size.mlp.batch_size=64",
        "training.use_ema=false",
    ]
    subprocess.run(command, check=True)
    return folder / "run"


def main(run: pathlib.Path) -> float:
    policy = load_policy(run)
    task = OmegaConf.load(run / "config.yaml").task
    robot = ReplayedRobot(task)
    steps = min(60, len(robot.recorded))
    late = control(policy, robot, task.fps or 30, steps)
    error = float(np.abs(np.array(robot.executed) - robot.recorded[:steps]).mean())
    print(f"{steps} actions at {task.fps or 30:g} Hz, {late} late; mean distance to the recorded ones {error:.3g}")
    return error


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(pathlib.Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(record_and_train(pathlib.Path(temporary)))
