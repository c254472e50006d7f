"""Report of a training step whose loss or gradient is not finite."""

from __future__ import annotations

import json
import logging
import math
import pathlib
from typing import TYPE_CHECKING

import torch

from diffusion_policy.common.errors import DivergedError
from diffusion_policy.common.random_state import RandomState
from diffusion_policy.storage.atomic import write_text

if TYPE_CHECKING:
    from diffusion_policy.workspace.train_workspace import TrainWorkspace

log = logging.getLogger(__name__)


def skip_or_stop(run: TrainWorkspace, loss: float, norm: float, random_state: tuple) -> None:
    """Report a non-finite step and skip it; past max_skipped_steps, save the state before it and stop the run."""
    step, count, limit = run.global_step, run.settings.gradient_accumulate_every, run.settings.max_skipped_steps
    folder = run.folder / "debug" / f"step_{step}"
    indices = [next(run.stream.indices(step * count + i)).tolist() for i in range(count)]
    what = report_step(folder, step, loss, norm, indices, run.model)
    if run.skipped_steps < limit:
        run.skipped_steps += 1
        message = "%s: skipped, number %d of at most %d such steps; its windows are in %s"
        log.warning(message, what, run.skipped_steps, limit, folder / "report.json")
        return
    run.optimizer.zero_grad(set_to_none=True)
    RandomState.restore(random_state)
    run.save_checkpoint(path=str(folder / "checkpoints" / "latest.ckpt"))
    raise DivergedError(f"{what}. {advice(folder)}")


def report_step(
    folder: pathlib.Path, step: int, loss: float, norm: float, batches: list[list[int]], model: torch.nn.Module
) -> str:
    """Write folder/report.json, with what is needed to find the cause; returns a one-line description.

    batches: the dataset indices of the step's windows, one list per accumulated batch.
    """
    broken = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
    ]
    report = {
        "step": step,
        "loss": str(loss),
        "gradient_norm": str(norm),
        "batches": batches,
        "parameters_with_such_gradients": broken,
    }
    write_text(folder / "report.json", json.dumps(report, indent=1))
    if not math.isfinite(loss):
        return f"the loss of step {step} is {loss}"
    return f"the gradient of step {step} has the norm {norm}, its loss is {loss:.4g}"


def advice(folder: pathlib.Path) -> str:
    """What a user can do about a diverged run whose state before the step was saved in `folder`."""
    return (
        f"The step changed no weight. {folder} holds the indices of its windows (report.json) and the state before it; "
        f"training.resume=true hydra.run.dir={folder} repeats the step. Lower optimizer.lr, set "
        "training.grad_clip_norm, look for extreme values in the dataset, or let a run skip a few such steps with "
        "training.max_skipped_steps"
    )
