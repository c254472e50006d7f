"""The folder of a run: its lock, the checkpoints to resume from, its log, and the summary at the end."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from diffusion_policy.common import launch
from diffusion_policy.common.command_line import STOPPED, override, shell_command
from diffusion_policy.common.errors import CheckpointError, ConfigError, StorageError
from diffusion_policy.common.plot_util import plot_learning_curve
from diffusion_policy.dataset.identity import check_same
from diffusion_policy.gym_util.rollout_video import write_grid
from diffusion_policy.storage import atomic, checkpoint_io
from diffusion_policy.workspace.base_workspace import PREVIOUS
from diffusion_policy.workspace.changes import check_changes
from diffusion_policy.workspace.console import say

if TYPE_CHECKING:
    from diffusion_policy.workspace.train_workspace import TrainWorkspace

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

LOG = "logs.json.txt"
#: MIP's protocol reports the best evaluation and the mean of the last five, DP3's the mean of the five best.
EVALUATIONS = 5


@contextlib.contextmanager
def locked(folder: pathlib.Path, doing: str = "training") -> Iterator[None]:
    """Lock a folder while this process uses it. A second run there would overwrite the files of the first."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".lock").touch()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}; choose another folder") from error
    if fcntl is None:
        yield
        return
    with open(folder / ".lock", "a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by the system however the process ends
        except BlockingIOError as error:
            raise ConfigError(
                f"another process is {doing} in {folder}: stop it first, or choose another folder"
            ) from error
        except OSError as error:
            log.warning("%s cannot be locked (%s): make sure that no other run uses it", folder, error)
        yield


# ---------------------------------------------------------------------- resuming
def find_checkpoints(latest: pathlib.Path, settings: DictConfig, resume: bool) -> list[pathlib.Path]:
    """Checkpoints of an earlier run: `latest`, the one before it, others. Removes files that a killed run left behind.

    settings: the section `checkpoint` of the config.
    """
    if settings.get("save_last_snapshot") or not settings.get("save_last_ckpt", True):
        raise ConfigError(
            "checkpoint.save_last_snapshot=true (a pickle of the whole program) is not supported, and the last "
            "checkpoint, from which a run resumes, is always written: leave save_last_snapshot false and "
            "save_last_ckpt true"
        )
    for folder in (latest.parent, latest.parent.parent):
        atomic.remove_leftovers(folder)
    first = (latest.name, PREVIOUS)
    names = sorted(path.name for path in latest.parent.glob("*.ckpt") if path.name not in first)
    found = [path for name in (*first, *names) if (path := latest.with_name(name)).is_file()]
    if found and not resume:
        raise ConfigError(
            f"{latest.parent.parent} already holds a run: set training.resume=true to continue it, or choose another "
            "hydra.run.dir"
        )
    return found


def load_first_readable(checkpoints: list[pathlib.Path]) -> tuple[pathlib.Path, dict[str, Any]]:
    """The checkpoint to continue from, and its payload: the latest, the previous, or the best with the most steps.

    Damaged ones are renamed to *.damaged. File dates do not count: a copied run folder has new ones.
    """
    furthest: tuple[pathlib.Path, dict[str, Any]] | None = None
    for path in checkpoints:
        try:
            payload = checkpoint_io.load(path, check_config=False)
        except CheckpointError as error:
            log.warning("%s. Trying an earlier checkpoint; this one is kept as %s.damaged", error, path.name)
            os.replace(path, path.with_name(f"{path.name}.damaged"))
            continue
        if path.name in ("latest.ckpt", PREVIOUS):
            return path, payload
        if furthest is None or steps(payload) > steps(furthest[1]):
            furthest = path, payload
    if furthest is not None:
        return furthest
    raise CheckpointError(
        f"none of the checkpoints in {checkpoints[0].parent} can be read; they are kept there as *.damaged. To train "
        "from the beginning, choose another hydra.run.dir"
    )


def steps(payload: dict[str, Any]) -> int:
    """How far the run of a checkpoint had come."""
    return payload.get("attributes", {}).get("global_step") or 0


def resume(run: TrainWorkspace, checkpoints: list[pathlib.Path]) -> None:
    """Continue from the first checkpoint that can be read. The main rank chooses it."""
    path, payload = load_first_readable(checkpoints) if run.ranks.main else (checkpoints[0], {})
    path = run.ranks.from_main(path)
    if not run.ranks.main:
        payload = checkpoint_io.load(path, check_config=False)
    check_same(payload.get("attributes", {}).get("dataset"), run.dataset)
    finished = steps(payload) >= run.total_steps
    check_changes(payload["cfg"], OmegaConf.to_container(run.cfg, resolve=True), finished, run.folder)
    run.load_payload(payload)
    if path != run.get_checkpoint_path() and run.ranks.main:
        atomic.copy(path, run.get_checkpoint_path())
    say(f"resuming {run.folder} at step {run.global_step} of {run.total_steps} ({path.name})")


def drop_log_after(path: pathlib.Path, step: int) -> None:
    """Remove records that a killed run logged after its last checkpoint, so that no step is logged twice."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line).get("global_step", -1) < step:
                kept.append(line)
        except json.JSONDecodeError:
            break  # the half-written last line of a killed run
    atomic.write_text(path, "".join(f"{line}\n" for line in kept))


def continue_command(folder: pathlib.Path) -> str:
    """The command line that continues this run."""
    arguments = [argument for argument in sys.argv if not argument.startswith(("training.resume=", "hydra.run.dir="))]
    ranks = os.environ.get("LOCAL_WORLD_SIZE", launch.world_size())
    program = ("python",) if launch.world_size() == 1 else ("torchrun", f"--nproc-per-node={ranks}")
    return shell_command(*program, *arguments, "training.resume=true", override("hydra.run.dir", folder))


# ---------------------------------------------------------------------- the beginning and the end of a run
def write_config(run: TrainWorkspace) -> None:
    atomic.write_text(run.folder / "config.yaml", OmegaConf.to_yaml(run.cfg, resolve=True))


def announce(run: TrainWorkspace) -> None:
    """Print what is trained on what."""
    size = sum(p.numel() for p in run.model.parameters() if p.requires_grad) / 1e6
    batch, ranks = run.stream.batch_size, run.ranks.size
    share = f" ({ranks} ranks, {batch // ranks} windows each)" if ranks > 1 else ""
    say(
        f"training {type(run.model).__name__} ({size:.2f} M parameters) on {run.stream.size} windows of "
        f"{run.cfg.task.name}, {run.total_steps} steps of batch {batch}{share} on {run.device}\n"
        f"dataset {run.dataset['name']}, sha256 {run.dataset['sha256']}\nrun folder {run.folder}"
    )


@contextlib.contextmanager
def storage_errors_explained(run: TrainWorkspace) -> Iterator[None]:
    """Say how to continue after a full disk or a failed write."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            what = str(error)
        elif error.errno in atomic.FULL_DISK:
            what = f"{error.filename or run.folder}: {atomic.reason(error)}"
        else:
            raise
        raise StorageError(
            f"{what}. The run stopped at step {run.global_step}; its last checkpoint is complete. Free some space, "
            f"then continue with\n    {continue_command(run.folder)}"
        ) from error


def finish(run: TrainWorkspace, runner: Any) -> dict[str, Any]:
    """Write the summary of a complete run; exit with 130, and the command that continues it, if it was stopped.

    The other ranks leave after the main one, whose files are then complete.
    """
    complete = run.global_step >= run.total_steps
    summary = write_summary(run, write_grid(runner, run.folder)) if complete and run.ranks.main else {}
    run.ranks.wait()
    if not complete:
        command = continue_command(run.folder)
        say(f"stopped at step {run.global_step} of {run.total_steps}; continue with\n    {command}")
        sys.exit(STOPPED)
    return summary


def write_summary(run: TrainWorkspace, grid: str | None) -> dict[str, Any]:
    """Write summary.json and learning_curve.png, and print where everything is. grid: a video of the last rollouts."""
    folder, scores, checkpoint = run.folder, run.scores, run.get_checkpoint_path()
    last, best, heldout = scores[-EVALUATIONS:], sorted(scores)[-EVALUATIONS:], run.heldout_scores[-EVALUATIONS:]
    videos = sorted((folder / "media").glob("*.mp4"), key=lambda path: path.stat().st_mtime)
    curve = plot_learning_curve(folder / LOG, folder / "learning_curve.png", f"{run.cfg.name} on {run.cfg.task.name}")
    summary: dict[str, Any] = {
        "score": scores[-1] if scores else None,
        "best_score": max(scores, default=None),
        "mean_of_last_scores": sum(last) / len(last) if last else None,
        "mean_of_best_scores": sum(best) / len(best) if best else None,
        "evaluations": len(scores),
        "heldout_score": heldout[-1] if heldout else None,
        "mean_of_last_heldout_scores": sum(heldout) / len(heldout) if heldout else None,
        "dataset": run.dataset,
        "steps": run.global_step,
        "checkpoint": str(checkpoint),
        "videos": [str(path) for path in videos],
        "learning_curve": str(curve),
    }
    atomic.write_text(folder / "summary.json", json.dumps(summary, indent=2))
    if scores:
        say(
            f"score {summary['score']:.3f} (best {summary['best_score']:.3f}, mean of the last {len(last)} evaluations "
            f"{summary['mean_of_last_scores']:.3f}, of the best {len(best)} {summary['mean_of_best_scores']:.3f})"
        )
    if heldout:
        say(
            f"held-out starts {summary['heldout_score']:.3f}, mean of the last {len(heldout)} evaluations "
            f"{summary['mean_of_last_heldout_scores']:.3f}"
        )
    if run.dataset["warning"]:
        say(f"WARNING         {run.dataset['warning']}")
    say(f"checkpoint      {checkpoint}")
    if videos:
        say(f"rollout video   {grid or videos[-1]}")
    say(f"learning curve  {summary['learning_curve']}")
    if run.cfg.task.get("env_runner") is not None or run.val_stream is not None:
        how = () if run.cfg.task.get("env_runner") is not None else ("--open-loop",)
        say(f"next            {shell_command('python', 'eval.py', '--checkpoint', checkpoint, *how)}")
    return summary
