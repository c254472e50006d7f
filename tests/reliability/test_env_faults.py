"""Environments that raise, die or hang: what is played again, what is lost, and that nothing is left behind."""

import logging
import os
import pathlib
import signal
import subprocess
import sys
import time

import imageio.v3 as iio
import pytest
import torch

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.env_runner import rollout
from diffusion_policy.env_runner.base_lowdim_runner import BaseLowdimRunner
from diffusion_policy.env_runner.pusht_runner import PushTRunner
from diffusion_policy.env_runner.pusht_state_runner import PushTStateRunner
from tests.faulty_env import FaultyEnv, misconfigured
from tests.util import ROOT

SEED = 100001  # of the episode that fails
DEATHS = {
    "kill": "was killed by SIGKILL",
    "segfault": "was killed by SIGSEGV",
    "exit": "exited with code 3",
    "sys.exit": "exited with code 4",
}
RAISES = {
    "raise": "raised OSError in step: no more physics",
    "raise what cannot be pickled": "raised Local in step: of no module",
}
HANGS = {"hang": "gave no answer for 2 s", "hang, deaf to signals": "gave no answer for 2 s"}
FAULTS = DEATHS | RAISES | HANGS


class FaultyRunner(PushTRunner, BaseLowdimRunner):
    def __init__(self, output_dir, faults, **rollouts):
        (pathlib.Path(output_dir) / "counts").mkdir()
        defaults = dict(
            n_train=0,
            n_train_vis=0,
            n_test=2,
            n_test_vis=0,
            test_start_seed=100000,
            max_steps=16,
            n_obs_steps=2,
            n_action_steps=8,
            vector="async",
            worker_timeout=20.0,
        )
        super().__init__(
            output_dir,
            FaultyEnv,
            {"folder": f"{output_dir}/counts", "faults": dict(faults)},
            **{**defaults, **rollouts},
        )

    policy_input = PushTStateRunner.policy_input


class Policy:
    """Aims beside the block, a little off at random, so that scores depend on the random numbers of torch."""

    device, dtype = torch.device("cpu"), torch.float32

    def reset(self):
        pass

    def predict_action(self, obs_dict):
        block = obs_dict["obs"][:, -1:, 2:4]
        return {"action": block + 30 * torch.randn(len(block), 8, 2)}


def play(runner):
    torch.manual_seed(0)
    return runner.run(Policy())


def descendants(pid=None):
    """Processes below this one; those of environments are below the fork server."""
    parents = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # ended meanwhile
            continue
    found, last = set(), {pid or os.getpid()}
    while last:
        last = {child for child, parent in parents.items() if parent in last}
        found |= last
    return found


def gone(before):
    """Whether every process started since `before` ends within moments; those of videos finish their file first."""
    deadline = time.monotonic() + 5
    while descendants() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    return not descendants() - before


@pytest.fixture(scope="module")
def scores(tmp_path_factory):
    """What an evaluation without faults gives; also starts the fork server, which stays."""
    runner = FaultyRunner(str(tmp_path_factory.mktemp("plain")), {})
    log = play(runner)
    runner.close()
    assert "test/mean_score" in log and runner.lost == []
    return log


@pytest.fixture
def leaks_nothing(scores):
    before, files = descendants(), len(os.listdir("/proc/self/fd"))
    yield
    assert gone(before)
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_that_does_not_return_changes_nothing(tmp_path, scores, leaks_nothing, caplog, kind):
    runner = FaultyRunner(str(tmp_path), {SEED: [kind, 9, 1]}, n_test_vis=2)
    if kind in HANGS:
        runner._get_slots(2).timeout = 2.0  # of these only: building new ones may take longer on a busy machine
    log = play(runner)
    assert {key: value for key, value in log.items() if "video" not in key} == scores
    assert runner.lost == [] and len(runner.episodes) == 2
    videos = [pathlib.Path(log[f"test/sim_video_{seed}"]) for seed in (100000, SEED)]
    assert [len(iio.imread(video)) for video in videos] == [16, 16]
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage().splitlines()[0] for record in warnings] == [
        f"the environment with seed {SEED} {FAULTS[kind]}"
    ]
    assert ("Traceback" in warnings[0].getMessage()) == (kind in RAISES)
    runner.close()
    assert set((tmp_path / "media").iterdir()) == set(videos)  # none of the first try


