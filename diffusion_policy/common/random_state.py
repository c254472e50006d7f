"""Random numbers: seeding, saving, and isolating evaluation from training."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed torch, numpy and random."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


class RandomState:
    """The global generators of torch, numpy and random, with a state_dict of plain data."""

    @staticmethod
    def capture() -> tuple:
        """Their state, for `restore`; cheap enough for every training step."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()

    @staticmethod
    def restore(state: tuple) -> None:
        torch_state, cuda, numpy_state, python = state
        torch.set_rng_state(torch_state)
        if torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(cuda)
        np.random.set_state(numpy_state)
        random.setstate(python)

    def state_dict(self) -> dict[str, Any]:
        torch_state, cuda, (kind, keys, *rest), python = self.capture()
        return {
            "torch": torch_state,
            "cuda": cuda,
            "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *rest],
            "random": python,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        kind, keys, *rest = state["numpy"]
        version, internal, gauss = state["random"]
        self.restore(
            (
                state["torch"],
                state["cuda"],
                (kind, keys.numpy().astype(np.uint32), *rest),
                (version, tuple(internal), gauss),
            )
        )


@contextlib.contextmanager
def isolated_random_state(seed: int) -> Iterator[None]:
    """Seed all generators inside the context and restore them after it, so that evaluating does not change training."""
    state = RandomState.capture()
    seed_everything(seed)
    try:
        yield
    finally:
        RandomState.restore(state)
