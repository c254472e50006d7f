"""Sweeps in other processes: `--multirun` with launcher=local, and with submitit, as on a cluster."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from diffusion_policy.common import config_util
from diffusion_policy.common.errors import ConfigError
from diffusion_policy.scripts import train as train_script
from diffusion_policy.storage import checkpoint_io
from diffusion_policy.workspace import signals
from diffusion_policy.workspace.sweep import Outcomes, Sweep
from tests.util import ROOT, equal, train_here, wait_for, write_pusht

RUN = ("--config-name=train_idp_mlp_lowdim", "preset=debug", "task.env_runner=null")


def sweep(folder, *arguments):
    data = write_pusht(folder.parent / "pusht.zarr")
    return subprocess.Popen(
        [sys.executable, "train.py", *RUN, "--multirun", f"task.dataset.zarr_path={data}"]
        + [f"hydra.sweep.dir={folder}", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_runs_side_by_side_end_in_one_table(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    process = sweep(tmp_path / "sweep", "launcher=local", "policy.tau=-1,1")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 1 and "Traceback" not in out, out
    table = out[out.index("2 runs, 1 failed") :].splitlines()
    assert re.match(r"  policy.tau=-1 +failed: policy cannot be built: tau=-1 must be above 0", table[1])
    assert re.match(r"  policy.tau=1 +done, no score", table[2])
    assert (tmp_path / "sweep/1/checkpoints/latest.ckpt").exists()


def test_the_outcomes_of_an_earlier_sweep_do_not_count(tmp_path, monkeypatch):
    def settings(number, launcher="hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"):
        folder = tmp_path / str(number)
        folder.mkdir(exist_ok=True)
        return OmegaConf.create(
            {
                "overrides": {"task": [f"training.seed={number}"]},
                "runtime": {"output_dir": str(folder)},
                "job": {"num": number},
                "launcher": {"_target_": launcher},
            }
        )

    monkeypatch.setattr(Sweep, "folder", None)
    worker = Sweep()  # in each process of a sweep there is one
    worker.add(settings(7), "of an earlier sweep", failed=True)
    Outcomes().on_multirun_start(OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}}))
    for number in (10, 2):
        worker.add(settings(number), f"score {number}", failed=False)
    sweep = Sweep()
    sweep.collect()
    assert [member.outcome for member in sweep.members] == ["score 2", "score 10"] and sweep.failures == 0


def children(process):
    text = pathlib.Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(word) for word in text.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_preempted_job_is_requeued_and_resumes_exactly(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    steps = ("training.steps_per_epoch=300", "training.num_epochs=2", "training.log_every=1")
    process = sweep(tmp_path / "sweep", "launcher=submitit", *steps)
    try:
        log = tmp_path / "sweep/0/logs.json.txt"
        wait_for(lambda: log.exists() and log.read_text().count("\n") > 3, process)
        (job,) = children(process.pid)
        (task,) = children(job)
        os.kill(task, signal.SIGUSR2)
        out, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0 and "1 runs, 0 failed" in out, out
    (printed,) = (tmp_path / "sweep/.submitit").glob("*/*_log.out")
    stopped = re.search(r"resuming .* at step (\d+) of 600", printed.read_text())
    assert "preempted: the job is queued again" in printed.read_text() and 0 < int(stopped[1]) < 600
    whole, _ = train_here(tmp_path / "whole", "train_idp_mlp_lowdim", *RUN[1:], *steps, data_path(tmp_path))
    resumed = checkpoint_io.load(tmp_path / "sweep/0/checkpoints/latest.ckpt")["state_dicts"]
    for name in ("model", "ema_model", "optimizer"):
        assert equal(resumed[name], getattr(whole, name).state_dict()), name
    records = [json.loads(line)["global_step"] for line in log.read_text().splitlines()]
    assert records == list(range(600))  # no step is missing or logged twice


def data_path(folder):
    return f"task.dataset.zarr_path={folder / 'pusht.zarr'}"


# ---------------------------------------------------------------------- the preemption signal
@pytest.fixture
def requeued():
    """Signals that the handler of a cluster's job received."""
    calls = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: calls.append(number))
    yield calls
    signal.signal(signal.SIGUSR2, before)


def test_a_job_is_requeued_after_its_checkpoint(requeued, capsys):
    with signals.StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert stop.requested and not requeued
    assert requeued == [signal.SIGUSR2] and "preempted" in capsys.readouterr().out
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    with pytest.raises(ValueError, match="broken"), signals.StopRequest():
        os.kill(os.getpid(), signal.SIGUSR2)
        raise ValueError("broken")
    assert len(requeued) == 1  # a run that fails is not repeated


def test_a_job_in_a_long_evaluation_is_requeued_in_time(requeued, monkeypatch):
    monkeypatch.setattr(signals, "PATIENCE", 0.05)
    with signals.StopRequest():
        os.kill(os.getpid(), signal.SIGUSR2)
        deadline = time.monotonic() + 10
        while not requeued and time.monotonic() < deadline:
            time.sleep(0.01)
        assert requeued == [signal.SIGUSR2]


# ---------------------------------------------------------------------- mistakes
def test_a_launcher_that_cannot_be_used_is_one_line(monkeypatch):
    def refused(text, *arguments):
        with pytest.raises(ConfigError, match=re.escape(text)):
            train_script.check_launcher(arguments)

    refused("launcher=local starts the runs of a sweep: add --multirun", "launcher=local")
    monkeypatch.setattr(train_script.shutil, "which", lambda name: None)
    refused("there is no Slurm on this machine", "launcher=slurm", "--multirun")
    train_script.check_launcher(["launcher=submitit", "-m"])
    train_script.check_launcher(["launcher=basic", "training.seed=1"])
    monkeypatch.setattr(train_script, "LAUNCHERS", {"local": ("hydra-x", "hydra_plugins.not_there")})
    refused('launcher=local needs hydra-x, which is not installed: pip install -e ".[dist]"', "launcher=local", "-m")
    assert not train_script.installed("no_such_package.module")


# ---------------------------------------------------------------------- configs
def composed(name, launcher):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    with initialize_config_dir(str(ROOT / "config"), version_base=None):
        return compose(name, overrides=["preset=debug", f"launcher={launcher}"], return_hydra_config=True)


def without_hydra(cfg):
    return {key: value for key, value in OmegaConf.to_container(cfg, resolve=False).items() if key != "hydra"}


@pytest.mark.parametrize("name", ["train_idp_mlp_lowdim", "train_diffusion_unet_lowdim_workspace"])
def test_launchers_change_how_runs_start_and_not_what_they_train(name):
    plain = composed(name, "basic")
    for launcher, target in (("local", "Joblib"), ("slurm", "Slurm"), ("submitit", "Local")):
        cfg = composed(name, launcher)
        assert cfg.hydra.launcher._target_.endswith(f"{target}Launcher")
        assert without_hydra(cfg) == without_hydra(plain)
    slurm = composed(name, "slurm")
    assert slurm.hydra.launcher.max_num_timeout > 0 and slurm.training.resume  # a job continues after its time
    assert slurm.hydra.launcher.signal_delay_s > signals.PATIENCE


def test_parallel_runs_fit_the_cores_and_the_memory(monkeypatch):
    joblib = pytest.importorskip("joblib")
    monkeypatch.setattr(joblib, "cpu_count", lambda: 8)
    for free, runs in ((100, 8), (7, 3), (1, 1)):
        monkeypatch.setattr(config_util, "available_bytes", lambda free=free: free * 2**30)
        assert config_util.parallel_runs(2) == runs
