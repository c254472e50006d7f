"""How long a run will take, printed early."""

from __future__ import annotations

import sys
import time

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from diffusion_policy.common.command_line import shell_command
from diffusion_policy.common.config_util import resolve_device
from diffusion_policy.workspace.console import say

#: Seconds of training after which the rest is estimated, and the length that is worth a line.
WATCHED, LONG = 5.0, 120.0


class Outlook:
    """Says once, after the first steps, how long the remaining ones will take.

    The first step is not measured: it also prepares. Evaluations and checkpoints come on top.
    """

    def __init__(self, total_steps: int):
        self.total_steps = total_steps
        self.first: tuple[int, float] | None = None
        self.said = False

    def step(self, done: int) -> bool:
        """Receive the number of steps that are done; return whether this was the first step of this process."""
        if self.said:
            return False
        now = time.monotonic()
        if self.first is None:
            self.first = done, now
            return True
        steps, seconds = done - self.first[0], now - self.first[1]
        if seconds >= WATCHED:
            self.said = True
            left = (self.total_steps - done) * seconds / steps
            if left >= LONG:
                say(f"the remaining {self.total_steps - done} steps take about {duration(left)}, without evaluations")
        return False


def duration(seconds: float) -> str:
    """Return '5 min', '3 h 20 min' or '2 days 4 h'."""
    minutes = max(1, round(seconds / 60))
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} day{'s' if days > 1 else ''} {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def announce_preset(cfg: DictConfig) -> None:
    """Say on a CPU that preset=paper is made for a GPU, with the command for the small preset."""
    if HydraConfig.get().runtime.choices.get("preset") != "paper":
        return
    if resolve_device(cfg.training.device).type == "cpu":
        words = [word for word in sys.argv if not word.startswith("preset=")]
        say(f"preset=paper is made for a GPU; on this CPU use\n    {shell_command('python', *words, 'preset=cpu')}")
