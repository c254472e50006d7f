"""Checks of clients' observations against what the policy expects."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from diffusion_policy.policy.interface import Entry, PolicyInterface
from diffusion_policy.serving.codec import MessageError

SPARE_BYTES = 65536  # for names, texts and keys that the policy does not use
SLACK = 1e-3  # by which resized images may leave [0, 1]


class ObservationReader:
    """Checks messages {key: array}, of one control step or of the whole history, by the policy's interface."""

    def __init__(self, interface: PolicyInterface):
        self.interface = interface
        self.steps = interface.n_obs_steps
        # Images as float32 at most, numbers as float64.
        sizes = (math.prod(entry.shape) * (4 if entry.rgb else 8) for entry in interface.observation.values())
        self.max_bytes = SPARE_BYTES + self.steps * sum(sizes)

    def read(self, message: Any) -> tuple[dict[str, np.ndarray], bool]:
        """Return the entries, and whether they are whole histories (n_obs_steps, ...); other keys are ignored."""
        if not isinstance(message, dict):
            raise MessageError(f"an observation is a map of arrays, not a {type(message).__name__}")
        entries = self.interface.observation
        missing = [key for key in entries if key not in message]
        if missing:
            raise MessageError(f"the observation lacks {', '.join(missing)}; it needs {self.expected()}")
        values = {key: self._numbers(key, message[key]) for key in entries}
        whole = [values[key].ndim > len(entry.shape) for key, entry in entries.items()]
        if any(whole) != all(whole):
            raise MessageError("all entries of an observation are of one step, or all are histories")
        return {key: self._entry(key, entries[key], values[key], whole[0]) for key in entries}, whole[0]

    def expected(self) -> str:
        """Describe an observation, for messages."""
        parts = (
            f"{key} {entry.shape} {'uint8' if entry.rgb else 'float32'}"
            for key, entry in self.interface.observation.items()
        )
        return ", ".join(parts)

    def _numbers(self, key: str, value: Any) -> np.ndarray:
        if isinstance(value, list):
            if not all(isinstance(item, int | float) for item in value):
                raise MessageError(f"{key} is a list of values that are not numbers; send an array")
            value = np.array(value, dtype=np.float64)
        if isinstance(value, int | float | np.generic):
            value = np.asarray(value, dtype=np.float64)
        if not isinstance(value, np.ndarray):
            raise MessageError(f"{key} must be an array, not a {type(value).__name__}")
        return value

    def _entry(self, key: str, entry: Entry, value: np.ndarray, whole: bool) -> np.ndarray:
        lead = (self.steps,) if whole else ()
        shape = value.shape
        if entry.rgb and shape == (*lead, *entry.shape[1:], entry.shape[0]):
            value = np.moveaxis(value, -1, -3)  # channels last, as cameras give them
        elif shape != (*lead, *entry.shape):
            history = f", or {(self.steps, *entry.shape)} for the whole history"
            raise MessageError(f"{key} must have the shape {entry.shape}{history}, not {shape}")
        if entry.rgb and value.dtype == np.uint8:
            return value
        if value.dtype.kind == "b" or (entry.rgb and value.dtype.kind != "f"):
            raise MessageError(f"{key} must be {'uint8, or floats from 0 to 1' if entry.rgb else 'numbers'}")
        with np.errstate(over="ignore"):  # what does not fit becomes infinite, which is refused
            value = value.astype(np.float32)
        if not np.isfinite(value).all():
            raise MessageError(f"{key} must be finite; it holds NaN, infinity, or numbers beyond float32")
        if entry.rgb and value.size and (value.min() < -SLACK or value.max() > 1 + SLACK):
            raise MessageError(f"{key} must have floats from 0 to 1: divide by 255, or send uint8")
        # As bytes: histories and batches of both kinds would not stack. Images that were bytes get their values back.
        return np.round(255 * value).clip(0, 255).astype(np.uint8) if entry.rgb else value


def metadata_of(policy: Any, interface: PolicyInterface) -> dict[str, Any]:
    """The metadata that the server sends to a new client."""
    return {
        "policy": type(policy).__name__,
        "network_calls": int(getattr(policy, "nfe", 0)),
        "observation": {
            key: {"shape": list(entry.shape), "dtype": "uint8" if entry.rgb else "float32"}
            for key, entry in interface.observation.items()
        },
        "n_obs_steps": interface.n_obs_steps,
        "action_horizon": interface.n_action_steps,
        "action_dim": interface.action_dim,
        "extra_keys": {
            "reset": "true forgets the observations so far, before this one",
            "observe_only": "true adds this observation to the history and returns no actions",
        },
    }
