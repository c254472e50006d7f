"""Rollouts on robomimic's tasks, shared by the low-dimensional and the image runner."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from diffusion_policy.common.arm_actions import ARM_DIM, decode_rotations
from diffusion_policy.common.errors import ConfigError, DataError
from diffusion_policy.env.robomimic.robosuite_task import RobosuiteTask, check_env_args, import_robosuite
from diffusion_policy.env.robomimic.starts import recorded_start
from diffusion_policy.env_runner.rollout import RolloutRunner
from diffusion_policy.model.common.rotation_transformer import RotationTransformer
from diffusion_policy.storage.hdf5_reader import read_demos

ROTATION_6D_DIM = 10  # numbers of an arm's action with rotation_6d


class RobomimicRunner(RolloutRunner):
    """The score of an episode is 1 if the task was solved at any step, else 0.

    Train episode i starts where demonstration train_start_idx + i of the dataset does. Test episodes start in the
    simulator states recorded in env/robomimic/starts (50 from seed 100000); for other seeds the start is drawn.

    Args:
        dataset_path: a dataset whose env_args describe the environment.
        abs_action: the policy predicts absolute poses, with rotations as rotation_6d.
        n_envs: environments in parallel, by default one per core; each keeps its model for all its episodes.
        stop_on_success: end an episode when it is solved; its score cannot change after that. False runs all max_steps,
            as upstream does.
        rollouts: see `RolloutRunner`.
    """

    def __init__(
        self,
        output_dir: str,
        dataset_path: str | os.PathLike,
        wrapper: Callable[..., Any],
        wrapper_kwargs: dict[str, Any],
        render_offscreen: bool,
        abs_action: bool = False,
        train_start_idx: int = 0,
        n_train: int = 10,
        n_envs: int | None = None,
        stop_on_success: bool = True,
        vector: str = "async",
        n_latency_steps: int | str = 0,
        max_steps: int = 400,
        n_obs_steps: int = 2,
        **rollouts: Any,
    ):
        import_robosuite()  # fail here rather than in the process of an environment
        demos = read_demos(dataset_path, ["actions", "states"] if n_train else ["actions"])
        env_args = check_env_args(demos.env_args)
        self.env_name = env_args["env_name"]
        self.title = f"{self.env_name} rollouts"
        self.first_states = {}
        if n_train:
            starts = np.concatenate([[0], demos.episode_ends[:-1]])
            if train_start_idx + n_train > len(starts):
                raise ConfigError(
                    f"{dataset_path} has {len(starts)} demonstrations, too few for n_train={n_train} from "
                    f"train_start_idx={train_start_idx}."
                )
            self.first_states = {
                i: demos.arrays["states"][starts[i]] for i in range(train_start_idx, train_start_idx + n_train)
            }
        width = demos.arrays["actions"].shape[1]
        if width % ARM_DIM:
            raise DataError(f"{dataset_path}: its actions have {width} numbers, not {ARM_DIM} per arm.")
        self.n_arms = width // ARM_DIM
        self.rotation_transformer = RotationTransformer("axis_angle", "rotation_6d") if abs_action else None
        env_kwargs = {
            "env_args": env_args,
            "abs_action": abs_action,
            "render_offscreen": render_offscreen,
            "wrapper": wrapper,
            "wrapper_kwargs": dict(wrapper_kwargs, terminate_on_success=stop_on_success),
        }
        super().__init__(
            output_dir,
            make_env,
            env_kwargs,
            n_train=n_train,
            train_start_seed=train_start_idx,
            n_envs=n_envs or os.cpu_count(),
            vector=vector,
            n_latency_steps=n_latency_steps,
            max_steps=max_steps,
            n_obs_steps=n_obs_steps,
            **rollouts,
        )
        self.control_hz = env_args.get("env_kwargs", {}).get("control_freq")

    def start_options(self, split: str, seed: int) -> dict[str, Any] | None:
        state = self.first_states[seed] if split == "train" else recorded_start(self.env_name, seed)
        return None if state is None else {"state": state}

    def env_action(self, action: np.ndarray) -> np.ndarray:
        """(N, Ta, Da) -> (N, Ta, 7 per arm)."""
        each = ROTATION_6D_DIM if self.rotation_transformer is not None else ARM_DIM
        if action.shape[-1] != each * self.n_arms:
            raise ConfigError(
                f"the policy's actions have {action.shape[-1]} numbers; {self.env_name} takes {each} for each of "
                f"{self.n_arms} arm(s) with abs_action={self.rotation_transformer is not None}."
            )
        if self.rotation_transformer is None:
            return action
        return decode_rotations(action, self.rotation_transformer, self.n_arms)


def make_env(
    env_args: dict[str, Any],
    abs_action: bool,
    render_offscreen: bool,
    wrapper: Callable[..., Any],
    wrapper_kwargs: dict[str, Any],
) -> Any:
    """Build the environment of a slot."""
    return wrapper(RobosuiteTask(env_args, abs_action, render_offscreen), **wrapper_kwargs)
