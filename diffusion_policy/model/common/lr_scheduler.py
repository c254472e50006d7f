"""Learning-rate schedules by name: lr(k) = base_lr * factor(k), where k counts optimiser steps from 0.

`diffusers.optimization` has the same names but not the same numbers: its cosine climbs back to the full rate after the
last step, and its linear schedule differs in the last bit.
"""

import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from diffusion_policy.common.errors import ConfigError


def _constant(progress: float) -> float:
    return 1.0


def _linear(progress: float) -> float:
    return 1 - progress


def _cosine(progress: float, num_cycles: float = 0.5) -> float:
    return max(0.0, 0.5 * (1 + math.cos(2 * math.pi * num_cycles * progress)))


def _cosine_with_restarts(progress: float, num_cycles: int = 1) -> float:
    if progress == 1:
        return 0.0
    return 0.5 * (1 + math.cos(math.pi * (num_cycles * progress % 1)))


# name -> (factor after warm-up as a function of progress in [0, 1], needs num_warmup_steps, needs num_training_steps)
_SCHEDULES: dict[str, tuple[Callable[..., float], bool, bool]] = {
    "constant": (_constant, False, False),
    "constant_with_warmup": (_constant, True, False),
    "linear": (_linear, True, True),
    "cosine": (_cosine, True, True),
    "cosine_with_restarts": (_cosine_with_restarts, True, True),
}


def get_scheduler(
    name: str,
    optimizer: Optimizer,
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
    last_epoch: int = -1,
    **kwargs: Any,
) -> LambdaLR:
    """Build the schedule `name`: k / num_warmup_steps during warm-up, then a function of the progress.

    After num_training_steps the last value is held. `last_epoch` is the number of steps already taken, minus one. Other
    keywords (`num_cycles`) go to the schedule.
    """
    if name not in _SCHEDULES:
        raise ConfigError(f"Unknown learning-rate schedule {name!r}: use one of {', '.join(_SCHEDULES)}.")
    factor, needs_warmup, needs_total = _SCHEDULES[name]
    if needs_warmup and num_warmup_steps is None:
        raise ConfigError(f"The schedule {name!r} needs num_warmup_steps (0 for none).")
    if needs_total and num_training_steps is None:
        raise ConfigError(f"The schedule {name!r} needs num_training_steps.")
    warmup = (num_warmup_steps or 0) if needs_warmup else 0
    total = (num_training_steps or 0) if needs_total else 0

    def multiplier(step: int) -> float:
        if step < warmup:
            return step / max(1, warmup)
        progress = min(1.0, (step - warmup) / max(1, total - warmup)) if needs_total else 0.0
        return factor(progress, **kwargs)

    return LambdaLR(optimizer, multiplier, last_epoch)
