"""What `suite run` shows: one table that is drawn again on a terminal, a line for each event elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from typing import IO

from idp_workspace.suite.scheduler import Job, Scheduler


def duration(seconds: float | None) -> str:
    """1:02:03, 2:03, or - if it is not known."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def headline(scheduler: Scheduler) -> str:
    """12 of 36 done, 2 running, 0 failed; 5:20 so far, 41:00 to go."""
    done, running = len(scheduler.having("done")), len(scheduler.having("running"))
    failed = len(scheduler.having("failed", "stopped"))
    passed = duration(time.time() - scheduler.begun)
    text = f"{done} of {len(scheduler.jobs)} done, {running} running, {failed} failed; {passed} so far"
    return text if scheduler.eta() is None or scheduler.finished else f"{text}, about {duration(scheduler.eta())} to go"


def table(scheduler: Scheduler, height: int) -> list[str]:
    """The lines of the table: running jobs, then those that ended last, as many as fit."""
    ended = scheduler.having("failed", "stopped") + scheduler.having("done")[-3:]
    shown = [*scheduler.having("running"), *ended][: max(1, height - 4)]
    width = max([24, *(len(job.run.name) for job in shown)])
    lines = [headline(scheduler), f"{'job':<{width}}  {'state':<10} {'step':>15} {'loss':>9} {'score':>6} {'ETA':>8}"]
    lines += [line(job, width) for job in shown]
    if waiting := scheduler.having("waiting"):
        lines.append(f"{len(waiting)} waiting, next {waiting[0].run.name}")
    return lines


def line(job: Job, width: int) -> str:
    found = job.progress
    state = (found.stage or "start") if job.status == "running" else job.status
    steps = f"{found.step}/{found.total or '?'}" if found.step else "-"
    eta = duration(job.eta()) if job.status == "running" and found.stage == "train" else "-"
    text = f"{job.run.name:<{width}}  {state:<10} {steps:>15} {number(found.loss, '.4g'):>9} "
    return f"{text}{number(found.score, '.3f'):>6} {eta:>8}" + (f"  {job.error}" if job.error else "")


class View:
    """Shows a scheduler on a stream."""

    def __init__(self, stream: IO[str] | None = None):
        self.stream = stream or sys.stdout
        self.drawn = 0  # lines of the table that is on the screen

    def __call__(self, scheduler: Scheduler, changed: list[Job]) -> None:
        if self.stream.isatty():
            self.draw(scheduler)
            return
        for job in changed:
            known = [f"score {job.progress.score:.3f}"] if job.progress.score is not None else []
            words = [job.status, job.run.name, *known, job.error]
            print(
                f"{len(scheduler.having('done'))}/{len(scheduler.jobs)}",
                *filter(None, words),
                file=self.stream,
                flush=True,
            )

    def draw(self, scheduler: Scheduler) -> None:
        """Draw the table over the one before."""
        size = shutil.get_terminal_size()
        lines = [text[: size.columns - 1] for text in table(scheduler, size.lines)]
        up = f"\x1b[{self.drawn}F" if self.drawn else ""
        rest = "".join("\x1b[K\n" for _ in range(self.drawn - len(lines)))
        back = f"\x1b[{self.drawn - len(lines)}F" if self.drawn > len(lines) else ""
        self.stream.write(up + "".join(f"{text}\x1b[K\n" for text in lines) + rest + back)
        self.stream.flush()
        self.drawn = len(lines)
