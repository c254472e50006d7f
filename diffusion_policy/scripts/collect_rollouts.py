r"""Make PushT demonstrations from policies: roll checkpoints out on new seeds and keep the successful episodes.

    python -m diffusion_policy.scripts.collect_rollouts --checkpoint A.ckpt --checkpoint B.ckpt \
        --episodes 200 --output data/demos/x.zarr

The result is a replay buffer like the public human one (data/state, data/keypoint, data/action; meta/episode_ends). Its
attributes record that it holds policy rollouts, the policies, the seeds, and the number of attempts.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections import deque
from typing import Any

import numpy as np
import torch
import zarr
from omegaconf import OmegaConf
from tqdm import tqdm

from diffusion_policy.common.config_util import resolve_device
from diffusion_policy.common.errors import ConfigError, UserError
from diffusion_policy.common.random_state import seed_everything
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.env.pusht.pusht_env import WINDOW
from diffusion_policy.env.pusht.pusht_keypoints_env import PushTKeypointsEnv
from diffusion_policy.policy.loading import policy_of
from diffusion_policy.storage import checkpoint_io

FIRST_SEED = 1_000_000  # human demonstrations have 0 to 205; evaluations start from 100000, 200000 and 300000
STILL_STEPS = 16  # in which the agent must move, for a demonstration that does not teach to stand still


class Episode:
    """One attempt: the environment, its recorded steps, and the last observations for the policy."""

    def __init__(self, seed: int, policy: Any):
        self.seed, self.policy = seed, policy
        self.env = PushTKeypointsEnv()
        self.record: dict[str, list[np.ndarray]] = {"state": [], "keypoint": [], "action": []}
        self.done = self.success = False
        self._observe(*self.env.reset(seed=seed))
        self.history = deque([self.observation] * policy.n_obs_steps, maxlen=policy.n_obs_steps)
        self.random = np.random.default_rng(seed)

    def _observe(self, obs: np.ndarray, info: dict[str, Any]) -> None:
        self.keypoint, agent = np.round(32 * obs[:18].reshape(9, 2)) / 32, obs[18:20]  # they compress to half the size
        x, y, angle = info["block_pose"]
        self.state = np.array([*agent, x, y, angle % (2 * np.pi)])
        self.observation = self.state if self.policy.obs_dim == 5 else obs[:20]

    def act(self, actions: np.ndarray, max_steps: int, noise: float = 0.0) -> None:
        """Execute actions (Ta, 2), moved together by noise; record each with the state before it."""
        for action in np.clip(actions + noise * self.random.standard_normal((1, 2)), 0, WINDOW):
            for key, value in (("state", self.state), ("keypoint", self.keypoint), ("action", action)):
                self.record[key].append(value.astype(np.float32))
            obs, _, self.success, _, info = self.env.step(action)
            self._observe(obs, info)
            self.history.append(self.observation)
            self.done = self.success or len(self.record["action"]) >= max_steps
            if self.done:
                return

    def least_motion(self) -> float:
        """The smallest extent in pixels of the agent's path over STILL_STEPS steps; infinite for shorter episodes."""
        path = np.stack(self.record["state"])[:, :2]
        if len(path) < STILL_STEPS:
            return float("inf")
        windows = np.lib.stride_tricks.sliding_window_view(path, STILL_STEPS, axis=0)
        return float(np.ptp(windows, axis=-1).max(axis=1).min())


