"""Distillation: loading the policy that a student learns from.

The teacher is needed to train and never to act. It is therefore loaded when training starts, not when a policy is built, and is
kept out of the student's state_dict and optimiser: a student's checkpoint can be evaluated after the teacher's was deleted.
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

from diffusion_policy.workspace.base_workspace import BaseWorkspace

if TYPE_CHECKING:  # policies import this module
    from idp_workspace.policy.base import GeneratorPolicy

SIZES = ("horizon", "obs_dim", "action_dim", "n_obs_steps")
NETWORKS = ("model", "obs_encoder")


class TeacherError(ValueError):
    """A teacher that is missing or does not fit its student; the message says how to get one."""


@contextlib.contextmanager
def keep_random_state() -> Iterator[None]:
    """Leave the global random numbers as they were: what a student draws must not depend on how its teacher came about."""
    python, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(numpy_state)


def load_teacher(path: Any, kind: type[GeneratorPolicy], student: GeneratorPolicy, config: str) -> GeneratorPolicy:
    """The policy in the checkpoint `path`, frozen, after checking that it is a `kind` with the sizes and networks of `student`."""
    name = type(student).__name__
    help = (
        f"Train one with\n    python train.py --config-name={config}\nand pass policy.teacher_checkpoint=<its run folder>/checkpoints/latest.ckpt; "
        "or leave that at null in a config whose _target_ is TrainDistillationWorkspace, which trains the teacher first"
    )
    if path is None:
        raise TeacherError(
            f"{name} is distilled from a trained {kind.__name__}: policy.teacher_checkpoint is not given. {help}"
        )
    if not pathlib.Path(path).is_file():
        raise TeacherError(
            f"{name} is distilled from a trained {kind.__name__}: there is no checkpoint at policy.teacher_checkpoint={path}. {help}"
        )
    try:
        with keep_random_state():
            workspace = BaseWorkspace.create_from_checkpoint(str(path))
    except RuntimeError as error:
        raise TeacherError(f"policy.teacher_checkpoint={path} cannot be loaded: {error}. {help}") from error
    teacher = getattr(workspace, "ema_model", None) or workspace.model
    wrong = mismatches(teacher, kind, student)
    if wrong:
        raise TeacherError(f"the checkpoint {path} cannot teach this {name}: {'; '.join(wrong)}. {help}")
    return teacher.eval().requires_grad_(False)


def mismatches(teacher: nn.Module, kind: type, student: GeneratorPolicy) -> list[str]:
    """What keeps `teacher` from teaching `student`, in words."""
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
            key = next(
                k
                for k in sorted(shapes(mine).keys() | shapes(theirs).keys())
                if shapes(mine).get(k) != shapes(theirs).get(k)
            )
            out.append(
                f"its {network}.{key} has shape {shapes(theirs).get(key)}, the student's has {shapes(mine).get(key)}"
            )
    return out


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}
