"""Keeping the best checkpoints."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from typing import Any

from diffusion_policy.common.errors import ConfigError

logger = logging.getLogger(__name__)


class TopKCheckpointManager:
    """Names the checkpoint of an epoch if it is among the k best so far, and deletes those that are no longer.

    It only deletes files that it named itself, in `remove_displaced`, once the new checkpoint and the new list are on
    disk. Checkpoints hold its state_dict, so that a resumed run keeps the list.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike,
        monitor_key: str,
        mode: str = "min",
        k: int = 1,
        format_str: str = "epoch={epoch:03d}-train_loss={train_loss:.3f}.ckpt",
    ):
        if mode not in ("min", "max") or k < 0:
            raise ConfigError(f"Checkpoints: mode is 'min' or 'max' and k at least 0, not mode={mode!r}, k={k}.")
        self.save_dir = str(save_dir)
        self.monitor_key = monitor_key
        self.mode = mode
        self.k = k
        self.format_str = format_str
        self.path_value_map: dict[str, float] = {}
        self.displaced: list[str] = []

    @classmethod
    def from_config(cls, save_dir: str | os.PathLike, topk: Mapping[str, Any]) -> TopKCheckpointManager:
        """The manager that the section `checkpoint.topk` of a config describes."""
        try:
            return cls(save_dir, **topk)
        except TypeError as error:
            raise ConfigError(f"checkpoint.topk: {error}") from error

    def get_ckpt_path(self, data: dict) -> str | None:
        """Where to save the checkpoint of an epoch with metrics `data`; None if it is not among the best.

        Also removes what an earlier call displaced, for callers that never call remove_displaced.
        """
        self.remove_displaced()
        if self.k == 0:
            return None
        if self.monitor_key not in data:
            # Not an error: epochs that save need not evaluate.
            logger.warning(
                "No best-k checkpoint for this epoch: %r is not among the metrics (%s).",
                self.monitor_key,
                ", ".join(map(str, data)),
            )
            return None
        value = float(data[self.monitor_key])
        if math.isnan(value):
            return None
        try:
            path = os.path.join(self.save_dir, self.format_str.format(**data))
        except KeyError as error:
            raise ConfigError(
                f"The checkpoint name {self.format_str!r} needs {error}, which is not among the metrics."
            ) from error
        if len(self.path_value_map) >= self.k:
            worst = self._worst()
            if not self._better(value, self.path_value_map[worst]):
                return None
            del self.path_value_map[worst]
            self.displaced.append(worst)
        os.makedirs(self.save_dir, exist_ok=True)
        self.path_value_map[path] = value
        return path

    def remove_displaced(self) -> None:
        """Delete the files that are no longer among the best."""
        for path in self.displaced:
            if path not in self.path_value_map and os.path.exists(path):
                os.remove(path)
        self.displaced = []

    def state_dict(self) -> dict:
        """File names relative to the folder, so that a run folder may be moved."""
        return {
            "values": {os.path.basename(path): value for path, value in self.path_value_map.items()},
            "displaced": [os.path.basename(path) for path in self.displaced],
        }

    def load_state_dict(self, state: dict) -> None:
        """Take over the files of this folder that still exist."""
        paths = {os.path.join(self.save_dir, os.path.basename(name)): value for name, value in state["values"].items()}
        self.path_value_map = {path: value for path, value in paths.items() if os.path.isfile(path)}
        # A run that was killed after it wrote this list has not removed them.
        self.displaced = [os.path.join(self.save_dir, os.path.basename(name)) for name in state.get("displaced", ())]
        self.remove_displaced()

    def _better(self, a: float, b: float) -> bool:
        return a > b if self.mode == "max" else a < b

    def _worst(self) -> str:
        by_value = sorted(self.path_value_map, key=self.path_value_map.__getitem__)
        return by_value[0] if self.mode == "max" else by_value[-1]
