"""Jobs of a suite through submitit: on a Slurm cluster, or as processes of this machine to try it."""

from __future__ import annotations

import importlib.util
import pathlib
import shutil
import time
from collections.abc import Callable
from typing import Any

import yaml

from diffusion_policy.common.config_util import config_dir
from diffusion_policy.common.errors import ConfigError
from idp_workspace.suite import jobs
from idp_workspace.suite.scheduler import Handle, LocalJob

NAMES = ("local", "slurm", "submitit")
#: Settings of config/launcher/slurm.yaml by submitit's names, where these differ.
RENAMED = {"partition": "slurm_partition", "gpus_per_node": "slurm_gpus_per_node"}


class Task:
    """What submitit runs: the worker of one folder. A preempted job is queued again and resumes."""

    def __call__(self, folder: str) -> int:
        self.worker = jobs.Worker(pathlib.Path(folder))
        return self.worker.run()

    def checkpoint(self, folder: str) -> Any:
        """Stop after a checkpoint, when submitit announces the end of the job's time, and go on later."""
        import submitit

        self.worker.stop()
        until = time.monotonic() + 30
        while self.worker.child is not None and self.worker.child.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        return submitit.helpers.DelayedSubmission(Task(), folder)


class SubmittedJob:
    """A job of submitit."""

    def __init__(self, job: Any, folder: pathlib.Path):
        self.job, self.folder = job, folder

    def alive(self) -> bool:
        return not self.job.done()

    def stop(self) -> None:
        self.job.cancel()


def launcher(
    name: str, folder: pathlib.Path, threads: int, settings: dict[str, str]
) -> Callable[[pathlib.Path], Handle]:
    """Return what starts the job of a folder; ConfigError if this machine cannot use the launcher."""
    if name == "local":
        return LocalJob
    if importlib.util.find_spec("submitit") is None:
        raise ConfigError(f'--launcher {name} needs submitit, which is not installed: pip install -e ".[dist]"')
    if name == "slurm" and shutil.which("srun") is None:
        raise ConfigError(
            "--launcher slurm: there is no Slurm on this machine (no srun); --launcher submitit tries it without"
        )
    import submitit

    executor = submitit.AutoExecutor(folder=folder / ".submitit", cluster="slurm" if name == "slurm" else "local")
    defaults = yaml.safe_load((config_dir() / "launcher/slurm.yaml").read_text())["hydra"]["launcher"]
    values = (
        {key: value for key, value in defaults.items() if value is not None} | {"cpus_per_task": threads} | settings
    )
    values.pop("max_num_timeout", None)
    delay = values.pop("signal_delay_s", None)
    if name == "slurm":
        values["slurm_signal_delay_s"] = delay
    values = {RENAMED.get(key, key): yaml.safe_load(str(value)) for key, value in values.items()}
    if name == "submitit":
        values = {key: value for key, value in values.items() if not key.startswith("slurm_")}
    try:
        executor.update_parameters(**values)
    except (NameError, TypeError, ValueError) as error:
        raise ConfigError(f"--launcher {name}: {' '.join(str(error).split())}") from error

    def launch(run: pathlib.Path) -> Handle:
        job = executor.submit(Task(), str(run))
        return SubmittedJob(job, run)

    return launch
