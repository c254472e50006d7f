"""Comparison of a resumed run's settings with those of its checkpoint."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

from diffusion_policy.common.errors import ConfigError

log = logging.getLogger(__name__)

#: Settings that change what is trained.
TRAINED = (
    "policy.",
    "optimizer.",
    "ema.",
    "task.dataset.",
    "dataloader.batch_size",
    "dataloader.shuffle",
    "dataloader.drop_last",
    "training.seed",
    "training.debug",
    "training.lr_scheduler",
    "training.lr_warmup_steps",
    "training.num_epochs",
    "training.steps_per_epoch",
    "training.max_train_steps",
    "training.gradient_accumulate_every",
    "training.grad_clip_norm",
    "training.use_ema",
    "training.freeze_encoder",
)
#: Settings that do not matter to a resumed run.
IGNORED = ("training.resume", "logging", "multi_run")


def check_changes(before: Any, now: Any, finished: bool, folder: pathlib.Path) -> None:
    """Compare the config of a run's checkpoint with that of the command that continues it.

    Another method is refused. So is any change of what is trained if the run is finished: the command would train
    nothing and report the old score. Other changes are logged.
    """
    old, new = _flat(before), _flat(now)
    changed = [
        key
        for key in sorted(old.keys() | new.keys())
        if not _same(old.get(key), new.get(key)) and not key.startswith(IGNORED)
    ]
    refused = ["policy._target_"] if "policy._target_" in changed else []
    if finished:
        refused += [key for key in changed if key.startswith(TRAINED) and key not in refused]
    if refused:
        raise ConfigError(
            f"{folder} holds a {'finished ' if finished else ''}run with other settings: "
            f"{_described(refused[:5], old, new)}{', ...' if len(refused) > 5 else ''}; choose another hydra.run.dir"
        )
    if changed:
        log.warning("resuming with changed settings: %s", _described(changed, old, new))


def _described(keys: list[str], old: dict[str, Any], new: dict[str, Any]) -> str:
    return ", ".join(f"{key} {old.get(key)} -> {new.get(key)}" for key in keys)


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal; a path may be relative in one and absolute in the other."""
    if isinstance(one, str) and isinstance(other, str) and "/" in one and "/" in other:
        return one.endswith(other) or other.endswith(one)
    return bool(one == other)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    if not isinstance(value, dict):
        return {prefix: value}
    return {
        key: leaf
        for name, child in value.items()
        for key, leaf in _flat(child, f"{prefix}.{name}" if prefix else name).items()
    }
