"""What students share: a teacher that is there while they train."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffusion_policy.model.common.normalizer import LinearNormalizer
from idp_workspace.policy.base import GeneratorPolicy
from idp_workspace.teacher import NETWORKS, TeacherError, load_teacher


class DistilledPolicy(GeneratorPolicy):
    """A student. A subclass has `teacher_checkpoint` among its options and says of which class its teacher is.

    `set_normalizer` is what starts training: the training loop calls it before anything else, and before a resumed run takes its
    weights from a checkpoint; evaluation does not call it. There the teacher is loaded, and the student takes over its weights and,
    so that both speak of the same normalised actions, its normaliser.
    """

    teacher_kind: type[GeneratorPolicy]
    teacher_config: str  # a config that trains such a teacher, for messages

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        self.teacher_checkpoint = self.options.teacher_checkpoint
        self._teacher: tuple[GeneratorPolicy, ...] = ()  # in a tuple a module is not registered

    def set_normalizer(self, normalizer: LinearNormalizer) -> None:
        teacher = load_teacher(self.teacher_checkpoint, self.teacher_kind, self, self.teacher_config)
        self._teacher = (teacher,)
        super().set_normalizer(teacher.normalizer)
        self.take_over(teacher)

    def take_over(self, teacher: GeneratorPolicy) -> None:
        """Start from the teacher's weights."""
        for network in NETWORKS:
            if getattr(self, network) is not None:
                getattr(self, network).load_state_dict(getattr(teacher, network).state_dict())

    @property
    def teacher(self) -> GeneratorPolicy:
        if not self._teacher:
            raise TeacherError(
                f"{type(self).__name__} has no teacher yet: it is loaded by set_normalizer, when training starts"
            )
        teacher = self._teacher[0]
        return teacher if teacher.device == self.device else teacher.to(self.device)

    def loss_of(self, obs: Tensor, actions: Tensor) -> Tensor:
        with torch.no_grad():
            teacher_cond = self.teacher.generator.encode(obs)
        return self.distill(self.generator.encode(obs), teacher_cond, actions)

    def distill(self, cond: Tensor, teacher_cond: Tensor, actions: Tensor) -> Tensor:
        """The loss; cond is the observation as the student's encoder sees it, teacher_cond as the teacher's does."""
        raise NotImplementedError("a student defines how it learns from its teacher")
