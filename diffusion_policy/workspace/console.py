"""Output for the user during a run."""

from __future__ import annotations

import sys

from tqdm import tqdm

from diffusion_policy.common import launch


def say(text: str) -> None:
    """Print a line without breaking a progress bar."""
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


def progress_bar(total: int, done: int, interval: float) -> tqdm:
    """A bar over training steps; silent when the output is not a terminal."""
    return tqdm(
        total=total,
        initial=done,
        desc="training",
        unit="step",
        mininterval=interval,
        disable=None if launch.rank() == 0 else True,
        dynamic_ncols=True,
    )
