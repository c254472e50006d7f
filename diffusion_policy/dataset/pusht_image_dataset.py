"""PushT demonstrations as images."""

import hashlib
import os
from collections.abc import Iterator
from typing import IO

import numpy as np
import torch
from tqdm import tqdm

from diffusion_policy.common.errors import DataError
from diffusion_policy.common.replay_buffer import ReplayBuffer, read_array
from diffusion_policy.dataset.base_dataset import ImageWindowedDataset, check_normalization, check_steps
from diffusion_policy.dataset.pusht_dataset import ACTION_DIM, STATE_DIM
from diffusion_policy.dataset.pusht_source import find_pusht
from diffusion_policy.env.pusht.symmetry import mirror_images, mirror_positions
from diffusion_policy.storage.frame_cache import FileFrames, MemoryFrames, cached_frames

SIZE = 96


class PushTImageDataset(ImageWindowedDataset):
    """obs: image (T, 3, 96, 96) in [0, 1] and agent_pos (T, 2); action (T, 2).

    If the demonstrations have no images (array 'img'), those of the episodes in use are drawn from their states and
    kept in a file next to the dataset. See `drawn_frames`.

    Args:
        zarr_path: the demonstrations, or 'auto', see `find_pusht`.
        normalization: of agent_pos and action, see `LinearNormalizer.fit`.
        augment: 'mirror' adds the mirror image of every training episode, see `symmetry`.
    """

    symmetries = ("mirror",)
    lowdim_keys = ["agent_pos"]
    frame_shapes = {"image": (SIZE, SIZE, 3)}

    def __init__(
        self,
        zarr_path: str | os.PathLike,
        horizon: int = 1,
        pad_before: int = 0,
        pad_after: int = 0,
        seed: int = 42,
        val_ratio: float = 0.0,
        max_train_episodes: int | None = None,
        n_obs_steps: int | None = None,
        normalization: str = "upstream",
        augment: str | None = None,
    ):
        self.n_obs_steps = n_obs_steps
        self.normalization = check_normalization(normalization)
        path, self.source_warning = find_pusht(zarr_path)
        self.source = path
        super().__init__(
            ReplayBuffer.copy_from_path(path, keys=["state", "action"]),
            horizon,
            pad_before,
            pad_after,
            seed,
            val_ratio,
            max_train_episodes,
            augment,
        )
        stored = ReplayBuffer.create_from_path(path)
        if "img" in stored:
            if stored["img"].shape[1:] != (SIZE, SIZE, 3):
                raise DataError(
                    f"{path} has no images: 'img' must have ({SIZE}, {SIZE}, 3) pixels per step, it has "
                    f"{stored['img'].shape[1:]}."
                )
            # Published as float32 with whole numbers. As uint8 they take 0.7 GB instead of 2.8 GB.
            self.frames = MemoryFrames(read_array(stored["img"], "uint8"))
            self.frame_of = torch.arange(len(self.frames))
        else:
            used = np.repeat(self.train_mask | self.val_mask, self.replay_buffer.episode_lengths)
            self.frames = drawn_frames(path, self.replay_buffer["state"][used])
            self.frame_of = torch.from_numpy(np.cumsum(used) - 1)

    def _make_steps(self, replay_buffer: ReplayBuffer) -> dict[str, torch.Tensor]:
        check_steps(replay_buffer, {"state": (STATE_DIM,), "action": (ACTION_DIM,)})
        return {
            "agent_pos": torch.from_numpy(replay_buffer["state"][:, :2]).float().contiguous(),
            "action": torch.from_numpy(replay_buffer["action"]).float(),
        }

    def _mirror_steps(self, steps: dict[str, torch.Tensor], replay_buffer: ReplayBuffer) -> dict[str, torch.Tensor]:
        return {field: mirror_positions(values) for field, values in steps.items()}

    def _mirror_images(self, images: torch.Tensor) -> torch.Tensor:
        return mirror_images(images)


def drawn_frames(path: str, states: np.ndarray) -> FileFrames | MemoryFrames:
    """Frames (N, 96, 96, 3) uint8 of states (N, 5), as the image environment draws them, cached in a file.

    The file is <path>.img96-<checksum of the states>.npy, so other states use another file. Its first and last frame
    are drawn again and compared, so that a file from another version of the renderer is not used. See `cached_frames`.
    """
    checksum = hashlib.sha256(np.ascontiguousarray(states).tobytes()).hexdigest()[:12]
    file = f"{os.fspath(path).rstrip(os.sep)}.img{SIZE}-{checksum}.npy"
    ends = np.stack(list(draw(states[[0, -1]])))

    def write(out: IO[bytes]) -> None:
        bar = tqdm(
            draw(states),
            total=len(states),
            desc=f"drawing the images of {os.path.basename(path)}, once",
            unit="frame",
            disable=None,
        )
        for frame in bar:
            out.write(frame.tobytes())

    return cached_frames(
        file,
        (len(states), *ends.shape[1:]),
        write,
        in_memory=lambda: np.stack(list(draw(states))),
        check=lambda frames: np.array_equal(frames[[0, -1]], ends),
    )


def draw(states: np.ndarray) -> Iterator[np.ndarray]:
    """Draw the frame (96, 96, 3) uint8 of each state (5,)."""
    # Imported here because training on stored images needs no physics.
    from diffusion_policy.env.pusht.pusht_image_env import PushTImageEnv

    env = PushTImageEnv(render_size=SIZE)
    for state in states:
        env.reset(options={"state": state})
        yield env.render()
    env.close()
