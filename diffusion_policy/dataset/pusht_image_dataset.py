"""PushT demonstrations as images."""
import torch

from diffusion_policy.common.errors import DataError
from diffusion_policy.common.normalize_util import get_image_range_normalizer
from diffusion_policy.common.replay_buffer import ReplayBuffer, read_array
from diffusion_policy.dataset.base_dataset import BaseImageDataset, WindowedDataset, check_steps
from diffusion_policy.dataset.pusht_dataset import ACTION_DIM, STATE_DIM, require_pusht
from diffusion_policy.model.common.normalizer import LinearNormalizer


class PushTImageDataset(WindowedDataset, BaseImageDataset):
    """obs: image (T, 3, 96, 96) in [0, 1] and agent_pos (T, 2); action (T, 2)."""

    def __init__(self, zarr_path, horizon=1, pad_before=0, pad_after=0, seed=42, val_ratio=0.0, max_train_episodes=None):
        path = require_pusht(zarr_path)
        replay_buffer = ReplayBuffer.copy_from_path(path, keys=["state", "action"])
        stored = ReplayBuffer.create_from_path(path)
        if "img" not in stored or stored["img"].shape[1:] != (96, 96, 3):
            raise DataError(f"{path} has no images: an array 'img' of (96, 96, 3) pixels a step is needed.")
        # Published as float32: as bytes, which hold the same whole numbers, they take 0.7 GB instead of 2.8.
        replay_buffer.data["img"] = read_array(stored["img"], "uint8")
        super().__init__(replay_buffer, horizon, pad_before, pad_after, seed, val_ratio, max_train_episodes)

    def _make_steps(self, replay_buffer):
        check_steps(replay_buffer, {"state": (STATE_DIM,), "action": (ACTION_DIM,)})
        return {"image": torch.from_numpy(replay_buffer["img"]),
                "agent_pos": torch.from_numpy(replay_buffer["state"][:, :2]).float().contiguous(),
                "action": torch.from_numpy(replay_buffer["action"]).float()}

    def _to_sample(self, batch):
        image = batch["image"].movedim(-1, -3)  # (B, T, 96, 96, 3) -> (B, T, 3, 96, 96)
        image = image.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
        return {"obs": {"image": image, "agent_pos": batch["agent_pos"]}, "action": batch["action"]}

    def get_normalizer(self, mode="limits", **kwargs) -> LinearNormalizer:
        """Actions and positions fitted on the data, pixels [0, 1] to [-1, 1]."""
        normalizer = LinearNormalizer()
        normalizer.fit({key: self.steps[key] for key in ("action", "agent_pos")}, last_n_dims=1, mode=mode, **kwargs)
        normalizer["image"] = get_image_range_normalizer()
        return normalizer
