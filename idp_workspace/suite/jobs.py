"""One run of a suite: train, then evaluate, each in a process of its own; what is done is skipped.

`python -m idp_workspace.suite.jobs FOLDER` makes the run that FOLDER/job.json describes. It is what the scheduler and
the launchers start: it imports no torch, holds a lock while it works, and outlives the scheduler.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from diffusion_policy.common.command_line import STOPPED, override
from diffusion_policy.common.config_util import PACKAGE
from diffusion_policy.storage import atomic

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

ROOT = PACKAGE.parent
#: In a run folder: what to make, how it goes, what it cost, what its commands print, the lock of this process.
JOB, STATE, COST, OUTPUT, LOCK = "job.json", "state.json", "cpu.json", "job.log", ".job.lock"
#: Exit code if another process makes this run.
BUSY = 75
PR_SET_PDEATHSIG = 1


def read_json(path: pathlib.Path) -> Any:
    return json.loads(path.read_text())


def write_json(path: pathlib.Path, data: Any) -> None:
    atomic.write_text(path, json.dumps(data, indent=2))


def provenance() -> dict[str, Any]:
    """When and with what a run is made."""
    from diffusion_policy.storage.checkpoint_io import versions

    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    now = datetime.datetime.now(datetime.UTC)
    return {"date": now.strftime("%Y-%m-%d"), "commit": git.stdout.strip() or None, "versions": versions()}


# ---------------------------------------------------------------------- making
def processor_minutes(
    command: Sequence[str], started: Callable[[subprocess.Popen[bytes]], Any] | None = None, **options: Any
) -> float:
    """Run a command; return the processor time that it took."""
    process = subprocess.Popen(command, **options)
    if started is not None:
        started(process)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return (usage.ru_utime + usage.ru_stime) / 60


def make(
    folder: pathlib.Path,
    train: Sequence[str],
    evaluations: Mapping[str, Sequence[str]],
    *,
    threads: int = 1,
    device: str = "auto",
    environment: Mapping[str, str] | None = None,
    call: Callable[..., float] = processor_minutes,
    stage: Callable[[str], Any] = lambda name: None,
    root: pathlib.Path = ROOT,
) -> None:
    """Train and evaluate a run in its folder, unless that is done; CalledProcessError if a command fails.

    Args:
        folder: of the run.
        train: the command of the training, without its folder.
        evaluations: options of eval.py by the folder of each evaluation, inside that of the run.
        threads: of each command.
        device: of the evaluations.
        environment: further variables.
        call: runs a command and returns its processor time in minutes.
        stage: is told what begins.
        root: the folder in which the commands run.
    """
    variables = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(root)}
    variables |= environment or {}
    cost = read_json(folder / COST) if (folder / COST).is_file() else {}
    with open(folder / OUTPUT, "a") as log:

        def step(name: str, *command: str) -> None:
            stage(name)
            words = [sys.executable, *command]
            begun = time.time()
            minutes = call(words, cwd=root, env=variables, stdout=log, stderr=subprocess.STDOUT)
            key = "minutes" if name == "train" else "evaluation_minutes"
            cost[key] = cost.get(key, 0.0) + minutes
            cost["seconds"] = cost.get("seconds", 0.0) + time.time() - begun
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
            cost["peak_gb"] = max(cost.get("peak_gb", 0.0), peak / (2**30 if sys.platform == "darwin" else 2**20))
            write_json(folder / COST, cost)

        if not (folder / "summary.json").is_file():
            step("train", *train, "training.resume=true", override("hydra.run.dir", folder))
        for name, options in evaluations.items():
            output = folder / name
            if not (output / "eval_log.json").is_file():
                shutil.rmtree(output, ignore_errors=True)  # videos of an evaluation that was killed
                checkpoint = str(folder / "checkpoints/latest.ckpt")
                step(
                    name,
                    "eval.py",
                    "--checkpoint",
                    checkpoint,
                    "--output_dir",
                    str(output),
                    "--device",
                    device,
                    *options,
                )


# ---------------------------------------------------------------------- locks
@contextlib.contextmanager
def locked(path: pathlib.Path) -> Iterator[bool]:
    """Lock a file while the context lasts; False if another process has locked it. The system releases a lock."""
    if fcntl is None:
        yield True
        return
    with open(path, "a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True


def is_locked(path: pathlib.Path) -> bool:
    """Whether another process has locked a file."""
    if not path.exists():
        return False
    with locked(path) as ours:
        return not ours


# ---------------------------------------------------------------------- the process of one run
class Worker:
    """Makes the run of one folder and keeps its state.json; SIGTERM stops it after a checkpoint."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.child: subprocess.Popen[bytes] | None = None
        self.stopping = False
        self.state: dict[str, Any] = {}

    def run(self) -> int:
        """Make the run; returns the exit code."""
        with locked(self.folder / LOCK) as ours:
            if not ours:
                return BUSY
            atomic.remove_leftovers(self.folder)
            job = read_json(self.folder / JOB)
            attempts = read_json(self.folder / STATE)["attempts"] if (self.folder / STATE).is_file() else 0
            self.note(status="running", stage="start", pid=os.getpid(), started=time.time(), attempts=attempts + 1)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: self.stop())
            try:
                self.wait_for_training()
                if not (self.folder / "summary.json").is_file():
                    write_json(self.folder / "made.json", job["made"])
                libc = ctypes.CDLL(None) if sys.platform == "linux" else None
                make(
                    self.folder,
                    job["train"],
                    job["evaluations"],
                    threads=job["threads"],
                    environment=job["environment"],
                    call=functools.partial(
                        processor_minutes,
                        started=self.started,
                        # If this process is killed, its command stops with a checkpoint.
                        preexec_fn=libc and (lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)),
                    ),
                    stage=lambda name: self.note(stage=name),
                )
            except (subprocess.CalledProcessError, OSError) as error:
                code = getattr(error, "returncode", 1)
                stopped = self.stopping or code == STOPPED
                self.note(status="stopped" if stopped else "failed", error="" if stopped else self.reason(error, code))
                return STOPPED if stopped else 1
            self.note(status="done", stage="", error="")
            return 0

    def note(self, **changes: Any) -> None:
        self.state |= changes
        write_json(self.folder / STATE, self.state)

    def started(self, process: subprocess.Popen[bytes]) -> None:
        self.child = process
        if self.stopping:
            process.terminate()

    def stop(self) -> None:
        """Ask the command to stop; a training writes a checkpoint first."""
        self.stopping = True
        if self.child is not None and self.child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.child.terminate()

    def wait_for_training(self, seconds: float = 120.0) -> None:
        """Wait until the training that a killed worker left behind has stopped."""
        until = time.monotonic() + seconds
        while is_locked(self.folder / ".lock") and time.monotonic() < until and not self.stopping:
            time.sleep(0.5)

    def reason(self, error: BaseException, code: int) -> str:
        """Why the run failed, in one line."""
        if code == -signal.SIGKILL:
            return "killed by the system or by hand; was the memory used up?"
        try:
            lines = (self.folder / OUTPUT).read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        found = [line for line in lines if line.strip()]
        errors = [line.partition("error: ")[2] for line in found[-20:] if "error: " in line]
        return (errors or found[-1:] or [str(error)])[-1].strip()[:300]


if __name__ == "__main__":
    sys.exit(Worker(pathlib.Path(sys.argv[1])).run())
