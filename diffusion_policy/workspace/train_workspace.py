"""The training loop. There is one; upstream's workspace names are thin subclasses of it."""

from __future__ import annotations

import contextlib
import copy
import difflib
import errno
import json
import logging
import math
import os
import pathlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from diffusion_policy.common import checkpoint_io
from diffusion_policy.common.batch_stream import BatchStream
from diffusion_policy.common.checkpoint_util import TopKCheckpointManager
from diffusion_policy.common.config_util import build, resolve_device, section
from diffusion_policy.common.errors import CheckpointError, ConfigError, DivergedError, StorageError
from diffusion_policy.common.json_logger import JsonLogger
from diffusion_policy.common.plot_util import plot_learning_curve
from diffusion_policy.common.pytorch_util import dict_apply
from diffusion_policy.common.random_state import RandomState, isolated_random_state, seed_everything
from diffusion_policy.model.common.lr_scheduler import get_scheduler
from diffusion_policy.workspace.base_workspace import BaseWorkspace

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

log = logging.getLogger(__name__)

#: Keys of the `training` section with what they are when a config does not set them.
TRAINING = {
    "device": "auto",
    "seed": 42,
    "debug": False,
    "resume": True,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 0,
    "num_epochs": 1,
    "steps_per_epoch": None,
    "gradient_accumulate_every": 1,
    "grad_clip_norm": None,
    "max_skipped_steps": 0,
    "use_ema": True,
    "freeze_encoder": False,
    "rollout_every": 1,
    "checkpoint_every": 1,
    "val_every": 1,
    "sample_every": 1,
    "log_every": 50,
    "max_train_steps": None,
    "max_val_steps": None,
    "tqdm_interval_sec": 1.0,
}
#: The least that a setting may be; those that are null by default may be null.
AT_LEAST = {
    "seed": 0,
    "lr_warmup_steps": 0,
    "num_epochs": 0,
    "steps_per_epoch": 1,
    "gradient_accumulate_every": 1,
    "max_skipped_steps": 0,
    "rollout_every": 1,
    "checkpoint_every": 1,
    "val_every": 1,
    "sample_every": 1,
    "log_every": 1,
    "max_train_steps": 1,
    "max_val_steps": 1,
}
#: What a config must have.
SECTIONS = (
    "policy",
    "optimizer",
    "dataloader",
    "val_dataloader",
    "training",
    "checkpoint",
    "checkpoint.topk",
    "logging",
    "task",
    "task.dataset",
)
#: What upstream's training.debug stands for.
DEBUG = {
    "num_epochs": 2,
    "max_train_steps": 3,
    "max_val_steps": 3,
    "rollout_every": 1,
    "checkpoint_every": 1,
    "val_every": 1,
    "sample_every": 1,
}
EVALUATIONS = (
    5  # MIP's protocol reports the best evaluation and the mean of the last five, DP3's the mean of the five best
)


