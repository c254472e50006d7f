"""The training loop. Upstream's workspace names are subclasses of it."""

from __future__ import annotations

import contextlib
import copy
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
from omegaconf import DictConfig

from diffusion_policy.common.batch_stream import BatchStream
from diffusion_policy.common.checkpoint_util import TopKCheckpointManager
from diffusion_policy.common.config_util import build
from diffusion_policy.common.errors import ConfigError
from diffusion_policy.common.random_state import isolated_random_state, seed_everything
from diffusion_policy.dataset.identity import dataset_identity
from diffusion_policy.model.common.lr_scheduler import get_scheduler
from diffusion_policy.policy.represented import build_policy
from diffusion_policy.workspace import arithmetic, distributed, run_folder
from diffusion_policy.workspace.base_workspace import BaseWorkspace
from diffusion_policy.workspace.console import progress_bar
from diffusion_policy.workspace.evaluation import evaluate, make_runner, to_device
from diffusion_policy.workspace.optimizer import make_optimizer
from diffusion_policy.workspace.outlook import Outlook
from diffusion_policy.workspace.preflight import check_fit, check_monitor, training_loss
from diffusion_policy.workspace.run_log import RunLog
from diffusion_policy.workspace.settings import TrainingSettings, check_sections
from diffusion_policy.workspace.signals import StopRequest
from diffusion_policy.workspace.update import make_update


