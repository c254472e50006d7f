"""Settings of the training loop: the `training` section of a config."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator
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
#: Lower bounds of whole numbers elsewhere in a config. Where null has a meaning, it is allowed.
WHOLE = {
    "horizon": 1,
    "n_obs_steps": 1,
    "n_action_steps": 1,
    "n_latency_steps": 0,
    "task.obs_dim": 1,
    "task.action_dim": 1,
    "task.dataset.horizon": 1,
    "task.dataset.pad_before": 0,
    "task.dataset.pad_after": 0,
    "task.dataset.max_train_episodes": 1,
    "task.env_runner.n_train": 0,
    "task.env_runner.n_train_vis": 0,
    "task.env_runner.n_test": 0,
    "task.env_runner.n_test_vis": 0,
    "task.env_runner.n_heldout": 0,
    "task.env_runner.n_heldout_vis": 0,
    "task.env_runner.train_start_seed": 0,
    "task.env_runner.test_start_seed": 0,
    "task.env_runner.max_steps": 1,
    "task.env_runner.n_obs_steps": 1,
    "task.env_runner.n_action_steps": 1,
    "task.env_runner.n_latency_steps": 0,
    "task.env_runner.n_envs": 1,
    "task.env_runner.fps": 1,
    "dataloader.batch_size": 1,
    "dataloader.num_workers": 0,
    "val_dataloader.batch_size": 1,
    "val_dataloader.num_workers": 0,
    "checkpoint.topk.k": 0,
}
#: Numbers that may have a fraction, at least 0.
NUMBERS = (
    "learning_rate",
    "optimizer.lr",
    "optimizer.learning_rate",
    "optimizer.weight_decay",
    "optimizer.eps",
    "ema.rate",
    "ema.power",
    "ema.inv_gamma",
    "task.dataset.val_ratio",
)
#: How the best checkpoints are chosen without a simulator, if there are held-out episodes.
WITHOUT_RUNNER = {
    "monitor_key": "val_variance_explained",
    "mode": "max",
    "format_str": "epoch={epoch:04d}-val_variance_explained={val_variance_explained:.3f}.ckpt",
}
#: Values of training.precision.
PRECISIONS = ("fp32", "bf16", "fp16")
#: Values of logging.mode, which are wandb's.
LOGGING_MODES = ("disabled", "offline", "online", "shared", "dryrun", "run")


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
    precision: str = "fp32"  # fp32, bf16 or fp16: of the networks; weights and the geometry stay in fp32
    compile: bool = False  # let torch.compile translate the loss
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
        if self.precision not in PRECISIONS:
            raise ConfigError(f"training.precision={self.precision!r} is not one of {', '.join(PRECISIONS)}")
        clip = self.grad_clip_norm
        if clip is not None and not (isinstance(clip, (int, float)) and clip > 0):
            raise ConfigError(f"training.grad_clip_norm={clip!r} must be a number above 0, or null for no clipping")
        check_number("training.tqdm_interval_sec", self.tqdm_interval_sec)

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


def check_number(name: str, value: Any, whole: bool = False, least: float = 0) -> None:
    """Raise ConfigError unless the value is a number, a whole one if that is asked for, and at least `least`."""
    kinds = int if whole else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not least <= value < 2**63:
        raise ConfigError(f"{name}={value!r} must be a {'whole ' if whole else ''}number, at least {least}")


def check_numbers(cfg: DictConfig) -> None:
    """Raise ConfigError for text where a number belongs, and for negative and zero counts."""
    for name, least in WHOLE.items():
        value = OmegaConf.select(cfg, name)
        if value is not None and (name, value) != ("task.env_runner.n_latency_steps", "measured"):
            check_number(name, value, whole=True, least=least)
    for name in NUMBERS:
        if (value := OmegaConf.select(cfg, name)) is not None:
            check_number(name, value)
    sizes: Any = OmegaConf.to_container(cfg).get("size")  # type: ignore[union-attr]  # upstream's configs have none
    for name, value in leaves("size", sizes):
        if value is not None:
            check_number(name, value, least=0 if "drop" in name else 1)


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every value of nested dicts and lists with its dotted name."""
    if isinstance(value, (dict, list)):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(f"{name}.{key}", child)
    else:
        yield name, value


def check_task(cfg: DictConfig) -> None:
    """Raise ConfigError if the task has images or point clouds and the config reads vectors, or the reverse."""
    policy: Any = OmegaConf.to_container(section(cfg, "policy"))
    task: Any = OmegaConf.to_container(section(cfg, "task"))
    if "shape_meta" in policy and not task.get("shape_meta"):
        raise ConfigError(
            f"this config learns from images or point clouds (policy.shape_meta), but task={task.get('name')} has "
            "observation vectors: choose a task with a shape_meta, such as pusht_image, or a config for lowdim"
        )
    if "shape_meta" not in policy and task.get("shape_meta") and task.get("obs_dim") is None:
        raise ConfigError(
            f"this config learns from observation vectors, but task={task.get('name')} has a shape_meta, images or "
            "point clouds: choose a task with an obs_dim, such as pusht_state, or a config for images"
        )


def check_sections(cfg: DictConfig) -> None:
    """Raise ConfigError unless `cfg` has every section that a training needs; task.env_runner may be null.

    A preset adds counts of episodes to task.env_runner. A task without a simulator (null) then has a section without a
    class: it is null again.
    """
    for name in SECTIONS:
        section(cfg, name)
    runner = cfg.task.get("env_runner", "missing")
    if OmegaConf.is_dict(runner) and "_target_" not in runner:
        runner = cfg.task.env_runner = None
    if runner is not None:
        section(cfg, "task.env_runner")
    elif cfg.checkpoint.topk.get("monitor_key") == "test_mean_score" and cfg.task.dataset.get("val_ratio"):
        cfg.checkpoint.topk.update(WITHOUT_RUNNER)
    if (mode := cfg.logging.get("mode", "disabled")) not in LOGGING_MODES:
        raise ConfigError(f"logging.mode={mode!r} is not one of {', '.join(LOGGING_MODES)}")
