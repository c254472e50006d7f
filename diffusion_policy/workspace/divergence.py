"""Report of a training step whose loss or gradient is not finite."""

from __future__ import annotations

import json
import logging
import math
import pathlib
from typing import TYPE_CHECKING, Any

import torch

from diffusion_policy.common.errors import DivergedError
from diffusion_policy.storage.atomic import write_text

if TYPE_CHECKING:
    from diffusion_policy.workspace.train_workspace import TrainWorkspace

log = logging.getLogger(__name__)


def skip_or_stop(run: TrainWorkspace, loss: float, norm: float, random_state: Any) -> None:
    """Report a non-finite step and skip it; past max_skipped_steps, save the state before it and stop the run."""
    folder, what = report_step(run, run.global_step, loss, norm)
    if may_skip(run, folder, what):
        return
    run.optimizer.zero_grad(set_to_none=True)
    run.random_state.restore(random_state)
    stop(run, folder, f"{what}. {advice(folder)}")


def skipped_or_stop(run: TrainWorkspace, step: int, loss: float, norm: float) -> None:
    """Report a non-finite step that the device skipped some steps ago; past max_skipped_steps, save and stop."""
    folder, what = report_step(run, step, loss, norm)
    if not may_skip(run, folder, what):
        what += f"; the device skipped it, and the run has reached step {run.global_step}"
        stop(run, folder, f"{what}. {advice(folder, repeats=False)}")


def may_skip(run: TrainWorkspace, folder: pathlib.Path, what: str) -> bool:
    limit = run.settings.max_skipped_steps
    if run.skipped_steps >= limit:
        return False
    run.skipped_steps += 1
    message = "%s: skipped, number %d of at most %d such steps; its windows are in %s"
    log.warning(message, what, run.skipped_steps, limit, folder / "report.json")
    return True


def stop(run: TrainWorkspace, folder: pathlib.Path, message: str) -> None:
    """Save the state and stop; other ranks wait until it is saved."""
    if run.ranks.main:
        run.save_checkpoint(path=str(folder / "checkpoints" / "latest.ckpt"))
    run.ranks.wait()
    raise DivergedError(message)


def report_step(run: TrainWorkspace, step: int, loss: float, norm: float) -> tuple[pathlib.Path, str]:
    """Write report.json, with what is needed to find the cause; returns its folder and a one-line description."""
    folder, count = run.folder / "debug" / f"step_{step}", run.settings.gradient_accumulate_every
    report = {
        "step": step,
        "loss": str(loss),
        "gradient_norm": str(norm),
        # The dataset indices of the step's windows, one list per accumulated batch.
        "batches": [next(run.stream.indices(step * count + i)).tolist() for i in range(count)],
        "parameters_with_such_gradients": [
            name
            for name, parameter in run.model.named_parameters()
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
        ],
    }
    if run.ranks.main:
        write_text(folder / "report.json", json.dumps(report, indent=1))
    if not math.isfinite(loss):
        return folder, f"the loss of step {step} is {loss}"
    return folder, f"the gradient of step {step} has the norm {norm}, its loss is {loss:.4g}"


def advice(folder: pathlib.Path, repeats: bool = True) -> str:
    """What a user can do about a diverged run. repeats: the state in `folder` is that before the step."""
    return (
        f"The step changed no weight. {folder} holds the indices of its windows (report.json) and the state "
        f"{'before it' if repeats else 'now'}; training.resume=true hydra.run.dir={folder} "
        f"{'repeats the step' if repeats else 'continues'}. Lower optimizer.lr, set "
        "training.grad_clip_norm, look for extreme values in the dataset, or let a run skip a few such steps with "
        "training.max_skipped_steps"
    )
