"""Distillation: loading the policy that a student learns from.

The teacher is needed to train and never to act. It is loaded when training starts, and it is not part of the student's
state_dict and optimiser: a student's checkpoint can be evaluated after the teacher's was deleted.
"""

from __future__ import annotations

import contextlib
import pathlib
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from idp_workspace.checkpoint import load_workspace

try:
    from diffusion_policy.common.errors import UserError
except ImportError:  # upstream's own tree does not have it
    UserError = Exception  # type: ignore[assignment,misc]

if TYPE_CHECKING:  # policies import this module
    from idp_workspace.policy.base import GeneratorPolicy

SIZES = ("horizon", "obs_dim", "action_dim", "n_obs_steps")
NETWORKS = ("model", "obs_encoder")


class TeacherError(ValueError, UserError):
    """A teacher that is missing or does not fit its student. The message tells how to get one."""


@contextlib.contextmanager
def keep_random_state() -> Iterator[None]:
    """Restore the global random state afterwards: what a student draws must not depend on how its teacher was made."""
    python, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(numpy_state)


def load_teacher(path: Any, kind: type[GeneratorPolicy], student: GeneratorPolicy, config: str) -> GeneratorPolicy:
    """Return the policy in the checkpoint `path`, frozen; TeacherError unless it is a `kind` that fits `student`."""
    name = type(student).__name__
    needs = f"{name} is distilled from a trained {kind.__name__}"
    help = (
        f"Train one with\n    python train.py --config-name={config}\n"
        "and pass policy.teacher_checkpoint=<its run folder>/checkpoints/latest.ckpt; or leave that at null in a "
        "config whose _target_ is TrainDistillationWorkspace, which trains the teacher first"
    )
    if path is None:
        raise TeacherError(f"{needs}: policy.teacher_checkpoint is not given. {help}")
    if not pathlib.Path(path).is_file():
        raise TeacherError(f"{needs}: there is no checkpoint at policy.teacher_checkpoint={path}. {help}")
    try:
        with keep_random_state():
            workspace = load_workspace(path)
    except RuntimeError as error:
        raise TeacherError(f"policy.teacher_checkpoint={path} cannot be loaded: {error}. {help}") from error
    teacher: GeneratorPolicy = getattr(workspace, "ema_model", None) or workspace.model
    wrong = mismatches(teacher, kind, student)
    if wrong:
        raise TeacherError(f"the checkpoint {path} cannot teach this {name}: {'; '.join(wrong)}. {help}")
    return teacher.eval().requires_grad_(False)


def mismatches(teacher: GeneratorPolicy, kind: type[GeneratorPolicy], student: GeneratorPolicy) -> list[str]:
    """Return what keeps `teacher` from teaching `student`, in words."""
    if not isinstance(teacher, kind):
        return [f"it holds a {type(teacher).__name__}, not a {kind.__name__}"]
    out = [
        f"its {size} is {getattr(teacher, size)}, the student's is {getattr(student, size)}"
        for size in SIZES
        if getattr(teacher, size) != getattr(student, size)
    ]
    if teacher.generator.horizon != student.generator.horizon:
        out.append(f"it generates {teacher.generator.horizon} steps, the student {student.generator.horizon}")
    for network in NETWORKS:
        mine, theirs = getattr(student, network), getattr(teacher, network)
        if type(mine) is not type(theirs):
            out.append(f"its {network} is a {type(theirs).__name__}, the student's is a {type(mine).__name__}")
        elif mine is not None and shapes(mine) != shapes(theirs):
            both = shapes(mine).keys() | shapes(theirs).keys()
            key = next(k for k in sorted(both) if shapes(mine).get(k) != shapes(theirs).get(k))
            sizes = f"{shapes(theirs).get(key)}, the student's has {shapes(mine).get(key)}"
            out.append(f"its {network}.{key} has shape {sizes}")
    return out


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}
