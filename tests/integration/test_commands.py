"""The commands a user types: train, kill, resume, evaluate, and what they say when something is wrong."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zipfile

import dill
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from diffusion_policy.common.errors import CheckpointError
from diffusion_policy.storage import checkpoint_io
from tests import util
from tests.util import ROOT, equal, write_pusht

ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HYDRA_FULL_ERROR": "0"}
# Everything whose state must survive: dropout (random numbers), accumulation, EMA, schedules of lambda and lr.
BUSY = [
    "preset=debug",
    "size.mlp.p_drop=0.1",
    "training.seed=17",
    "training.gradient_accumulate_every=2",
    "training.steps_per_epoch=30",
    "training.num_epochs=4",
    "training.log_every=5",
    "training.lr_warmup_steps=10",
    "lambda_schedule=ramp",
    "task.env_runner.max_steps=8",
    "task.env_runner.n_test_vis=0",
]


def command(script, *arguments, check=True):
    done = util.command(script, *arguments)
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


def arguments(run, data, *extra):
    return [
        "--config-name=train_idp_mlp_lowdim",
        *BUSY,
        f"task.dataset.zarr_path={data}",
        f"hydra.run.dir={run}",
        *extra,
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_pusht(tmp_path_factory.mktemp("data") / "pusht.zarr")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data):
    """A run that nobody disturbed."""
    run = tmp_path_factory.mktemp("runs") / "undisturbed"
    command("train.py", *arguments(run, data))
    return run


def steps_logged(run):
    path = run / "logs.json.txt"
    if not path.is_file():
        return -1
    lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
    return json.loads(lines[-1])["global_step"] if lines else -1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "asked to stop"])
def test_train_stop_resume_gives_the_same_weights_bit_for_bit(number, tmp_path, data, finished):
    run = tmp_path / "run"
    seed = random.randrange(10**6)
    stop_at = random.Random(seed).randrange(35, 110)
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *arguments(run, data, "training.tqdm_interval_sec=0.1")],
        env=ENV,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    while steps_logged(run) < stop_at and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(number)
    said = process.communicate(timeout=60)[0]
    if number == signal.SIGTERM and process.returncode == 130:
        assert "continue with" in said and str(run) in said
    stopped_at = checkpoint_io.load(run / "checkpoints/latest.ckpt")["attributes"]["global_step"]
    resumed = command("train.py", *arguments(run, data, "training.resume=true", "training.tqdm_interval_sec=0.1"))
    assert f"resuming {run} at step {stopped_at}" in resumed.stdout
    one, other = (checkpoint_io.load(folder / "checkpoints/latest.ckpt") for folder in (finished, run))
    for name in ("model", "ema_model", "optimizer", "lr_scheduler", "ema", "random_state"):
        assert equal(one["state_dicts"][name], other["state_dicts"][name]), (
            f"{name} differs after a stop at {stopped_at} (seed {seed})"
        )
    assert one["attributes"] == other["attributes"]
    # No step is logged twice, and the epochs' records are those of the undisturbed run.
    logs = [
        [json.loads(line) for line in (folder / "logs.json.txt").read_text().splitlines()] for folder in (finished, run)
    ]
    steps = [record["global_step"] for record in logs[1]]
    assert steps == sorted(set(steps))
    ends = [[record for record in log if (record["global_step"] + 1) % 30 == 0] for log in logs]

    def drop_media(records):
        return [{k: v for k, v in r.items() if "video" not in k} for r in records]

    assert len(ends[0]) == 4 and drop_media(ends[0]) == drop_media(ends[1])


def test_evaluation_does_not_disturb_training(tmp_path, data, finished):
    run = tmp_path / "run"
    command(
        "train.py", *arguments(run, data, "training.rollout_every=4", "training.val_every=3", "training.sample_every=2")
    )
    one, other = (
        checkpoint_io.load(folder / "checkpoints/latest.ckpt")["state_dicts"]["model"] for folder in (finished, run)
    )
    assert equal(one, other)


def test_resuming_a_finished_run_trains_no_more(data, finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    before = checkpoint_io.load(run / "checkpoints/latest.ckpt")
    command("train.py", *arguments(run, data, "training.resume=true"))
    assert equal(
        before["state_dicts"]["model"], checkpoint_io.load(run / "checkpoints/latest.ckpt")["state_dicts"]["model"]
    )


def test_top_k_keeps_its_list_over_a_resume(data, finished, tmp_path):
    kept = [path.name for path in (finished / "checkpoints").glob("epoch=*.ckpt")]
    assert 1 <= len(kept) <= 5
    state = checkpoint_io.load(finished / "checkpoints/latest.ckpt")["state_dicts"]["topk"]
    assert sum(name in str(state) for name in kept) == len(kept)


def test_a_run_folder_is_not_overwritten(data, finished):
    before = (finished / "checkpoints/latest.ckpt").read_bytes()
    refused = command("train.py", *arguments(finished, data, "training.resume=false"), check=False)
    assert refused.returncode == 2 and "already holds a run" in refused.stderr
    assert (finished / "checkpoints/latest.ckpt").read_bytes() == before


# ---------------------------------------------------------------------- eval.py
def test_eval_writes_what_it_promises(finished, tmp_path):
    output = tmp_path / "eval"
    said = command(
        "eval.py",
        "--checkpoint",
        finished / "checkpoints/latest.ckpt",
        "--output_dir",
        output,
        "--n_episodes",
        3,
        "--seeds",
        "mip",
    ).stdout
    log = json.loads((output / "eval_log.json").read_text())
    assert "mean score" in said and "p99" in said
    seeds = range(17, 20)  # from the training seed on
    assert [episode["seed"] for episode in log["episodes"]] == list(seeds)
    scores = [log[f"test/sim_max_reward_{seed}"] for seed in seeds]
    assert [episode["max_reward"] for episode in log["episodes"]] == scores
    assert log["test/mean_score"] == pytest.approx(np.mean(scores)) and log["best_score"] == max(scores)
    low, high = log["interval_95"]
    assert low <= log["test/mean_score"] <= high
    assert log["nfe"] == 1 and {"p50", "p90", "p99"} <= log["latency_ms"].keys()
    assert log["versions"]["torch"] == torch.__version__ and log["versions"]["pymunk"]
    again = command(
        "eval.py",
        "--checkpoint",
        finished / "checkpoints/latest.ckpt",
        "--output_dir",
        output,
        "--n_episodes",
        3,
        check=False,
    )
    assert again.returncode == 2 and "--overwrite" in again.stderr
    replaced = command(
        "eval.py",
        "--checkpoint",
        finished / "checkpoints/latest.ckpt",
        "--output_dir",
        output,
        "--n_episodes",
        1,
        "--seeds",
        "heldout",
        "--nfe",
        2,
        "--overwrite",
        "--device",
        "cpu",
    )
    log = json.loads((output / "eval_log.json").read_text())
    assert log["nfe"] == 2 and [episode["seed"] for episode in log["episodes"]] == [100000] and replaced.returncode == 0


@pytest.mark.parametrize(
    "name",
    [
        "train_diffusion_transformer_lowdim_pusht_workspace",
        "train_diffusion_unet_lowdim_workspace",
        "train_naive_drifting_unet_lowdim",
    ],
)
def test_eval_of_other_configurations(name, tmp_path, data):
    run = tmp_path / "run"
    command(
        "train.py",
        f"--config-name={name}",
        "preset=debug",
        "training.num_epochs=0",
        f"task.dataset.zarr_path={data}",
        f"hydra.run.dir={run}",
    )
    command("eval.py", "-c", run / "checkpoints/latest.ckpt", "-n", 2)
    log = json.loads((run / "eval_latest_n2/eval_log.json").read_text())
    assert log["nfe"] == (2 if "diffusion" in name else 1)  # the debug preset denoises in two steps
    assert any(path.suffix == ".mp4" for path in (run / "eval_latest_n2/media").iterdir())
    if "drifting" in name:
        refused = command(
            "eval.py", "-c", run / "checkpoints/latest.ckpt", "-n", 1, "-o", tmp_path / "x", "--nfe", 3, check=False
        )
        assert refused.returncode == 2 and "one network call" in refused.stderr and not (tmp_path / "x").exists()


def test_bad_checkpoints_are_named_and_leave_nothing_behind(finished, tmp_path):
    good = (finished / "checkpoints/latest.ckpt").read_bytes()
    (tmp_path / "truncated.ckpt").write_bytes(good[: len(good) // 2])
    (tmp_path / "noise.ckpt").write_bytes(os.urandom(1000))
    torch.save({"weights": torch.zeros(3)}, tmp_path / "other.ckpt")
    payload = checkpoint_io.load(finished / "checkpoints/latest.ckpt")
    payload["cfg"]["policy"]["model"]["n_emb"] = payload["cfg"]["policy"]["model"]["cond_dim"] = 32
    payload["cfg"]["policy"]["obs_encoder"]["emb_dim"] = 32
    checkpoint_io.save(payload, tmp_path / "size.ckpt")
    for name, message in (
        ("missing", "no checkpoint"),
        ("truncated", "truncated"),
        ("noise", "truncated or not|not a checkpoint"),
        ("other", "not a checkpoint of"),
        ("size", "do not fit"),
    ):
        done = command("eval.py", "-c", tmp_path / f"{name}.ckpt", "-o", tmp_path / "out", check=False)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert any(part in done.stderr for part in message.split("|")), done.stderr
        assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_continued(finished, data, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for path in (run / "checkpoints").glob("epoch=*.ckpt"):
        path.unlink()
    latest = run / "checkpoints/latest.ckpt"
    content = bytearray(latest.read_bytes())
    with zipfile.ZipFile(latest) as archive:
        record = archive.read(max(archive.infolist(), key=lambda entry: entry.file_size))
    content[content.index(record) + len(record) // 2] ^= 1  # one bit of the data; between records it would not matter
    latest.write_bytes(content)
    done = command("train.py", *arguments(run, data, "training.resume=true"))
    assert "damaged" in done.stdout and f"resuming {run} at step 90 of 120 (previous.ckpt)" in done.stdout
    assert (run / "checkpoints/latest.ckpt.damaged").read_bytes() == content
    one, other = (checkpoint_io.load(folder / "checkpoints/latest.ckpt")["state_dicts"] for folder in (finished, run))
    assert all(
        equal(one[name], other[name])
        for name in ("model", "ema_model", "optimizer", "lr_scheduler", "ema", "random_state")
    )


def test_if_no_checkpoint_can_be_read_nothing_is_overwritten(finished, data, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    names = {path.name for path in (run / "checkpoints").glob("*.ckpt")}
    for name in names:
        (run / "checkpoints" / name).write_bytes(b"nothing")
    done = command("train.py", *arguments(run, data, "training.resume=true"), check=False)
    assert done.returncode == 2 and "none of the checkpoints" in done.stderr and "Traceback" not in done.stderr
    assert {path.name for path in (run / "checkpoints").iterdir()} == {f"{name}.damaged" for name in names}


def test_a_second_run_in_the_same_folder_is_refused(data, tmp_path):
    run = tmp_path / "run"
    first = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *arguments(run, data, "training.num_epochs=100000")],
        env=ENV,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while steps_logged(run) < 10 and first.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        second = command("train.py", *arguments(run, data, "training.resume=true"), check=False)
        assert second.returncode == 2 and "another process is training" in second.stderr
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()


def test_a_pickled_checkpoint_runs_no_code_unless_trusted(finished, tmp_path):
    """An upstream checkpoint is a dill pickle; this one would create a file when opened."""
    marker = tmp_path / "executed"

    class Payload:
        def __reduce__(self):
            return os.system, (f"touch {marker}",)

    payload = checkpoint_io.load(finished / "checkpoints/latest.ckpt")
    upstream = {
        "cfg": OmegaConf.create(payload["cfg"]),
        "state_dicts": payload["state_dicts"],
        "pickles": {"epoch": dill.dumps(4), "extra": dill.dumps(Payload())},
    }
    torch.save(upstream, tmp_path / "upstream.ckpt", pickle_module=dill)
    with pytest.raises(CheckpointError, match="--trust-checkpoint"):
        checkpoint_io.load(tmp_path / "upstream.ckpt")
    assert not marker.exists()
    done = command("eval.py", "-c", tmp_path / "upstream.ckpt", "-o", tmp_path / "out", "-n", 1, "--trust-checkpoint")
    assert marker.exists() and "mean score" in done.stdout


# ---------------------------------------------------------------------- train.py
@pytest.mark.parametrize(
    "overrides, message",
    [
        (["task.dataset.zarr_path=/nowhere/pusht.zarr"], "diffusion_policy.scripts.download pusht"),
        (["policy.granularity=chunk"], "per_step, flat, dim"),
        (["+policy.granularty=flat"], "did you mean 'granularity'"),
        (["+training.rollout_evry=2"], "did you mean training.rollout_every"),
        (["policy.tua=1"], "nearest: policy.tau"),
        (["training.device=cuda:0"], "no CUDA device"),
        (["n_action_steps=17"], "horizon"),
        (["training.lr_scheduler=cosin"], "cosine"),
        (["checkpoint.save_last_snapshot=true"], "save_last_snapshot"),
        (["preset=laptop"], "preset"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(overrides, message, tmp_path, data):
    run = tmp_path / "run"
    done = command(
        "train.py",
        "--config-name=train_idp_mlp_lowdim",
        "preset=debug",
        f"task.dataset.zarr_path={data}",
        f"hydra.run.dir={run}",
        *overrides,
        check=False,
    )
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (run / "config.yaml").exists() and not (run / "checkpoints").exists()


def test_a_horizon_the_unet_cannot_halve(tmp_path, data):
    done = command(
        "train.py",
        "--config-name=train_idp_unet_lowdim",
        "horizon=10",
        f"task.dataset.zarr_path={data}",
        f"hydra.run.dir={tmp_path / 'run'}",
        check=False,
    )
    assert done.returncode == 2 and "horizon 10" in done.stderr and "Traceback" not in done.stderr


def test_without_a_configuration_the_help_is_printed():
    done = command("train.py", check=False)
    assert done.returncode == 0 and "objective=" in done.stdout and "train_idp_transformer_lowdim" in done.stdout


def test_multirun_trains_each_job_in_its_own_folder(tmp_path, data):
    command(
        "train.py",
        "--config-name=train_idp_mlp_lowdim",
        "--multirun",
        "preset=debug",
        "training.seed=1,2",
        f"task.dataset.zarr_path={data}",
        f"hydra.sweep.dir={tmp_path}",
        "task.env_runner.n_test_vis=0",
    )
    a, b = (checkpoint_io.load(tmp_path / str(i) / "checkpoints/latest.ckpt") for i in (0, 1))
    assert a["cfg"]["training"]["seed"] == 1 and b["cfg"]["training"]["seed"] == 2
    assert not equal(a["state_dicts"]["model"], b["state_dicts"]["model"])


def test_upstream_s_debug_flag(tmp_path, data):
    run = tmp_path / "run"
    command(
        "train.py",
        "--config-name=train_diffusion_unet_lowdim_workspace",
        "preset=debug",
        "training.debug=true",
        "training.steps_per_epoch=null",
        f"task.dataset.zarr_path={data}",
        f"hydra.run.dir={run}",
    )
    assert checkpoint_io.load(run / "checkpoints/latest.ckpt")["attributes"]["global_step"] == 6


def test_wandb_offline_works_without_a_network(tmp_path, data):
    run = tmp_path / "run"
    done = subprocess.run(
        [
            sys.executable,
            "train.py",
            "--config-name=train_idp_mlp_lowdim",
            "preset=debug",
            "logging.mode=offline",
            f"task.dataset.zarr_path={data}",
            f"hydra.run.dir={run}",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        env={key: value for key, value in ENV.items() if not key.startswith("WANDB")},
    )
    assert done.returncode == 0, done.stderr
    assert list((run / "wandb").glob("offline-run-*"))


def test_without_wandb_one_line_says_what_to_do(tmp_path, data):
    (tmp_path / "wandb.py").write_text("raise ImportError('No module named wandb')")
    done = subprocess.run(
        [sys.executable, "train.py", *arguments(tmp_path / "run", data, "logging.mode=online")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        env={**ENV, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "error: logging.mode=online needs wandb, which is not installed: pip install wandb" in done.stderr


def test_an_evaluation_that_lost_episodes_says_so_and_gives_no_score(finished, tmp_path, monkeypatch, capsys):
    from diffusion_policy.env.pusht.pusht_env import PushTEnv
    from diffusion_policy.scripts import eval as eval_script

    reset = PushTEnv.reset

    def failing(self, *, seed=None, options=None):
        if seed == 18:
            raise OSError("the camera is gone")
        return reset(self, seed=seed, options=options)

    monkeypatch.setattr(PushTEnv, "reset", failing)
    with pytest.raises(SystemExit, match="1"):
        eval_script.main(
            [
                "-c",
                str(finished / "checkpoints/latest.ckpt"),
                "-o",
                str(tmp_path / "out"),
                "-n",
                "3",
                "--seeds",
                "mip",
                "-d",
                "cpu",
            ]
        )
    assert "1 of 3 episodes could not be run (seeds 18)" in capsys.readouterr().err
    log = json.loads((tmp_path / "out/eval_log.json").read_text())
    assert (
        "test/mean_score" not in log
        and "interval_95" not in log
        and [episode["seed"] for episode in log["episodes"]] == [17, 19]
    )
    assert "the camera is gone" in log["lost"][0]["reason"]