@torch.no_grad()
def collect(
    policies: list[Any],
    n_episodes: int,
    first_seed: int,
    max_steps: int,
    device: torch.device,
    parallel: int = 50,
    noise: float = 0.0,
    min_motion: float = 0.0,
) -> tuple[list[Episode], int]:
    """The first n_episodes successful episodes, by seed, and the number of attempts. Policies take turns."""
    successes: list[Episode] = []
    attempts = 0
    with tqdm(total=n_episodes, desc="demonstrations", unit="episode", disable=None) as bar:
        while len(successes) < n_episodes:
            episodes = [
                Episode(first_seed + attempts + i, policies[(attempts + i) % len(policies)]) for i in range(parallel)
            ]
            while any(not episode.done for episode in episodes):
                for policy in policies:
                    active = [episode for episode in episodes if episode.policy is policy and not episode.done]
                    if not active:
                        continue
                    history = np.stack([np.stack(episode.history) for episode in active])
                    obs = torch.from_numpy(history).float().to(device)
                    predicted = policy.predict_action({"obs": obs})["action"].cpu().numpy()
                    for episode, actions in zip(active, predicted, strict=True):
                        episode.act(actions, max_steps, noise)
            attempts += parallel
            successes += [episode for episode in episodes if episode.success and episode.least_motion() >= min_motion]
            bar.update(min(len(successes), n_episodes) - bar.n)
            if attempts >= 20 * n_episodes and not successes:
                raise ConfigError(f"none of {attempts} attempts succeeded in motion: train the policies longer")
    return successes[:n_episodes], attempts


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make PushT demonstrations from policies.")
    parser.add_argument(
        "-c",
        "--checkpoint",
        action="append",
        required=True,
        help="a checkpoint of a PushT policy; repeat for several",
    )
    parser.add_argument("-o", "--output", required=True, help="the zarr folder to write")
    parser.add_argument("-n", "--episodes", type=int, default=200, help="successful episodes to keep (default 200)")
    parser.add_argument(
        "--first_seed", type=int, default=FIRST_SEED, help=f"seed of the first attempt (default {FIRST_SEED})"
    )
    parser.add_argument(
        "--max_steps", type=int, default=300, help="steps after which an attempt has failed (default 300)"
    )
    parser.add_argument(
        "--act_noise",
        type=float,
        default=0.0,
        help="standard deviation in pixels of noise on each executed chunk, for variety (default 0)",
    )
    parser.add_argument(
        "--min_motion",
        type=float,
        default=16.0,
        help=f"pixels that the agent must move within any {STILL_STEPS} steps of an episode to keep it (default 16, as "
        "people do)",
    )
    parser.add_argument(
        "--trained_on",
        default="the public human PushT demonstrations",
        help="training data of the policies, recorded in the attributes",
    )
    parser.add_argument("-d", "--device", default="auto")
    options = parser.parse_args(arguments)
    try:
        write(options)
    except (UserError, ValueError) as error:
        sys.exit(f"error: {error}")


def write(options: argparse.Namespace) -> None:
    output = pathlib.Path(options.output)
    if output.exists():
        raise ConfigError(f"{output} exists already; choose another --output")
    device = resolve_device(options.device)
    policies, descriptions = [], []
    for path in options.checkpoint:
        payload = checkpoint_io.load(path, sections=("policy",))
        cfg = OmegaConf.create(payload["cfg"])
        policy = policy_of(payload, device)
        if policy.obs_dim not in (5, 20):
            raise ConfigError(f"{path} observes {policy.obs_dim} numbers; PushT's state has 5, keypoints with agent 20")
        policies.append(policy)
        descriptions.append(
            {
                "config": cfg.name,
                "policy": cfg.policy._target_,
                "seed": cfg.training.seed,
                "steps": payload["attributes"]["global_step"],
            }
        )
    seed_everything(0)
    episodes, attempts = collect(
        policies,
        options.episodes,
        options.first_seed,
        options.max_steps,
        device,
        noise=options.act_noise,
        min_motion=options.min_motion,
    )
    buffer = ReplayBuffer.create_empty_numpy()
    for episode in episodes:
        buffer.add_episode({key: np.stack(values) for key, values in episode.record.items()})
    buffer.save_to_path(str(output), chunks={key: buffer[key].shape for key in buffer.keys()}, compressors="disk")
    zarr.open_group(str(output), mode="r+").attrs.update(
        {
            "description": "Successful PushT episodes of trained policies (rollouts), not human demonstrations.",
            "policies": descriptions,
            "policies_trained_on": options.trained_on,
            "episode_seeds": [episode.seed for episode in episodes],
            "attempts": attempts,
            "max_steps": options.max_steps,
            "act_noise": options.act_noise,
            "min_motion": options.min_motion,
            "versions": checkpoint_io.versions(),
        }
    )
    print(f"{len(episodes)} successful episodes of {attempts} attempts, {buffer.n_steps} steps, in {output}")


if __name__ == "__main__":
    main()
