"""Small pieces that several tests need."""

import pathlib
import subprocess
import time

import hydra
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from benchmarks.data import write_point_clouds, write_pusht
from benchmarks.faults import equal
from diffusion_policy.common.config_util import register_configs, register_resolvers
from diffusion_policy.model.common.normalizer import LinearNormalizer

__all__ = [
    "ROOT",
    "command",
    "equal",
    "load_config",
    "train_here",
    "unit_normalizer",
    "wait_for",
    "write_point_clouds",
    "write_pusht",
]
ROOT = pathlib.Path(__file__).resolve().parents[1]
register_resolvers()
register_configs()


def load_config(name: str, *overrides: str) -> DictConfig:
    """Compose and resolve a config by name."""
    with initialize_config_dir(str(ROOT / "config"), version_base=None):
        cfg = compose(name, overrides=list(overrides))
    if from_data := OmegaConf.select(cfg, "task.from_data"):
        hydra.utils.get_method(from_data)(cfg)
    OmegaConf.resolve(cfg)
    return cfg


def train_here(output, name: str, *overrides: str) -> tuple:
    """A run in this process -> (workspace, summary)."""
    cfg = load_config(name, *overrides)
    workspace = hydra.utils.get_class(cfg._target_)(cfg, output_dir=str(output))
    return workspace, workspace.run()


def command(script: str, *arguments: object, cwd: pathlib.Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A script or module, as a command of its own: in a fork, which need not import torch again."""
    from benchmarks.mistakes import in_fork  # imports torch._dynamo, which takes seconds

    done = in_fork(script, map(str, arguments), cwd)
    return subprocess.CompletedProcess([script, *map(str, arguments)], done.code, done.out, done.err)


def unit_normalizer(obs_dim: int, action_dim: int) -> LinearNormalizer:
    """Maps [-1, 1] to itself, so that tests can speak of normalised numbers."""
    normalizer = LinearNormalizer()
    normalizer.fit(
        {
            "obs": torch.tensor([[-1.0], [1.0]]).expand(2, obs_dim),
            "action": torch.tensor([[-1.0], [1.0]]).expand(2, action_dim),
        }
    )
    return normalizer


def wait_for(found, process, seconds=240):
    """Return the first true result of found()."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if result := found():
            return result
        time.sleep(0.05)
    raise AssertionError(process.communicate()[0] if process.poll() is not None else "nothing happened")
