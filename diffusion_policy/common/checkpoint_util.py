"""Which checkpoints to keep."""

import logging
import math
import os

from diffusion_policy.common.errors import ConfigError

logger = logging.getLogger(__name__)


class TopKCheckpointManager:
    """Names the checkpoint of an epoch if it is among the k best so far, and deletes those it displaces once that is safe.

    Only files that it named itself are ever deleted, and only by `remove_displaced`, after the new checkpoint and the list that
    no longer has the old one are on the disk. With `state_dict` in the checkpoint, a resumed run keeps its list.
    """

    def __init__(
        self,
        save_dir,
        monitor_key: str,
        mode="min",
        k=1,
        format_str="epoch={epoch:03d}-train_loss={train_loss:.3f}.ckpt",
    ):
        if mode not in ("min", "max") or k < 0:
            raise ConfigError(f"Checkpoints: mode is 'min' or 'max' and k at least 0, not mode={mode!r}, k={k}.")
        self.save_dir = str(save_dir)
        self.monitor_key = monitor_key
        self.mode = mode
        self.k = k
        self.format_str = format_str
        self.path_value_map = {}
        self.displaced = []

    def get_ckpt_path(self, data: dict) -> str | None:
        """data: the epoch's metrics. Returns where to save its checkpoint, or None if it is not among the best.

        What an earlier call displaced is removed now, for callers that do not say when they have saved.
        """
        self.remove_displaced()
        if self.k == 0:
            return None
        if self.monitor_key not in data:
            # not an error: not every epoch that saves also evaluates
            logger.warning(
                "No best-k checkpoint this time: %r is not among the metrics (%s).",
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

    def remove_displaced(self):
        """Delete the files that are no longer among the best."""
        for path in self.displaced:
            if path not in self.path_value_map and os.path.exists(path):
                os.remove(path)
        self.displaced = []

    def state_dict(self) -> dict:
        """Names relative to the folder, so that a run may be moved."""
        return {
            "values": {os.path.basename(path): value for path, value in self.path_value_map.items()},
            "displaced": [os.path.basename(path) for path in self.displaced],
        }

    def load_state_dict(self, state: dict):
        """Names are taken as files of this folder, and those that are gone are forgotten."""
        paths = {os.path.join(self.save_dir, os.path.basename(name)): value for name, value in state["values"].items()}
        self.path_value_map = {path: value for path, value in paths.items() if os.path.isfile(path)}
        # A run that was killed after it wrote this list had not removed them yet.
        self.displaced = [os.path.join(self.save_dir, os.path.basename(name)) for name in state.get("displaced", ())]
        self.remove_displaced()

    def _better(self, a: float, b: float) -> bool:
        return a > b if self.mode == "max" else a < b

    def _worst(self) -> str:
        by_value = sorted(self.path_value_map, key=self.path_value_map.get)
        return by_value[0] if self.mode == "max" else by_value[-1]
