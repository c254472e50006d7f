"""Training over several processes that share a batch: real ones, on the CPU, started as a user starts them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from diffusion_policy.common.batch_stream import BatchStream
from diffusion_policy.common.errors import ConfigError
from diffusion_policy.storage import checkpoint_io
from diffusion_policy.workspace import distributed
from tests import rank_steps
from tests.util import ROOT, train_here, write_pusht

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HYDRA_FULL_ERROR": "0"}
SMALL = ["preset=debug", "task.env_runner.max_steps=8", "task.env_runner.n_test_vis=0"]


def launched(*command, timeout=180, **environment):
    """(exit code, output) of a command line."""
    done = subprocess.run(
        [*map(str, command)], env=ENV | environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_pusht(tmp_path_factory.mktemp("data") / "pusht.zarr")


# ---------------------------------------------------------------------- the same numbers
@pytest.fixture(scope="module")
def results(tmp_path_factory, data):
    """What two ranks computed, and what one process did, by case."""
    path = tmp_path_factory.mktemp("steps") / "steps.pt"
    code, output = launched(*TORCHRUN, "-m", "tests.rank_steps", path, data)
    assert code == 0, output
    return torch.load(path), {name: rank_steps.steps(*case, data=data) for name, case in rank_steps.CASES.items()}


@pytest.mark.parametrize("case", rank_steps.CASES)
def test_two_ranks_compute_what_one_process_does(results, case):
    ranks, one = (result[case] for result in results)
    assert ranks.keys() == one.keys() and any(key.startswith("gradient 2") for key in one)
    assert torch.equal(ranks["random numbers"], one["random numbers"])
    for key in one:
        torch.testing.assert_close(
            ranks[key], one[key], rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )


# ---------------------------------------------------------------------- runs
@pytest.fixture(scope="module")
def finished(tmp_path_factory, data):
    """A run of two ranks, from beginning to end, and its output."""
    run = tmp_path_factory.mktemp("runs") / "ranks"
    code, output = launched(*TORCHRUN, "train.py", *arguments(run, data))
    assert code == 0, output
    return run, output


def arguments(run, data, *extra):
    return [
        "--config-name=train_idp_mlp_lowdim",
        *SMALL,
        f"task.dataset.zarr_path={data}",
        f"hydra.run.dir={run}",
        *extra,
    ]


def weights(path):
    states = checkpoint_io.load(path)["state_dicts"]
    return {f"{name} {key}": value for name in ("model", "ema_model") for key, value in states[name].items()}


def assert_close(one, other):
    assert one.keys() == other.keys()
    for key in one:
        torch.testing.assert_close(one[key], other[key], rtol=1e-3, atol=1e-5)


def test_the_main_rank_alone_logs_saves_and_evaluates(finished):
    run, output = finished
    records = [json.loads(line) for line in (run / "logs.json.txt").read_text().splitlines()]
    assert [record["global_step"] for record in records] == list(range(8))
    assert json.loads((run / "summary.json").read_text())["evaluations"] == 2
    assert output.count("2 ranks, 8 windows each") == 1 and output.count("epoch 1, step 8/8") == 1
    assert not any("rank" in path.name for path in run.iterdir())


def test_a_run_is_continued_by_another_number_of_ranks(finished, data, tmp_path):
    run, _ = finished
    whole, _ = train_here(
        tmp_path / "one", arguments("", data)[0].split("=")[1], *SMALL, f"task.dataset.zarr_path={data}"
    )
    assert_close(weights(run / "checkpoints/latest.ckpt"), weights(whole.get_checkpoint_path()))
    half = tmp_path / "half"
    (half / "checkpoints").mkdir(parents=True)
    shutil.copy(run / "checkpoints/previous.ckpt", half / "checkpoints/latest.ckpt")  # after the first of two epochs
    resumed, _ = train_here(half, "train_idp_mlp_lowdim", *SMALL, f"task.dataset.zarr_path={data}")
    assert resumed.global_step == 8
    assert_close(weights(run / "checkpoints/latest.ckpt"), weights(resumed.get_checkpoint_path()))


def test_accelerate_continues_a_run_of_one_process(data, tmp_path):
    settings = (*SMALL, f"task.dataset.zarr_path={data}")
    whole, _ = train_here(tmp_path / "whole", "train_idp_mlp_lowdim", *settings)
    half = tmp_path / "half"
    (half / "checkpoints").mkdir(parents=True)
    shutil.copy(tmp_path / "whole/checkpoints/previous.ckpt", half / "checkpoints/latest.ckpt")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"]
    launch += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]
    code, output = launched(*launch, "train.py", *arguments(half, data))
    assert code == 0 and "2 ranks, 8 windows each" in output and "at step 4 of 8" in output, output
    assert_close(weights(half / "checkpoints/latest.ckpt"), weights(whole.get_checkpoint_path()))


def test_ctrl_c_stops_all_ranks_after_a_step_and_saves(data, tmp_path):
    command = [*TORCHRUN, "train.py", *arguments(tmp_path, data, "training.steps_per_epoch=100000")]
    process = subprocess.Popen(command, env=ENV, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while not (tmp_path / "logs.json.txt").is_file() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and "stopped at step" in output and "torchrun --nproc-per-node=2" in output
    assert 0 < checkpoint_io.load(tmp_path / "checkpoints/latest.ckpt")["attributes"]["global_step"] < 100000


@pytest.mark.parametrize("rank, fault", [(1, "raises"), (1, "killed"), (0, "raises")])
def test_the_fault_of_one_rank_ends_all_and_loses_nothing(rank, fault, data, tmp_path):
    settings = arguments(tmp_path, data, "policy._target_=tests.rank_steps.FailingPolicy")
    settings[0] = "--config-name=train_mip_mlp_lowdim"
    code, output = launched(*TORCHRUN, "train.py", *settings, timeout=240, FAULT=f"{rank} {fault}")
    latest = tmp_path / "checkpoints/latest.ckpt"
    assert time.time() - latest.stat().st_mtime < 60  # the fault is in the step after the checkpoint
    assert code != 0 and ("RuntimeError: a fault of one rank" in output if fault == "raises" else "SIGKILL" in output)
    if rank:
        assert output.count("error: another rank ended, so rank 0 cannot go on") == 1 and "gloo" not in output
    saved = checkpoint_io.load(latest, check_config=False)
    assert saved["attributes"]["global_step"] == 4


# ---------------------------------------------------------------------- what cannot work
def test_an_unequal_batch_is_one_line(data, tmp_path):
    code, output = launched(*TORCHRUN, "train.py", *arguments(tmp_path, data, "dataloader.batch_size=15"))
    assert code != 0 and output.count("error: ") == 1
    assert "batch_size=15 is the batch of all ranks, and 2 of them cannot share it equally: choose a multiple" in output


def test_each_rank_needs_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="3 ranks on this machine, but 2 GPUs: start one rank per GPU"):
        distributed.rank_device("auto")
    assert distributed.rank_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="no MPS|one device"):
        distributed.rank_device("mps")


def test_without_accelerate_the_launcher_cannot_be_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"training over 2 ranks needs accelerate: pip install .*\[dist\]"):
        distributed.Ranks("cpu")


def test_one_process_does_not_import_accelerate():
    code = "import sys, diffusion_policy.workspace.train_workspace; assert 'accelerate' not in sys.modules"
    assert launched(sys.executable, "-c", code)[0] == 0


# ---------------------------------------------------------------------- batches and noise
class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, index):
        return {"x": torch.tensor(index)}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_the_batches_of_one_process(ranks):
    one = BatchStream(Numbers(), batch_size=8, seed=3).batches()
    parts = [BatchStream(Numbers(), batch_size=8, seed=3, rank=r, ranks=ranks).batches() for r in range(ranks)]
    for number in range(4):
        whole, shares = next(one)["x"], [next(part)["x"] for part in parts]
        assert len({len(share) for share in shares}) == 1
        together = torch.stack(shares, dim=1).flatten()
        assert torch.equal(together[: len(whole)], whole)  # the first rows of a rank are among the first of the batch
        if number % 2:  # the last batch of a pass has 3: filled with its first windows
            assert torch.equal(together[3:], whole[: len(together) - 3])


def test_noise_of_the_ranks_is_that_of_the_whole_batch():
    draws = (
        lambda n: torch.randn_like(torch.zeros(n, 3, 2)),
        lambda n: torch.rand(n),
        lambda n: torch.randint(0, 100, (n,)),
        lambda n: torch.randn(n * 5, 2),  # several per row
        lambda n: torch.randn(n // 2, 2),  # for the first half of the rows
        lambda n: torch.randperm(16),
        lambda n: torch.rand(()),
    )
    torch.manual_seed(5)
    whole = [draw(8) for draw in draws]
    parts = []
    for rank in range(2):
        noise = distributed.BatchNoise(rank, 2, torch.device("cpu"))
        noise.generators["cpu"].manual_seed(5)
        noise.rows = 4
        with noise:
            parts.append([draw(4) for draw in draws])
    for i, expected in enumerate(whole):
        if i < 5:
            rows = 8 if i < 4 else 4
            together = (
                torch.stack([p[i].unflatten(0, (rows // 2, -1)) for p in parts], dim=1).flatten(0, 1).flatten(0, 1)
            )
            assert torch.equal(together.view_as(expected), expected)
        else:
            assert all(torch.equal(part[i], expected) for part in parts)