class TrainWorkspace(BaseWorkspace):
    """Trains `cfg.policy` on `cfg.task.dataset` and evaluates it with `cfg.task.env_runner`.

    A step is an optimiser step: schedules, EMA, intervals and logs count those, whatever the gradient accumulation. An epoch is one
    pass over the data, or `training.steps_per_epoch` steps of an endless stream. Evaluations and checkpoints happen at the end of
    every n-th epoch and of the last. A checkpoint holds everything that the next step depends on, so a resumed run computes the same
    numbers, bit for bit on one device, as one that was never stopped.

    A policy may also offer `set_progress(fraction)`, called before each step, and `metrics() -> dict`, asked at the log interval.
    """

    include_keys = ("global_step", "epoch", "epoch_loss", "scores", "skipped_steps")

    def __init__(self, cfg: DictConfig, output_dir: str | None = None):
        super().__init__(cfg, output_dir)
        for name in SECTIONS:
            section(cfg, name)
        if cfg.task.get("env_runner", "nothing") is not None:
            section(cfg, "task.env_runner")
        self.settings = _training_settings(cfg.training)
        seed_everything(self.settings.seed)
        self.model = build(cfg, "policy")
        if not (isinstance(self.model, torch.nn.Module) and hasattr(self.model, "compute_loss")):
            raise ConfigError(f"policy._target_={cfg.policy._target_} is not a policy: it has no compute_loss")
        self.ema_model = copy.deepcopy(self.model) if self.settings.use_ema else None
        self.optimizer = self._make_optimizer()
        self.global_step = 0
        self.epoch = 0
        self.epoch_loss = [0.0, 0]  # sum and count of the losses of the unfinished epoch
        self.scores: list[float] = []  # test/mean_score of each evaluation
        self.skipped_steps = 0  # steps without a finite loss and gradient that were left out

    @property
    def policy(self) -> torch.nn.Module:
        """The policy to evaluate and deploy: the averaged weights if there are any."""
        return self.model if self.ema_model is None else self.ema_model

    def _make_optimizer(self) -> torch.optim.Optimizer:
        if self.settings.freeze_encoder:
            self.model.obs_encoder.requires_grad_(False)
        if "_target_" in self.cfg.optimizer:
            optimizer = build(self.cfg, "optimizer", params=self.model.parameters(), _convert_="all")
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise ConfigError(f"optimizer._target_={self.cfg.optimizer._target_} is not an optimiser of torch")
            return optimizer
        try:
            return self.model.get_optimizer(**OmegaConf.to_container(self.cfg.optimizer, resolve=True))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the section optimizer, which has no _target_, does not fit the policy's own optimiser: {error}"
            ) from error

    # ------------------------------------------------------------------ the run
    def run(self) -> dict[str, Any]:
        output = pathlib.Path(self.output_dir)
        with _only_run_in(output):
            checkpoints = self._checkpoints_to_resume()
            runner = self._make_runner(
                str(output)
            )  # first: a task that does not exist is said before its data are looked for
            self.prepare()
            if checkpoints:
                self._resume(checkpoints)
            checkpoint_io.write_atomically(
                output / "config.yaml", lambda file: file.write(OmegaConf.to_yaml(self.cfg, resolve=True).encode())
            )
            _drop_log_after(output / "logs.json.txt", self.global_step)
            tracker = _tracker(self.cfg, output)
            say(
                f"training {type(self.model).__name__} ({_millions(self.model)}) on {self.stream.size} windows of {self.cfg.task.name}, "
                f"{self.total_steps} steps of batch {self.cfg.dataloader.batch_size} on {self.device}; run folder {output}"
            )
            try:
                with JsonLogger(str(output / "logs.json.txt")) as self.logger, _StopRequest() as stop:
                    self._train(stop, runner, tracker)
                return self._summary(output, finished=self.global_step >= self.total_steps)
            except OSError as error:
                if not isinstance(error, StorageError) and error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                what = (
                    str(error)
                    if isinstance(error, StorageError)
                    else f"{error.filename or output}: {checkpoint_io.reason(error)}"
                )
                raise StorageError(
                    f"{what}. The run stopped at step {self.global_step}; its last checkpoint is whole. Once there is room, "
                    f"continue with\n    {self._continue_command()}"
                ) from error
            finally:
                if hasattr(runner, "close"):
                    runner.close()
                if tracker is not None:
                    tracker.finish()

    def _make_runner(self, output: str) -> Any:
        """What evaluates the policy, or None where task.env_runner is null: without a simulator one can still train."""
        if self.cfg.task.env_runner is None:
            return None
        with isolated_random_state(self.settings.seed):
            return build(self.cfg, "task.env_runner", output_dir=output)

    def prepare(self) -> None:
        """Load the data and make all that a training step needs."""
        cfg, s = self.cfg, self.settings
        with isolated_random_state(
            s.seed
        ):  # a dataset that draws numbers when it fills a cache must not shift the training's
            dataset = build(cfg, "task.dataset")
        self.stream = _stream(dataset, cfg.dataloader, s.seed)
        validation = dataset.get_validation_dataset()
        self.val_stream = _stream(validation, cfg.val_dataloader, s.seed) if len(validation) else None
        normalizer = dataset.get_normalizer()
        self.model.set_normalizer(normalizer)
        if self.ema_model is not None:
            self.ema_model.set_normalizer(normalizer)

        per_epoch = (
            self.stream.batches_per_pass
            if s.max_train_steps is None
            else min(self.stream.batches_per_pass, s.max_train_steps)
        )
        self.steps_per_epoch = s.steps_per_epoch or max(1, per_epoch // s.gradient_accumulate_every)
        self.total_steps = self.steps_per_epoch * s.num_epochs
        self.lr_scheduler = get_scheduler(
            s.lr_scheduler,
            optimizer=self.optimizer,
            num_warmup_steps=s.lr_warmup_steps,
            num_training_steps=max(1, self.total_steps),
        )
        self.ema = build(cfg, "ema", model=self.ema_model) if self.ema_model is not None else None
        try:
            self.topk = TopKCheckpointManager(save_dir=str(self.get_checkpoint_path().parent), **cfg.checkpoint.topk)
        except TypeError as error:
            raise ConfigError(f"checkpoint.topk: {error}") from error
        self.random_state = RandomState()
        self.device = resolve_device(s.device)
        self.model.to(self.device)
        if self.ema_model is not None:
            self.ema_model.to(self.device)

    def _checkpoints_to_resume(self) -> list[pathlib.Path]:
        """What this folder holds of an earlier run, in the order in which it is tried; none if there was no run."""
        if self.cfg.checkpoint.get("save_last_snapshot") or not self.cfg.checkpoint.get("save_last_ckpt", True):
            raise ConfigError(
                "checkpoint.save_last_snapshot=true (a pickle of the whole program) is not supported, and the last checkpoint, "
                "from which a run resumes, is always written: leave save_last_snapshot false and save_last_ckpt true"
            )
        latest = self.get_checkpoint_path()
        for folder in (latest.parent, latest.parent.parent):
            checkpoint_io.remove_leftovers(folder)
        found = sorted(
            latest.parent.glob("*.ckpt"), key=lambda path: (path == latest, path.stat().st_mtime), reverse=True
        )
        if found and not self.settings.resume:
            raise ConfigError(
                f"{self.output_dir} already holds a run: set training.resume=true to continue it, or choose another hydra.run.dir"
            )
        return found

    def _resume(self, checkpoints: list[pathlib.Path]) -> None:
        """Take over the first checkpoint that can be read. Damaged ones are set aside: the run computes them again."""
        for path in checkpoints:
            try:
                payload = checkpoint_io.load(path, check_config=False)
                break
            except CheckpointError as error:
                log.warning("%s. Trying an earlier checkpoint; this one is kept as %s.damaged", error, path.name)
                os.replace(path, path.with_name(f"{path.name}.damaged"))
        else:
            raise CheckpointError(
                f"none of the checkpoints in {checkpoints[0].parent} can be read; they are kept there as *.damaged. To train "
                "from the beginning, choose another hydra.run.dir"
            )
        self.load_payload(payload)
        if path != self.get_checkpoint_path():
            checkpoint_io.copy(path, self.get_checkpoint_path())
        _report_changes(payload["cfg"], OmegaConf.to_container(self.cfg, resolve=True))
        say(f"resuming {self.output_dir} at step {self.global_step} of {self.total_steps} ({path.name})")

    def _train(self, stop: _StopRequest, runner: Any, tracker: Any) -> None:
        s = self.settings
        if self.total_steps == 0:
            self._end_epoch(
                {"global_step": 0, "epoch": 0}, runner, tracker
            )  # an untrained policy, evaluated and saved like any other
        batches = self.stream.batches(self.global_step * s.gradient_accumulate_every)
        losses: list[float] = []  # since the last record
        with tqdm(
            total=self.total_steps,
            initial=self.global_step,
            desc="training",
            unit="step",
            mininterval=s.tqdm_interval_sec,
            disable=None,
            dynamic_ncols=True,
        ) as bar:
            while self.global_step < self.total_steps:
                if hasattr(self.model, "set_progress"):
                    self.model.set_progress(self.global_step / self.total_steps)
                loss = self.optimise(batches)
                if loss is not None:
                    losses.append(loss)
                    self.epoch_loss = [self.epoch_loss[0] + loss, self.epoch_loss[1] + 1]
                self.global_step += 1
                bar.update()
                end_of_epoch = self.global_step % self.steps_per_epoch == 0
                if not (end_of_epoch or stop.requested or self.global_step % s.log_every == 0):
                    continue
                record = {
                    "global_step": self.global_step - 1,
                    "epoch": self.epoch,
                    "lr": self.lr_scheduler.get_last_lr()[0],
                }
                if losses:
                    record["train_loss"] = sum(losses) / len(losses)
                    bar.set_postfix(epoch=self.epoch, loss=f"{record['train_loss']:.4g}", refresh=False)
                    losses.clear()
                if self.skipped_steps:
                    record["skipped_steps"] = self.skipped_steps
                record |= self.model.metrics() if hasattr(self.model, "metrics") else {}
                if end_of_epoch:
                    if self.epoch_loss[1]:
                        record["train_loss"] = self.epoch_loss[0] / self.epoch_loss[1]
                    self._end_epoch(record, runner, tracker)
                else:
                    self._log(record, tracker)
                if stop.requested:
                    self.save_checkpoint()
                    return

    def optimise(self, batches: Iterator[Any]) -> float | None:
        """One optimiser step over gradient_accumulate_every batches; returns the mean loss, or None if the step was left out.

        A step whose loss or gradient is not finite changes no weight. Knowing that costs reading one number from the device.
        """
        s = self.settings
        before = RandomState.capture()  # so that this step can be repeated
        self.model.train()
        total = torch.zeros((), device=self.device)
        for _ in range(s.gradient_accumulate_every):
            loss = self.model.compute_loss(self._to_device(next(batches))) / s.gradient_accumulate_every
            loss.backward()
            total += loss.detach()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        loss, norm = torch.stack([total, norm.to(total)]).tolist()
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            if s.grad_clip_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(
                    self.model.parameters(), s.grad_clip_norm, torch.tensor(norm, device=self.device)
                )
            self.optimizer.step()
        else:
            self._skip(loss, norm, before)
        self.optimizer.zero_grad(set_to_none=True)
        self.lr_scheduler.step()
        if finite and self.ema is not None:
            self.ema.step(self.model)
        return loss if finite else None

    def _skip(self, loss: float, norm: float, random_state: tuple) -> None:
        """Leave a step out if the run may; else write down what is needed to repeat it, and stop."""
        step = self.global_step
        first = step * self.settings.gradient_accumulate_every
        batches = [
            next(self.stream.indices(first + i)).tolist() for i in range(self.settings.gradient_accumulate_every)
        ]
        wrong = [
            name
            for name, p in self.model.named_parameters()
            if p.grad is not None and not bool(torch.isfinite(p.grad).all())
        ]
        what = (
            f"the loss of step {step} is {loss}"
            if not math.isfinite(loss)
            else f"the gradient of step {step} has the norm {norm}, its loss is {loss:.4g}"
        )
        folder = pathlib.Path(self.output_dir) / "debug" / f"step_{step}"
        report = {
            "step": step,
            "loss": str(loss),
            "gradient_norm": str(norm),
            "batches": batches,
            "parameters_with_such_gradients": wrong,
        }
        checkpoint_io.write_atomically(
            folder / "report.json", lambda file: file.write(json.dumps(report, indent=1).encode())
        )
        if self.skipped_steps < self.settings.max_skipped_steps:
            self.skipped_steps += 1
            log.warning(
                "%s: left out, the %d. of at most %d such steps; its windows are in %s",
                what,
                self.skipped_steps,
                self.settings.max_skipped_steps,
                folder / "report.json",
            )
            return
        self.optimizer.zero_grad(set_to_none=True)
        RandomState.restore(random_state)
        self.save_checkpoint(path=str(folder / "checkpoints" / "latest.ckpt"))
        raise DivergedError(
            f"{what}. No weight was changed by it. {folder} holds the indices of its windows (report.json) and the state before it; "
            f"training.resume=true hydra.run.dir={folder} repeats the step at once. Lower optimizer.lr, set training.grad_clip_norm, look for "
            "extreme values in the dataset, or let a run leave out a few such steps with training.max_skipped_steps"
        )

    # ------------------------------------------------------------------ the end of an epoch
    def _end_epoch(self, record: dict[str, Any], runner: Any, tracker: Any) -> None:
        """Evaluate, log and save, each if its interval is due. Evaluation has random numbers of its own."""
        s = self.settings
        number, last = self.epoch + 1, self.global_step >= self.total_steps
        due = lambda every: last or number % every == 0
        policy = self.policy
        policy.eval()
        if hasattr(policy, "set_progress"):
            policy.set_progress(self.global_step / max(1, self.total_steps))
        with isolated_random_state(s.seed), torch.no_grad():
            if due(s.val_every) and self.val_stream is not None:
                record["val_loss"] = self._validation_loss(policy)
            if due(s.sample_every):
                record["train_action_mse_error"] = self._action_error(policy)
            if due(s.rollout_every) and runner is not None:
                record |= runner.run(policy)
        if "test/mean_score" in record:
            self.scores.append(record["test/mean_score"])
        self._log(record, tracker)
        shown = [
            f"{key} {record[key]:.4g}"
            for key in ("train_loss", "val_loss", "train_action_mse_error", "test/mean_score", "test/lost_episodes")
            if key in record
        ]
        say(f"epoch {self.epoch}, step {self.global_step}/{self.total_steps}: {', '.join(shown)}")

        self.epoch += 1
        self.epoch_loss = [0.0, 0]
        metrics = {key.replace("/", "_"): value for key, value in record.items()}
        best = self.topk.get_ckpt_path(metrics) if self.cfg.checkpoint.topk.monitor_key in metrics else None
        if due(s.checkpoint_every) or best is not None:
            # The best one first: if the run is killed after it, the epoch is repeated and writes it again.
            if best is not None:
                self.save_checkpoint(path=best)
            self.save_checkpoint()
            self.topk.remove_displaced()

    def _validation_loss(self, policy: torch.nn.Module) -> float:
        count = self.val_stream.batches_per_pass
        if self.settings.max_val_steps is not None:
            count = min(count, self.settings.max_val_steps)
        losses = [policy.compute_loss(self._to_device(self.val_stream.batch(i))).item() for i in range(count)]
        return sum(losses) / len(losses)

    def _action_error(self, policy: torch.nn.Module) -> float:
        """Mean squared error, in the dataset's units, of the actions predicted for the first training batch."""
        batch = self._to_device(self.stream.batch(0))
        prediction = policy.predict_action(batch["obs"] if isinstance(batch["obs"], dict) else {"obs": batch["obs"]})[
            "action_pred"
        ]
        target = batch["action"]
        if prediction.shape[1] != target.shape[1]:  # the policy predicts only the steps it executes
            first = policy.n_obs_steps - 1 if getattr(policy, "oa_step_convention", True) else policy.n_obs_steps
            target = target[:, first : first + prediction.shape[1]]
        return torch.nn.functional.mse_loss(prediction, target).item()

    def _to_device(self, batch: Any) -> Any:
        return dict_apply(batch, lambda x: x.to(self.device, non_blocking=True))

    def _log(self, record: dict[str, Any], tracker: Any) -> None:
        self.logger.log(record)
        if tracker is not None:
            import wandb

            media = {
                key: wandb.Video(value, format="mp4") if isinstance(value, str) and value.endswith(".mp4") else value
                for key, value in record.items()
            }
            tracker.log(media, step=record["global_step"])

    # ------------------------------------------------------------------ the end of the run
    def _summary(self, output: pathlib.Path, finished: bool) -> dict[str, Any]:
        latest = self.get_checkpoint_path()
        if not finished:
            say(
                f"stopped at step {self.global_step} of {self.total_steps}; continue with\n    {self._continue_command()}"
            )
            sys.exit(130)
        last, best = self.scores[-EVALUATIONS:], sorted(self.scores)[-EVALUATIONS:]
        summary = {
            "score": self.scores[-1] if self.scores else None,
            "best_score": max(self.scores, default=None),
            "mean_of_last_scores": sum(last) / len(last) if last else None,
            "mean_of_best_scores": sum(best) / len(best) if best else None,
            "evaluations": len(self.scores),
            "steps": self.global_step,
            "checkpoint": str(latest),
            "videos": sorted(str(path) for path in (output / "media").glob("*.mp4")),
            "learning_curve": str(plot_learning_curve(output / "logs.json.txt", output / "learning_curve.png")),
        }
        checkpoint_io.write_atomically(
            output / "summary.json", lambda file: file.write(json.dumps(summary, indent=2).encode())
        )
        if self.scores:
            say(
                f"score {summary['score']:.3f} (best {summary['best_score']:.3f}, mean of the last {len(last)} evaluations "
                f"{summary['mean_of_last_scores']:.3f}, of the best {len(best)} {summary['mean_of_best_scores']:.3f})"
            )
        say(f"checkpoint      {latest}")
        if summary["videos"]:
            say(f"rollout video   {summary['videos'][-1]}")
        say(f"learning curve  {summary['learning_curve']}")
        if self.cfg.task.get("env_runner") is not None:
            say(f"next            python eval.py --checkpoint {latest}")
        return summary

    def _continue_command(self) -> str:
        arguments = [
            argument for argument in sys.argv if not argument.startswith(("training.resume=", "hydra.run.dir="))
        ]
        return f"python {' '.join(arguments)} training.resume=true hydra.run.dir={self.output_dir}"


# ---------------------------------------------------------------------- helpers
def say(text: str) -> None:
    """A line for the user that does not tear a progress bar apart."""
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


def _training_settings(section: DictConfig) -> DictConfig:
    """The `training` section completed with defaults; a key nobody reads is an error, not a silent no-op."""
    for key in section:
        if key not in TRAINING:
            near = difflib.get_close_matches(key, TRAINING, n=1)
            raise ConfigError(
                f"training.{key} is not a setting; "
                + (f"did you mean training.{near[0]}?" if near else f"there are: {', '.join(TRAINING)}")
            )
    settings = OmegaConf.merge(TRAINING, section)
    if settings.debug:
        settings = OmegaConf.merge(settings, DEBUG)
    for key, least in AT_LEAST.items():
        value = settings[key]
        if value is None and TRAINING[key] is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
            raise ConfigError(f"training.{key}={value!r} must be a whole number, at least {least}")
    for key in ("debug", "resume", "use_ema", "freeze_encoder"):
        if not isinstance(settings[key], bool):
            raise ConfigError(f"training.{key}={settings[key]!r} must be true or false")
    clip = settings.grad_clip_norm
    if clip is not None and not (isinstance(clip, (int, float)) and clip > 0):
        raise ConfigError(f"training.grad_clip_norm={clip!r} must be a number above 0, or null for no clipping")
    return settings


def _stream(dataset: Any, loader: DictConfig, seed: int) -> BatchStream:
    options = OmegaConf.to_container(loader, resolve=True)
    options["pin_memory"] = bool(options.get("pin_memory")) and torch.cuda.is_available()
    if not options.get("num_workers"):
        options.pop("persistent_workers", None)
    return BatchStream(dataset, seed=seed, **options)


def _tracker(cfg: DictConfig, output: pathlib.Path) -> Any:
    """A wandb run if the config asks for one."""
    options = OmegaConf.to_container(cfg.logging, resolve=True)
    if options.get("mode", "disabled") == "disabled":
        return None
    import wandb

    return wandb.init(dir=str(output), config=OmegaConf.to_container(cfg, resolve=True), **options)


def _drop_log_after(path: pathlib.Path, step: int) -> None:
    """Remove what a killed run logged after the checkpoint that it is resumed from, so that no step is logged twice."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line).get("global_step", -1) < step:
                kept.append(line)
        except json.JSONDecodeError:
            break  # the half-written last line of a killed run
    checkpoint_io.write_atomically(path, lambda file: file.write("".join(f"{line}\n" for line in kept).encode()))


def _report_changes(before: Any, now: Any) -> None:
    """Say which settings of a resumed run differ from those it was started with."""

    def flat(value: Any, prefix: str = "") -> dict[str, Any]:
        if not isinstance(value, dict):
            return {prefix: value}
        return {
            key: leaf
            for name, child in value.items()
            for key, leaf in flat(child, f"{prefix}.{name}" if prefix else name).items()
        }

    old, new = flat(before), flat(now)
    changed = [
        key
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not key.startswith(("training.resume", "logging", "multi_run"))
    ]
    if changed:
        log.warning(
            "resuming with other settings than the run was started with: %s",
            ", ".join(f"{key} {old.get(key)} -> {new.get(key)}" for key in changed),
        )


def _millions(model: torch.nn.Module) -> str:
    return f"{sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6:.2f} M parameters"


@contextlib.contextmanager
def _only_run_in(folder: pathlib.Path) -> Iterator[None]:
    """Two runs in one folder would overwrite each other's files: the second is refused, for as long as the first lives."""
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    with open(folder / ".lock", "a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of this process alone, and gone with it, however it ends
        except BlockingIOError as error:
            raise ConfigError(
                f"another process is training in {folder}: stop it first, or choose another hydra.run.dir"
            ) from error
        except OSError as error:
            log.warning("%s cannot be locked (%s): take care that no other run uses it", folder, error)
        yield


class _StopRequest:
    """Turns Ctrl-C and SIGTERM into a request to stop after the current step, with a checkpoint. A second one stops at once."""

    def __init__(self):
        self.requested = False
        self.process = os.getpid()

    def __enter__(self) -> _StopRequest:
        try:
            self.before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not in the main thread: leave the signals alone
            self.before = {}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if (
            os.getpid() != self.process
        ):  # a worker process, which inherits this: Ctrl-C is the run's to answer, SIGTERM ends it
            if number == signal.SIGTERM:
                os._exit(1)
            return
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        say("stopping after this step; a checkpoint is being written (again to stop at once)")