@pytest.mark.parametrize("kind, vector", [("raise", "sync"), ("raise", "async"), ("kill", "async")])
def test_an_episode_that_always_fails_is_lost_alone_and_there_is_no_mean_over_the_rest(
    tmp_path, scores, leaks_nothing, caplog, kind, vector
):
    runner = FaultyRunner(str(tmp_path), {SEED: [kind, 9, 3]}, vector=vector, n_train=1, n_envs=2)
    log = play(runner)
    assert runner.lost == [{"split": "test", "seed": SEED, "reason": FAULTS[kind]}]
    assert [episode["seed"] for episode in runner.episodes] == [0, 100000]
    assert list(log) == [
        "train/sim_max_reward_0",
        "test/sim_max_reward_100000",
        "train/mean_score",
        "train/final_score",
        "train/ends_still",
        "train/path_length",
        "test/lost_episodes",
    ]
    assert log["test/lost_episodes"] == 1
    assert caplog.text.count("Traceback") == (1 if kind == "raise" else 0)
    loud = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert loud == [f"this evaluation has no test/mean_score: it lost 1 of 2 episodes: seed {SEED} {FAULTS[kind]}"]

    assert (
        runner.n_envs == 2 and "test/mean_score" in play(runner) and runner.lost == []
    )  # the fault is over: three times were enough
    runner.close()


def test_the_number_of_restarts_is_bounded_and_what_was_not_played_is_lost(
    tmp_path, leaks_nothing, monkeypatch, caplog
):
    monkeypatch.setattr(rollout, "MAX_RESTARTS", 3)
    runner = FaultyRunner(
        str(tmp_path),
        {seed: ["raise", 1, 100] for seed in range(100000, 100006)},
        vector="sync",
        n_train=1,
        n_test=6,
        n_envs=6,
    )
    log = play(runner)
    assert log["test/lost_episodes"] == 6 and log["train/mean_score"] == log["train/sim_max_reward_0"]
    assert [episode["reason"].split(":")[0] for episode in runner.lost] == ["raised OSError in step"] * 2 + [
        "was not played"
    ] * 4
    assert sum(count.stat().st_size for count in (tmp_path / "counts").iterdir()) == 4


def test_a_slot_without_an_episode_may_fail_too(tmp_path, caplog):
    runner = FaultyRunner(str(tmp_path), {0: ["raise", "reset", 1]}, vector="sync", n_test=3, n_envs=2)
    assert "test/mean_score" in play(runner) and runner.lost == []
    assert "the environment of an idle slot raised OSError in reset" in caplog.text


@pytest.mark.parametrize("vector", ["sync", "async"])
def test_an_environment_that_cannot_be_built_is_an_error(tmp_path, leaks_nothing, caplog, vector):
    runner = FaultyRunner(str(tmp_path), {None: ["raise", "build", 100]}, vector=vector, n_envs=1)
    with pytest.raises(RuntimeError, match="raised OSError while it was built: no more physics"):
        play(runner)
    assert caplog.text.count("Traceback") == 1
    runner._make_env.args[1]["faults"].clear()
    assert "test/mean_score" in play(runner)
    runner.close()


def test_a_process_that_dies_or_hangs_while_it_is_built(tmp_path, scores, leaks_nothing):
    for i, kind in enumerate(("kill", "hang")):
        (tmp_path / str(i)).mkdir()
        runner = FaultyRunner(str(tmp_path / str(i)), {None: [kind, "build", 1]}, worker_timeout=3.0)
        assert play(runner) == scores
        runner.close()


def test_a_process_that_dies_between_evaluations(tmp_path, scores, leaks_nothing, caplog):
    runner = FaultyRunner(str(tmp_path), {})
    assert play(runner) == scores
    os.kill(runner._slots._processes[1].pid, signal.SIGKILL)
    assert play(runner) == scores
    assert f"seed {SEED} was killed by SIGKILL" in caplog.text
    runner.close()


@pytest.mark.parametrize("vector", ["sync", "async"])
def test_an_error_for_the_user_is_not_played_again(tmp_path, leaks_nothing, vector):
    runner = FaultyRunner(str(tmp_path), {}, vector=vector, n_envs=1)
    runner._make_env = misconfigured
    with pytest.raises(ConfigError, match="no such robot"):
        play(runner)
    assert runner._slots is None


def test_worker_timeout_is_checked(tmp_path):
    with pytest.raises(ConfigError, match="worker_timeout"):
        PushTStateRunner(str(tmp_path), worker_timeout=0)


SCRIPT = """
import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)      # a shell starts background jobs deaf to it
    from tests.reliability.test_env_faults import FaultyRunner

    faults = {int(sys.argv[2]): ["hang, deaf to signals", 1, 100]}
    act = lambda self, obs: print("acting", flush=True) or {"action": obs["obs"][:, :, 2:4]}
    policy = type("Policy", (), dict(device="cpu", reset=lambda self: None, predict_action=act))()
    FaultyRunner(sys.argv[1], faults, worker_timeout=None).run(policy)
"""


def test_ctrl_c_ends_an_evaluation_and_its_processes_at_once(tmp_path):
    """As in a terminal: the signal goes to every process of the group, among them one that hangs and ignores it."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), str(SEED)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
        text=True,
    )
    assert process.stdout.readline() == "acting\n"
    time.sleep(0.3)
    started = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0 and errors.count("Traceback") == 1 and "KeyboardInterrupt" in errors
    deadline = time.monotonic() + 60
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in started) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(started) >= 3 and not any(pathlib.Path(f"/proc/{pid}").exists() for pid in started)
