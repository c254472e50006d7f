"""Base of the students: a teacher that is present while they train."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from idp_workspace.policy.base import GeneratorPolicy
from idp_workspace.teacher import NETWORKS, TeacherError, load_teacher
from idp_workspace.upstream_arguments import UpstreamArguments


class DistilledPolicy(GeneratorPolicy):
    """A student. A subclass has `teacher_checkpoint` among its options and names the class of its teacher.

    The teacher is loaded in `on_train_start`, after the normaliser is set and before a resumed run takes its weights
    from a checkpoint. The student takes over its weights and its normaliser, so that both use the same normalised
    actions. A training loop that does not call `on_train_start` (upstream's own) gets the same at its first loss.
    """

    teacher_kind: ClassVar[type[GeneratorPolicy]]
    teacher_config: ClassVar[str]
    """A config that trains such a teacher, for messages."""

    def __init__(self, options: Any = None, **arguments: Unpack[UpstreamArguments]) -> None:
        super().__init__(options, **arguments)
        self.teacher_checkpoint: str | None = self.options.teacher_checkpoint
        self._teacher: tuple[GeneratorPolicy, ...] = ()  # in a tuple a module is not registered

    def on_train_start(self) -> None:
        self.load_teacher()
        self.set_normalizer(self.teacher.normalizer)
        self.take_over(self.teacher)

    def load_teacher(self) -> None:
        self._teacher = (load_teacher(self.teacher_checkpoint, self.teacher_kind, self, self.teacher_config),)

    def take_over(self, teacher: Any) -> None:
        """Start from the teacher's weights."""
        for network in NETWORKS:
            if getattr(self, network) is not None:
                getattr(self, network).load_state_dict(getattr(teacher, network).state_dict())

    @property
    def teacher(self) -> Any:
        if not self._teacher:
            raise TeacherError(f"{type(self).__name__} has no teacher yet: on_train_start loads it")
        teacher = self._teacher[0]
        return teacher if teacher.device == self.device else teacher.to(self.device)

    def compute_loss(self, batch: dict[str, Any]) -> Tensor:
        if not self._teacher:
            self.on_train_start() if self.training else self.load_teacher()
        return super().compute_loss(batch)

    def loss_of(self, obs: Tensor | dict[str, Tensor], actions: Tensor) -> Tensor:
        with torch.no_grad():
            teacher_cond = self.teacher.generator.encode(obs)
        return self.distill(self.generator.encode(obs), teacher_cond, actions)

    def distill(self, cond: Tensor, teacher_cond: Tensor, actions: Tensor) -> Tensor:
        """Return the loss, given the observation as the student's and as the teacher's encoder see it."""
        raise NotImplementedError
