"""The log of a run: logs.json.txt, wandb if asked for, and a line on the terminal per epoch."""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any

from omegaconf import DictConfig

from diffusion_policy.common.json_logger import JsonLogger
from diffusion_policy.workspace.console import say
from diffusion_policy.workspace.run_folder import LOG, drop_log_after
from diffusion_policy.workspace.tracker import Tracker

#: The metrics that the terminal shows.
SHOWN = (
    "train_loss",
    "val_loss",
    "train_action_mse_error",
    "val_action_mse_error",
    "val/variance_explained",
    "val/jerk_ratio",
    "test/mean_score",
    "heldout/mean_score",
    "test/lost_episodes",
)


class RunLog:
    """Call it with a record to log it. A context manager."""

    def __init__(self, cfg: DictConfig, folder: pathlib.Path, step: int):
        """step: where the run continues; later records of a killed run are dropped."""
        drop_log_after(folder / LOG, step)
        self.tracker = Tracker(cfg, folder)
        self.json = JsonLogger(str(folder / LOG))

    def __call__(self, record: dict[str, Any]) -> None:
        self.json.log(record)
        self.tracker.log(record)

    def say_epoch(self, record: dict[str, Any], step: int, total_steps: int) -> None:
        values = ", ".join(f"{key} {record[key]:.4g}" for key in SHOWN if key in record)
        say(f"epoch {record['epoch']}, step {step}/{total_steps}: {values}")

    def __enter__(self) -> RunLog:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.tracker)
            stack.enter_context(self.json)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.close()
