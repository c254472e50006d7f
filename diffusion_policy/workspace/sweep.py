"""`--multirun`: several runs, one after the other or side by side. One that fails does not stop the others."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import traceback
from collections.abc import Callable
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from diffusion_policy.common.errors import UserError
from diffusion_policy.storage import atomic

#: In the folder of a run that another process made: how it ended.
OUTCOME = "outcome.json"


@dataclasses.dataclass(frozen=True)
class Member:
    """One run of a sweep and how it ended."""

    overrides: tuple[str, ...]
    folder: str
    outcome: str
    failed: bool


class Outcomes(Callback):
    """Tells where runs in other processes leave their outcomes. The configs of their launchers name it."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        Sweep.folder = pathlib.Path(config.hydra.sweep.dir)
        for old in Sweep.folder.glob(f"*/{OUTCOME}"):  # of an earlier sweep in this folder, which is continued
            old.unlink()


class Sweep:
    """Collects the outcomes of `--multirun`, or of a single run. Hydra starts the next run although one failed."""

    folder: pathlib.Path | None = None
    """Of a sweep whose runs are other processes."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.started = False  # the first run
        self.error: Exception | None = None  # of a single run

    def member(self, run: Callable[[DictConfig], Any]) -> Callable[[DictConfig], Any]:
        """Return `run` for hydra.main; in a sweep it also records its result."""

        @functools.wraps(run)
        def recorded(cfg: DictConfig) -> Any:
            self.started = True
            settings = HydraConfig.get()
            if settings.mode != RunMode.MULTIRUN:
                try:
                    return run(cfg)
                except Exception as error:  # raised after Hydra, which would print it
                    self.error = error
                    return None
            add = functools.partial(self.add, settings)
            try:
                summary = run(cfg)
            except BaseException as error:
                add(_reason(error), failed=True)
                print(f"error: {_reason(error)}", flush=True)
                if not isinstance(error, (UserError, SystemExit)):
                    traceback.print_exc()
                if isinstance(error, Exception):
                    return None
                raise
            add(_result(summary), failed=False)
            return summary

        return recorded

    def add(self, settings: Any, outcome: str, failed: bool) -> None:
        """Record how a run ended; in a file, if this is not the process of the sweep."""
        member = Member(tuple(settings.overrides.task), settings.runtime.output_dir, outcome, failed)
        self.members.append(member)
        if "BasicLauncher" not in settings.launcher._target_:
            text = json.dumps({"number": settings.job.num, "member": dataclasses.asdict(member)})
            atomic.write_text(pathlib.Path(member.folder) / OUTCOME, text)

    def collect(self) -> None:
        """Read how the runs in other processes ended."""
        if self.folder is not None:
            found = [json.loads(path.read_text()) for path in self.folder.glob(f"*/{OUTCOME}")]
            for entry in sorted(found, key=lambda entry: entry["number"]):
                self.members.append(Member(**entry["member"]))

    @property
    def failures(self) -> int:
        return sum(member.failed for member in self.members)

    def table(self) -> str:
        """Return one line per run: what distinguishes it, its result, its folder."""
        common = set.intersection(*(set(member.overrides) for member in self.members))
        names = [
            " ".join(override for override in member.overrides if override not in common) or "(same settings)"
            for member in self.members
        ]
        width = max(map(len, names))
        lines = [f"{len(self.members)} runs, {self.failures} failed"]
        for name, member in zip(names, self.members, strict=True):
            lines.append(f"  {name:<{width}}  {member.outcome}  {member.folder}")
        return "\n".join(lines)


def _result(summary: Any) -> str:
    """Return the score in the summary of a run, which may be of any workspace."""
    if not isinstance(summary, dict) or summary.get("score") is None:
        return "done, no score"
    return f"score {summary['score']:.3f} (best {summary['best_score']:.3f})"


def _reason(error: BaseException) -> str:
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        return "stopped"
    return f"failed: {' '.join((str(error) if isinstance(error, UserError) else repr(error)).split())}"
