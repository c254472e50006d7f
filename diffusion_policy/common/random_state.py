"""Random numbers: seeding, saving, and keeping evaluation from disturbing training."""
from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


class RandomState:
    """The global generators of torch, numpy and random as an object with a state_dict of plain data."""

    def state_dict(self) -> dict[str, Any]:
        kind, keys, *rest = np.random.get_state()
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *rest],
            "random": random.getstate(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
        version, internal, gauss = state["random"]
        random.setstate((version, tuple(internal), gauss))


@contextlib.contextmanager
def isolated_random_state(seed: int):
    """Seed everything inside, restore everything after: how often a run is evaluated does not change what it learns."""
    keeper = RandomState()
    state = keeper.state_dict()
    seed_everything(seed)
    try:
        yield
    finally:
        keeper.load_state_dict(state)