class TrainWorkspace(BaseWorkspace):
    """Trains `cfg.policy` on `cfg.task.dataset` and evaluates it with `cfg.task.env_runner`.

    TrainingSettings describes every setting and what a step and an epoch are; TrainingHooks describes what a policy may
    offer beside compute_loss and predict_action. A checkpoint holds everything that the next step depends on: a resumed
    run computes the same numbers, bit for bit on one device, as one that never stopped.
    """

    include_keys = ("global_step", "epoch", "epoch_loss", "scores", "heldout_scores", "skipped_steps", "dataset")

    def __init__(self, cfg: DictConfig, output_dir: str | None = None):
        super().__init__(cfg, output_dir)
        check_sections(cfg)
        self.settings = TrainingSettings.from_config(cfg.training)
        self.ranks = distributed.connect(self.settings.device)
        if self.ranks.size > 1:
            self._output_dir = self.ranks.from_main(self.output_dir)
        seed_everything(self.settings.seed)
        self.model: Any = build_policy(cfg)
        if not (isinstance(self.model, torch.nn.Module) and hasattr(self.model, "compute_loss")):
            raise ConfigError(f"policy._target_={cfg.policy._target_} is not a policy: it has no compute_loss")
        self.ema_model: Any = copy.deepcopy(self.model) if self.settings.use_ema else None
        if self.settings.freeze_encoder:
            self.model.obs_encoder.requires_grad_(False)
        self.optimizer = make_optimizer(cfg, self.model)
        self.global_step = 0
        self.epoch = 0
        self.epoch_loss = [0.0, 0]  # sum and count of the losses of the unfinished epoch
        self.scores: list[float] = []  # test/mean_score of each evaluation
        self.heldout_scores: list[float] = []  # heldout/mean_score, if the runner has such episodes
        self.skipped_steps = 0  # steps with a non-finite loss or gradient, see max_skipped_steps
        self.dataset: dict[str, Any] = {}  # its identity, see dataset_identity

    @property
    def policy(self) -> Any:
        """The policy to evaluate and deploy: with the averaged weights if there are any."""
        return self.model if self.ema_model is None else self.ema_model

    @property
    def folder(self) -> pathlib.Path:
        return pathlib.Path(self.output_dir)

    # ------------------------------------------------------------------ run
    def run(self) -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            checkpoints: list[pathlib.Path] = []
            runner = None
            if self.ranks.main:
                stack.enter_context(run_folder.locked(self.folder))
                checkpoints = run_folder.find_checkpoints(
                    self.get_checkpoint_path(), self.cfg.checkpoint, self.settings.resume
                )
                # The runner before the data: an unknown task is reported at once.
                runner = stack.enter_context(make_runner(self.cfg, self.folder, self.settings.seed))
            self.prepare()
            if checkpoints := self.ranks.from_main(checkpoints):
                run_folder.resume(self, checkpoints)
            check_fit(self, runner)
            if self.ranks.main:
                run_folder.write_config(self)
                run_folder.announce(self)
                stack.enter_context(run_folder.storage_errors_explained(self))
                self.log = stack.enter_context(RunLog(self.cfg, self.folder, self.global_step))
            with StopRequest() as stop, self.ranks.watching():
                self._train(stop, runner)
            return run_folder.finish(self, runner)

    # ------------------------------------------------------------------ prepare
    def prepare(self) -> None:
        """Load the data and create everything that a training step needs."""
        cfg, s, ranks = self.cfg, self.settings, self.ranks
        self.device = ranks.device(s.device)
        # A dataset that draws while it fills a cache must not shift the training.
        with isolated_random_state(s.seed), ranks.main_first():
            dataset = build(cfg, "task.dataset")
        self.dataset = dataset_identity(dataset, cfg.task.dataset)
        self.stream = BatchStream.from_config(dataset, cfg.dataloader, s.seed, ranks.rank, ranks.size)
        validation = dataset.get_validation_dataset()
        self.val_stream = BatchStream.from_config(validation, cfg.val_dataloader, s.seed) if len(validation) else None
        normalizer = dataset.get_normalizer()
        policies = [policy for policy in (self.model, self.ema_model) if policy is not None]
        for policy in policies:
            policy.set_normalizer(normalizer)
            policy.on_train_start()
        self.model.set_average(self.ema_model)

        batches = min(self.stream.batches_per_pass, s.max_train_steps or self.stream.batches_per_pass)
        self.steps_per_epoch = s.steps_per_epoch or max(1, batches // s.gradient_accumulate_every)
        self.total_steps = self.steps_per_epoch * s.num_epochs
        self.lr_scheduler = get_scheduler(
            s.lr_scheduler,
            optimizer=self.optimizer,
            num_warmup_steps=s.lr_warmup_steps,
            num_training_steps=max(1, self.total_steps),
        )
        self.ema = build(cfg, "ema", model=self.ema_model) if self.ema_model is not None else None
        self.topk = TopKCheckpointManager.from_config(self.get_checkpoint_path().parent, cfg.checkpoint.topk)
        for policy in policies:
            policy.to(self.device)
        self.random_state = ranks.random_state(self.device)
        arithmetic.set_up(self.device, s)
        if s.compile:
            self.model.compute_loss = torch.compile(self.model.compute_loss)
        self.training_loss = ranks.parallel(self.model, self._loss)
        self.scaler = arithmetic.make_scaler(self.device, s.precision)
        self.update = make_update(self)

    def _loss(self, policy: Any, batch: Any) -> torch.Tensor:
        with arithmetic.autocast(self.device, self.settings.precision):
            return training_loss(policy, batch)

    # ------------------------------------------------------------------ train
    def _train(self, stop: StopRequest, runner: Any) -> None:
        s = self.settings
        if self.total_steps == 0:  # evaluate and save the untrained policy
            self._end_epoch({"global_step": 0, "epoch": 0}, runner)
        batches = self.stream.batches(self.global_step * s.gradient_accumulate_every)
        losses: list[float] = []  # since the last record
        outlook = Outlook(self.total_steps)
        with progress_bar(self.total_steps, self.global_step, s.tqdm_interval_sec) as bar:
            while self.global_step < self.total_steps:
                self.model.set_progress(self.global_step / self.total_steps)
                self.ranks.start_step(s.seed, self.global_step)
                loss = self.optimise(batches)
                if loss is not None:
                    self._count(loss, losses)
                self.global_step += 1
                bar.update()
                if outlook.step(self.global_step) and self.ranks.main:
                    check_monitor(self, runner)
                end_of_epoch = self.global_step % self.steps_per_epoch == 0
                stopping = self.ranks.any(stop.requested)
                if not (end_of_epoch or stopping or self.global_step % s.log_every == 0):
                    continue

                for loss in self.update.settle():
                    self._count(loss, losses)
                record: dict[str, Any] = {"global_step": self.global_step - 1, "epoch": self.epoch}
                record["lr"] = self.lr_scheduler.get_last_lr()[0]
                if losses:
                    record["train_loss"] = sum(losses) / len(losses)
                    bar.set_postfix(epoch=self.epoch, loss=f"{record['train_loss']:.4g}", refresh=False)
                    losses.clear()
                if self.skipped_steps:
                    record["skipped_steps"] = self.skipped_steps
                record |= self.model.metrics()
                if end_of_epoch:
                    self._end_epoch(record, runner)
                elif self.ranks.main:
                    self.log(record)
                if stopping:
                    if self.ranks.main:
                        self.save_checkpoint()
                    return

    def optimise(self, batches: Iterator[Any]) -> float | None:
        """One optimiser step over gradient_accumulate_every batches; returns the mean loss, if the host knows it.

        A step with a non-finite loss or gradient changes no weight.
        """
        s = self.settings
        before = self.random_state.capture()  # to repeat this step
        self.model.train()
        total = torch.zeros((), device=self.device)
        for i in range(1, s.gradient_accumulate_every + 1):
            with self.ranks.accumulating(last=i == s.gradient_accumulate_every):
                loss = self.training_loss(to_device(next(batches), self.device)) / s.gradient_accumulate_every
                self.update.backward(loss)
            total += loss.detach()
        return self.update(self.ranks.mean(total), before)

    def _count(self, loss: float, losses: list[float]) -> None:
        losses.append(loss)
        self.epoch_loss = [self.epoch_loss[0] + loss, self.epoch_loss[1] + 1]

    # ------------------------------------------------------------------ end of an epoch
    def _end_epoch(self, record: dict[str, Any], runner: Any) -> None:
        """Evaluate, log and save, each if its interval is due. Evaluation leaves the training's random state alone."""
        save, best = self._report_epoch(record, runner) if self.ranks.main else (False, None)
        self.epoch += 1
        self.epoch_loss = [0.0, 0]
        if save:
            # The best one first: a run that is killed in between repeats the epoch and writes it again.
            if best is not None:
                self.save_checkpoint(path=best)
            self.save_checkpoint()
            self.topk.remove_displaced()

    def _report_epoch(self, record: dict[str, Any], runner: Any) -> tuple[bool, str | None]:
        """Evaluate and log; returns whether to save, and the path of the checkpoint if it is one of the best."""
        last = self.global_step >= self.total_steps

        def due(every: int) -> bool:
            return last or (self.epoch + 1) % every == 0

        if self.epoch_loss[1]:
            record["train_loss"] = self.epoch_loss[0] / self.epoch_loss[1]
        record |= evaluate(self, runner, due)
        if "test/mean_score" in record:
            self.scores.append(record["test/mean_score"])
        if "heldout/mean_score" in record:
            self.heldout_scores.append(record["heldout/mean_score"])
        self.log(record)
        self.log.say_epoch(record, self.global_step, self.total_steps)

        metrics = {key.replace("/", "_"): value for key, value in record.items()}
        best = self.topk.get_ckpt_path(metrics) if self.cfg.checkpoint.topk.monitor_key in metrics else None
        return due(self.settings.checkpoint_every) or best is not None, best
