"""Demonstrations of Franka Kitchen as arrays of the relay-policy-learning release."""

import os
import pathlib
from typing import Any

import numpy as np
import torch

from diffusion_policy.common.errors import DataError, DataNotFoundError
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.dataset.base_dataset import BaseLowdimDataset, WindowedDataset, check_steps
from diffusion_policy.model.common.normalizer import LinearNormalizer

OBS_DIM, ACTION_DIM = 60, 9
RANGE_EPS = 0.05  # joints that barely move are not scaled
DATA_URL = "https://diffusion-policy.cs.columbia.edu/data/training/kitchen.zip"


class KitchenDataset(WindowedDataset, BaseLowdimDataset):
    """obs (T, 60): 9 joints, 21 numbers of the objects, 30 of a goal; action (T, 9)."""

    def _make_steps(self, replay_buffer: ReplayBuffer) -> dict[str, torch.Tensor]:
        check_steps(replay_buffer, {"obs": (OBS_DIM,), "action": (ACTION_DIM,)})
        return {key: torch.from_numpy(replay_buffer[key]) for key in ("obs", "action")}

    def get_normalizer(self, mode: str | None = None, **kwargs: Any) -> LinearNormalizer:
        return super().get_normalizer(mode, **{"range_eps": RANGE_EPS, **kwargs})


class KitchenLowdimDataset(KitchenDataset):
    """Reads observations_seq.npy (N, T, 60), actions_seq.npy (N, T, 9) and existence_mask.npy (N, T) of a folder.

    Episode i is its first existence_mask[i].sum() steps; the actions are joint velocities.
    """

    def __init__(
        self,
        dataset_dir: str | os.PathLike,
        horizon: int = 1,
        pad_before: int = 0,
        pad_after: int = 0,
        seed: int = 42,
        val_ratio: float = 0.0,
        max_train_episodes: int | None = None,
    ):
        folder = require_kitchen_data(dataset_dir)
        names = ("observations_seq", "actions_seq", "existence_mask")
        observations, actions, mask = (load_array(folder / f"{name}.npy") for name in names)
        if not observations.shape[:2] == actions.shape[:2] == mask.shape:
            raise DataError(
                f"{folder}: observations {observations.shape}, actions {actions.shape} and mask {mask.shape} do not "
                "belong together."
            )
        replay_buffer = ReplayBuffer.create_empty_numpy()
        for i, length in enumerate(mask.sum(axis=1).astype(int)):
            replay_buffer.add_episode(
                {
                    "obs": observations[i, :length].astype(np.float32),
                    "action": actions[i, :length].astype(np.float32),
                }
            )
        super().__init__(replay_buffer, horizon, pad_before, pad_after, seed, val_ratio, max_train_episodes)


def require_kitchen_data(path: str | os.PathLike) -> pathlib.Path:
    """Return the folder; if it does not exist, raise an error that tells where the data is."""
    folder = pathlib.Path(path).expanduser()
    if not folder.is_dir():
        raise DataNotFoundError(
            f"There are no kitchen demonstrations at {folder} (from {os.getcwd()}). Unpack {DATA_URL} into data/."
        )
    return folder


def load_array(path: pathlib.Path) -> np.ndarray:
    """Read an .npy file of plain numbers."""
    try:
        return np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise DataNotFoundError(f"There is no file {path}; kitchen demonstrations are in {DATA_URL}.") from None
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{path} cannot be read as an .npy file of numbers: {error}") from error
