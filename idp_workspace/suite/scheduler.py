"""Many runs: N at a time within the cores and the memory there are, or through a launcher; resumable at any time.

All state is in the run folders, so a scheduler that was killed is started again and goes on. Its jobs outlive it; the
next scheduler takes them over by their locks.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.common.memory import available_bytes
from idp_workspace.suite import jobs, records
from idp_workspace.suite.grid import ROOT, Run, Suite, folder_name

#: Seconds between two looks at the jobs.
INTERVAL = 1.0


class Handle(Protocol):
    """A job that was started."""

    def alive(self) -> bool: ...

    def stop(self) -> None: ...


class LocalJob:
    """A process of this machine, in a session of its own: Ctrl-C and the end of the scheduler do not reach it."""

    def __init__(self, folder: pathlib.Path):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "idp_workspace.suite.jobs", str(folder)]
        with open(folder / jobs.OUTPUT, "a") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        self.process.terminate()


class FoundJob:
    """A job that an earlier scheduler started and that still runs."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    def alive(self) -> bool:
        return jobs.is_locked(self.folder / jobs.LOCK)

    def stop(self) -> None:
        pid = records.state_of(self.folder).get("pid")
        if pid and self.alive():
            os.kill(pid, signal.SIGTERM)


@dataclasses.dataclass
class Job:
    """A run and how it goes."""

    run: Run
    folder: pathlib.Path
    status: str  # waiting, running, done, failed, stopped
    handle: Handle | None = None
    begun: float = 0.0
    error: str = ""
    gpu: int | None = None
    progress: records.Progress = dataclasses.field(default_factory=records.Progress)

    def eta(self) -> float | None:
        """Seconds until the training ends, from its pace since this scheduler saw it."""
        return self.progress.remaining()


def cores() -> int:
    """Cores that this process may use, within the quota of a container."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = pathlib.Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, max(1, int(int(quota) / int(period))))
    except (OSError, ValueError):  # no container, or no quota ("max")
        pass
    return count


def default_slots(threads: int, memory_gb: float) -> int:
    """How many runs the cores and the free memory allow; at least one."""
    return max(1, int(min(cores() // threads, available_bytes() / 2**30 / memory_gb)))


class Scheduler:
    """Starts jobs while there are slots and memory, and watches them."""

    def __init__(
        self,
        suite: Suite,
        runs: Sequence[Run],
        *,
        slots: int,
        threads: int,
        memory_gb: float,
        gpus: int = 0,
        launch: Callable[[pathlib.Path], Handle] = LocalJob,
        local: bool = True,
        made: dict[str, Any] | None = None,
    ):
        self.suite, self.slots, self.threads, self.memory_gb = suite, slots, threads, memory_gb
        self.gpus, self.launch, self.local, self.made = gpus, launch, local, made
        self.begun = time.time()
        self.jobs = []
        for run in runs:
            folder = suite.output / folder_name(run.name)
            job = Job(run, folder, records.status(folder, run))
            if job.status == "running":
                job.handle, job.begun = FoundJob(folder), records.state_of(folder).get("started", self.begun)
            if job.status == "done":
                job.progress.update(folder)
            self.jobs.append(job)
        self.found_done = sum(job.status == "done" for job in self.jobs)

    def having(self, *statuses: str) -> list[Job]:
        return [job for job in self.jobs if job.status in statuses]

    @property
    def finished(self) -> bool:
        return not self.having("waiting", "running")

    def step(self) -> list[Job]:
        """Look at the running jobs and fill the slots; returns the jobs whose status changed."""
        changed = []
        for job in self.having("running"):
            assert job.handle is not None
            if job.handle.alive():
                job.progress.update(job.folder)
                continue
            job.handle = None
            job.progress.update(job.folder)
            state = records.state_of(job.folder)
            job.error = state.get("error", "")
            if records.status(job.folder, job.run) == "done":
                job.status = "done"
            else:  # a worker that was killed leaves "running" behind
                job.status = "stopped" if state.get("status") == "stopped" else "failed"
                job.error = job.error or (
                    "" if job.status == "stopped" else "its process was killed; run again to resume"
                )
            changed.append(job)
        for job in self.having("waiting"):
            running = self.having("running")
            if len(running) >= self.slots or (running and not self.memory_left()):
                break
            self.start(job)
            changed.append(job)
        return changed

    def memory_left(self) -> bool:
        """Whether another job fits: what the largest finished one took, or the given size before any has finished.

        Jobs of the last half minute have not taken their memory yet.
        """
        peaks = [records.cost_of(job.folder).get("peak_gb", 0.0) for job in self.having("done")]
        need = 1.1 * max(peaks) if any(peaks) else self.memory_gb
        young = sum(time.time() - job.begun < 30 for job in self.having("running"))
        return not self.local or available_bytes() / 2**30 >= need * (1 + young)

    def start(self, job: Job) -> None:
        """Describe the job in its folder and start it."""
        job.folder.mkdir(parents=True, exist_ok=True)
        used = [other.gpu for other in self.having("running")]
        job.gpu = min(range(self.gpus), key=used.count) if self.gpus else None
        environment = {} if job.gpu is None else {"CUDA_VISIBLE_DEVICES": str(job.gpu)}
        jobs.write_json(job.folder / jobs.JOB, records.description(job.run, self.threads, environment, self.made))
        job.handle, job.status, job.begun = self.launch(job.folder), "running", time.time()

    def stop(self) -> None:
        """Stop all jobs after a checkpoint, and wait for them."""
        for job in self.having("running"):
            if job.handle is not None:
                job.handle.stop()
        while any(job.handle is not None and job.handle.alive() for job in self.having("running")):
            time.sleep(0.2)
        for job in self.having("running"):
            job.status = "done" if records.status(job.folder, job.run) == "done" else "stopped"

    def eta(self) -> float | None:
        """Seconds until all jobs are done, from the mean duration of those that were made here or before."""
        seconds = [found for job in self.having("done") if (found := records.cost_of(job.folder).get("seconds"))]
        if not seconds:
            return None
        mean = sum(seconds) / len(seconds)
        running = [max(0.0, mean - (time.time() - job.begun)) for job in self.having("running")]
        return (sum(running) + mean * len(self.having("waiting"))) / max(1, min(self.slots, len(self.jobs)))

    def loop(self, view: Callable[[Scheduler, list[Job]], Any]) -> None:
        """Run until all jobs have ended. Ctrl-C stops them after a checkpoint."""
        self.suite.output.mkdir(parents=True, exist_ok=True)
        with jobs.locked(self.suite.output / ".lock") as ours:
            if not ours:
                raise ConfigError(f"another process runs this suite in {self.suite.output}: stop it, or use --output")
            while not self.finished:
                view(self, self.step())
                time.sleep(INTERVAL)
