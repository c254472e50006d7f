"""Two runs chained by one command: a teacher, then the student that is distilled from it."""

from __future__ import annotations

import pathlib
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf, open_dict

from idp_workspace.teacher import TeacherError, keep_random_state
from idp_workspace.workspace.train_lowdim_workspace import TrainLowdimWorkspace

TEACHER_WORKSPACE = "idp_workspace.workspace.train_lowdim_workspace.TrainLowdimWorkspace"


def teacher_config(cfg: DictConfig) -> DictConfig:
    """Return the config of the teacher's run: the student's, updated by its section `teacher`, with that policy."""
    run: Any = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    overrides = run.pop("teacher")
    policy = overrides.pop("policy")
    run = OmegaConf.merge(run, overrides, {"name": f"{cfg.name}_teacher", "_target_": TEACHER_WORKSPACE})
    run.policy = policy  # not merged: options of a student do not apply to its teacher
    return run


class TrainDistillationWorkspace(TrainLowdimWorkspace):
    """Trains `cfg.policy`, a student, from the teacher in `cfg.policy.teacher_checkpoint`.

    Without one, the teacher of the section `teacher` is trained first, into <run folder>/teacher, on the same data
    with the same networks and settings but for what that section says. Started again with the same run folder, an
    unfinished teacher is continued and a finished one is used as it is. The student's config and checkpoints record
    which teacher it had.
    """

    def run(self) -> dict[str, Any]:
        if self.cfg.policy.get("teacher_checkpoint") is None:
            self._use_teacher(self._train_teacher())
        return super().run()

    def _use_teacher(self, checkpoint: str) -> None:
        with open_dict(self.cfg):
            self.cfg.policy.teacher_checkpoint = checkpoint
        for policy in (self.model, self.ema_model):
            if policy is not None:
                policy.teacher_checkpoint = checkpoint

    def _train_teacher(self) -> str:
        """Train the teacher unless that is done; returns its checkpoint."""
        output = pathlib.Path(self.output_dir).absolute() / "teacher"
        checkpoint = str(output / "checkpoints" / "latest.ckpt")
        if (output / "summary.json").is_file():  # written at the end of a run
            print(f"the teacher is trained: {checkpoint}", flush=True)
            return checkpoint
        if self.cfg.get("teacher") is None:
            raise TeacherError(
                "policy.teacher_checkpoint is not given and the config has no section `teacher` to train one from"
            )
        print(f"training the teacher first, in {output}", flush=True)
        cfg = teacher_config(self.cfg)
        try:
            with keep_random_state():
                hydra.utils.get_class(cfg._target_)(cfg, output_dir=str(output)).run()
        except SystemExit:
            print(
                f"that was the teacher; to continue it and then train the student, use hydra.run.dir={output.parent}",
                flush=True,
            )
            raise
        return checkpoint
