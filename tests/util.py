"""Small pieces that several tests need."""
import pathlib

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from diffusion_policy.common.config_util import register_resolvers
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.model.common.normalizer import LinearNormalizer

ROOT = pathlib.Path(__file__).resolve().parents[1]
register_resolvers()


def load_config(name: str, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(ROOT / "config"), version_base=None):
        cfg = compose(name, overrides=list(overrides))
    OmegaConf.resolve(cfg)
    return cfg


def write_pusht(path: pathlib.Path, episodes: int = 6, length: int = 30, seed: int = 0) -> pathlib.Path:
    """A small dataset with the keys and ranges of PushT, not its physics."""
    rng = np.random.default_rng(seed)
    buffer = ReplayBuffer.create_empty_numpy()
    for _ in range(episodes):
        state = np.concatenate([rng.uniform(50, 450, (length, 4)), rng.uniform(0, 2 * np.pi, (length, 1))], axis=1)
        buffer.add_episode({"state": state.astype(np.float32), "keypoint": rng.uniform(50, 450, (length, 9, 2)).astype(np.float32),
                            "action": rng.uniform(50, 450, (length, 2)).astype(np.float32)})
    buffer.save_to_path(str(path))
    return path


def unit_normalizer(obs_dim: int, action_dim: int) -> LinearNormalizer:
    """Maps [-1, 1] to itself, so that tests can speak of normalised numbers."""
    normalizer = LinearNormalizer()
    normalizer.fit({"obs": torch.tensor([[-1.0], [1.0]]).expand(2, obs_dim), "action": torch.tensor([[-1.0], [1.0]]).expand(2, action_dim)})
    return normalizer


def equal(a, b) -> bool:
    """Bit for bit, through dicts, lists and tensors."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b
