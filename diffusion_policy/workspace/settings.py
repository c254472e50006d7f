"""Settings of the training loop: the `training` section of a config."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from omegaconf import DictConfig, OmegaConf

from diffusion_policy.common.config_util import section
from diffusion_policy.common.errors import ConfigError

#: Sections that a config must have.
SECTIONS = (
    "policy",
    "optimizer",
    "dataloader",
    "val_dataloader",
    "training",
    "checkpoint",
    "checkpoint.topk",
    "logging",
    "task",
    "task.dataset",
)
#: What upstream's training.debug=true stands for.
DEBUG = {
    "num_epochs": 2,
    "max_train_steps": 3,
    "max_val_steps": 3,
    "rollout_every": 1,
    "checkpoint_every": 1,
    "val_every": 1,
    "sample_every": 1,
}


def _whole(default: int | None, at_least: int) -> Any:
    """A whole number with a lower bound; null is allowed if it is the default."""
    return dataclasses.field(default=default, metadata={"at_least": at_least})


@dataclasses.dataclass(frozen=True)
class TrainingSettings:
    """Every key of the `training` section with its type, default and lower bound.

    A step is an optimiser step. An epoch is one pass over the data, or `steps_per_epoch` steps if that is set. The
    intervals rollout, checkpoint, val and sample_every count epochs; the last epoch does all four.
    """

    device: str = "auto"  # auto: cuda, then mps, then cpu
    seed: int = _whole(42, at_least=0)
    debug: bool = False  # a run of seconds, see DEBUG
    resume: bool = True  # continue the run that the folder holds; false refuses such a folder
    lr_scheduler: str = "cosine"  # see model.common.lr_scheduler
    lr_warmup_steps: int = _whole(0, at_least=0)
    num_epochs: int = _whole(1, at_least=0)  # 0 evaluates and saves the untrained policy
    steps_per_epoch: int | None = _whole(None, at_least=1)
    gradient_accumulate_every: int = _whole(1, at_least=1)  # batches per step
    grad_clip_norm: float | None = None  # null: no clipping
    max_skipped_steps: int = _whole(0, at_least=0)  # steps with a non-finite loss or gradient that a run may skip
    use_ema: bool = True  # average the weights; the average is evaluated and deployed
    freeze_encoder: bool = False  # do not train policy.obs_encoder
    rollout_every: int = _whole(1, at_least=1)
    checkpoint_every: int = _whole(1, at_least=1)
    val_every: int = _whole(1, at_least=1)
    sample_every: int = _whole(1, at_least=1)
    log_every: int = _whole(50, at_least=1)  # in steps
    max_train_steps: int | None = _whole(None, at_least=1)  # batches per epoch, at most
    max_val_steps: int | None = _whole(None, at_least=1)  # batches per validation, at most
    tqdm_interval_sec: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), field.metadata.get("at_least")
            if field.type == "bool" and not isinstance(value, bool):
                raise ConfigError(f"training.{field.name}={value!r} must be true or false")
            if least is None or (value is None and field.default is None):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
                raise ConfigError(f"training.{field.name}={value!r} must be a whole number, at least {least}")
        clip = self.grad_clip_norm
        if clip is not None and not (isinstance(clip, (int, float)) and clip > 0):
            raise ConfigError(f"training.grad_clip_norm={clip!r} must be a number above 0, or null for no clipping")

    @classmethod
    def from_config(cls, training: DictConfig) -> TrainingSettings:
        """The section `training` of a config; an unknown key is an error that names the nearest one."""
        values: Any = OmegaConf.to_container(training, resolve=True)
        names = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in names:
                near = difflib.get_close_matches(str(key), names, n=1)
                hint = f"did you mean training.{near[0]}?" if near else f"the settings are: {', '.join(names)}"
                raise ConfigError(f"training.{key} is not a setting; {hint}")
        return cls(**(values | DEBUG if values.get("debug") else values))


def check_sections(cfg: DictConfig) -> None:
    """Raise ConfigError unless `cfg` has every section that a training needs; task.env_runner may be null."""
    for name in SECTIONS:
        section(cfg, name)
    if cfg.task.get("env_runner", "missing") is not None:
        section(cfg, "task.env_runner")
