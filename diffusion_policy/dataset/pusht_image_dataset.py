"""PushT demonstrations as images."""
import hashlib
import logging
import os

import numpy as np
import torch
from tqdm import tqdm

from diffusion_policy.common.checkpoint_io import write_atomically
from diffusion_policy.common.errors import DataError
from diffusion_policy.common.normalize_util import get_image_range_normalizer
from diffusion_policy.common.pytorch_util import dict_apply
from diffusion_policy.common.replay_buffer import ReplayBuffer, read_array
from diffusion_policy.dataset.base_dataset import BaseImageDataset, WindowedDataset, check_steps
from diffusion_policy.dataset.pusht_dataset import ACTION_DIM, STATE_DIM, require_pusht
from diffusion_policy.model.common.normalizer import LinearNormalizer

log = logging.getLogger(__name__)

SIZE = 96


class PushTImageDataset(WindowedDataset, BaseImageDataset):
    """obs: image (T, 3, 96, 96) in [0, 1] and agent_pos (T, 2); action (T, 2).

    A batch from `get_batch` holds images as bytes, a quarter of the floats, for the policy to convert on its device; single samples
    hold floats, as upstream's do. n_obs_steps: observe only the first steps of a window, all that a policy looks at.

    Demonstrations without images (an array 'img') are drawn from their states, those of the episodes in use, and kept in a file
    beside the dataset. See `drawn_frames`.
    """

    def __init__(self, zarr_path, horizon=1, pad_before=0, pad_after=0, seed=42, val_ratio=0.0, max_train_episodes=None, n_obs_steps=None):
        path = require_pusht(zarr_path)
        self.n_obs_steps = n_obs_steps
        super().__init__(ReplayBuffer.copy_from_path(path, keys=["state", "action"]), horizon, pad_before, pad_after, seed, val_ratio,
                         max_train_episodes)
        stored = ReplayBuffer.create_from_path(path)
        if "img" in stored:
            if stored["img"].shape[1:] != (SIZE, SIZE, 3):
                raise DataError(f"{path} has no images: an array 'img' of ({SIZE}, {SIZE}, 3) pixels a step is needed, it has "
                                f"{stored['img'].shape[1:]}.")
            # Published as float32: as bytes, which hold the same whole numbers, they take 0.7 GB instead of 2.8.
            frames = read_array(stored["img"], "uint8")
            self.frame_of = torch.arange(len(frames))       # row of the frames that shows a step
        else:
            used = np.repeat(self.train_mask | self.val_mask, self.replay_buffer.episode_lengths)
            frames = drawn_frames(path, self.replay_buffer["state"][used])
            self.frame_of = torch.from_numpy(np.cumsum(used) - 1)
        self.steps["image"] = torch.from_numpy(frames)

    def _make_steps(self, replay_buffer):
        check_steps(replay_buffer, {"state": (STATE_DIM,), "action": (ACTION_DIM,)})
        return {"agent_pos": torch.from_numpy(replay_buffer["state"][:, :2]).float().contiguous(),
                "action": torch.from_numpy(replay_buffer["action"]).float()}

    def get_batch(self, indices) -> dict:
        """indices: (B,) integers -> obs: image (B, To, 3, 96, 96) uint8, agent_pos (B, To, 2); action (B, T, 2)."""
        rows = self.index_table[torch.as_tensor(indices, dtype=torch.long)]  # (B, T)
        seen = rows[:, :self.n_obs_steps]
        # Whole frames side by side: many times faster than indexing the four-dimensional array.
        frames = self.steps["image"].flatten(1).index_select(0, self.frame_of[seen].flatten())
        image = frames.view(*seen.shape, SIZE, SIZE, 3).movedim(-1, -3).contiguous()
        return {"obs": {"image": image, "agent_pos": self.steps["agent_pos"][seen]}, "action": self.steps["action"][rows]}

    def __getitem__(self, idx: int) -> dict:
        return self.__getitems__([idx])[0]

    def __getitems__(self, indices) -> list[dict]:
        batch = self.get_batch(indices)
        batch["obs"]["image"] = batch["obs"]["image"].float().div_(255)
        return [dict_apply(batch, lambda value: value[i]) for i in range(len(indices))]

    def get_normalizer(self, mode="limits", **kwargs) -> LinearNormalizer:
        """Actions and positions fitted on the data, pixels [0, 1] to [-1, 1]."""
        normalizer = LinearNormalizer()
        normalizer.fit({key: self.steps[key] for key in ("action", "agent_pos")}, last_n_dims=1, mode=mode, **kwargs)
        normalizer["image"] = get_image_range_normalizer()
        return normalizer


def drawn_frames(path: str, states: np.ndarray) -> np.ndarray:
    """Frames (N, 96, 96, 3) uint8 of states (N, 5), as the image environment shows them; read from a file if they were drawn before.

    The file is <path>.img96-<checksum of the states>.npy, so other states never find it, and it is mapped into memory, not read. Its
    first and last frame are drawn again and compared, so that one from another version of the renderer is not used. Where no file
    can be written the frames stay in memory.
    """
    checksum = hashlib.sha256(np.ascontiguousarray(states).tobytes()).hexdigest()[:12]
    file = f"{os.fspath(path).rstrip(os.sep)}.img{SIZE}-{checksum}.npy"
    ends = np.stack(list(draw(states[[0, -1]])))
    if os.path.isfile(file):
        try:
            frames = np.load(file, mmap_mode="c")
            if frames.shape == (len(states), *ends.shape[1:]) and frames.dtype == np.uint8 and np.array_equal(frames[[0, -1]], ends):
                return frames
        except (ValueError, OSError):
            pass
        log.warning("%s is damaged or was drawn by another renderer: it is made again", file)
    bar = tqdm(draw(states), total=len(states), desc=f"drawing the images of {os.path.basename(path)}, once", unit="frame", disable=None)
    header = {"descr": "|u1", "fortran_order": False, "shape": (len(states), *ends.shape[1:])}

    def write(out) -> None:
        np.lib.format.write_array_header_1_0(out, header)
        for frame in bar:
            out.write(frame.tobytes())

    try:
        write_atomically(file, write)
    except OSError as error:
        log.warning("%s cannot be written (%s): the images are kept in memory and drawn again next time", file, error)
        return np.stack(list(draw(states)))
    return np.load(file, mmap_mode="c")


def draw(states: np.ndarray):
    """The frame (96, 96, 3) uint8 of each state (5,), one after the other."""
    from diffusion_policy.env.pusht.pusht_image_env import PushTImageEnv      # only here: training on stored images needs no physics

    env = PushTImageEnv(render_size=SIZE)
    for state in states:
        env.reset(options={"state": state})
        yield env.render()
    env.close()
