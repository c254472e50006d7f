"""Demonstrations of Franka Kitchen as logs of the MuJoCo program that recorded them."""

import os
import pathlib

import numpy as np
from tqdm import tqdm

from diffusion_policy.common.errors import ConfigError, DataError, DataNotFoundError
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.dataset.kitchen_lowdim_dataset import KitchenDataset, require_kitchen_data

STEP = 40  # simulation steps of an action
GOAL = 30  # zeros: upstream's policies get no goal
#: Noise of the recorded robot's sensors (0..8) and of the objects (9..29).
NOISE = np.array([0.1] * 9 + [0.005] * 2 + [0.0005] * 6 + [0.005] * 3 + [0.1] * 3 + [0.005] * 3 + [0.1] * 3 + [0.005])


class KitchenMjlLowdimDataset(KitchenDataset):
    """Reads */*.mjl below a folder; the actions are joint positions.

    Args:
        robot_noise_ratio: scale of the noise that is added to obs, once, as in the simulator.
    """

    def __init__(
        self,
        dataset_dir: str | os.PathLike,
        horizon: int = 1,
        pad_before: int = 0,
        pad_after: int = 0,
        abs_action: bool = True,
        robot_noise_ratio: float = 0.0,
        seed: int = 42,
        val_ratio: float = 0.0,
        max_train_episodes: int | None = None,
    ):
        if not abs_action:
            raise ConfigError(
                "The logs hold joint positions: abs_action must be true; velocities: task=kitchen_lowdim."
            )
        folder = require_kitchen_data(dataset_dir)
        paths = sorted(folder.glob("*/*.mjl"))
        if not paths:
            raise DataNotFoundError(f"There are no logs */*.mjl in {folder}.")
        rng = np.random.default_rng(seed)
        replay_buffer = ReplayBuffer.create_empty_numpy()
        for path in tqdm(paths, desc="reading logs", unit="log", disable=None):
            qpos, ctrl = read_log(path)
            state = np.concatenate([qpos[:, :9], qpos[:, -21:]], axis=1)
            if robot_noise_ratio > 0:
                state = state + robot_noise_ratio * NOISE * rng.uniform(-1, 1, state.shape)
            obs = np.concatenate([state, np.zeros((len(state), GOAL))], axis=1)
            replay_buffer.add_episode({"obs": obs.astype(np.float32), "action": ctrl.astype(np.float32)})
        super().__init__(replay_buffer, horizon, pad_before, pad_after, seed, val_ratio, max_train_episodes)


def read_log(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """Return qpos (T, nq) and ctrl (T, nu) of every 40th record of a log.

    A log is seven int32 (nq, nv, nu, nmocap, nsensordata, nuserdata, length of a name), the name, and float32 records
    of time, qpos, qvel, ctrl, mocap poses, sensors and user data.
    """
    content = path.read_bytes()
    sizes = np.frombuffer(content[:28], "<i4") if len(content) > 28 else np.zeros(7, int)
    if (sizes < 0).any() or sizes[0] < 30 or sizes[2] != 9:
        raise DataError(f"{path} is not a log of a Franka kitchen: it must have 30 positions and 9 controls.")
    nq, nv, nu, nmocap, nsensordata, nuserdata, name = (int(size) for size in sizes)
    width = 1 + nq + nv + nu + 7 * nmocap + nsensordata + nuserdata
    numbers = content[28 + name :]
    if not numbers or len(numbers) % (4 * width):
        raise DataError(f"{path} is damaged: {len(numbers)} bytes are not whole records of {width} numbers.")
    records = np.frombuffer(numbers, "<f4").reshape(-1, width)[::STEP]
    return records[:, 1 : 1 + nq], records[:, 1 + nq + nv : 1 + nq + nv + nu]
