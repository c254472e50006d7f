"""Demonstrations from policies, and those that come with the repository."""
import functools

import numpy as np
import pytest
import zarr

from benchmarks import study
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.env.pusht.pusht_env import PushTEnv
from diffusion_policy.env.pusht.pusht_keypoints_env import PushTKeypointsEnv
from diffusion_policy.scripts import collect_rollouts
from diffusion_policy.workspace.train_workspace import TrainWorkspace
from tests.util import ROOT, load_config, write_pusht

SHIPPED = ROOT / "data/demos/pusht_policy_rollouts.zarr"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    data = write_pusht(folder / "pusht.zarr")
    cfg = load_config("train_idp_mlp_lowdim", "preset=debug", "training.num_epochs=0", f"task.dataset.zarr_path={data}", "task.env_runner.n_test_vis=0")
    return TrainWorkspace(cfg, output_dir=str(folder / "run")).run()["checkpoint"]


def test_successes_are_kept_with_what_made_them(checkpoint, tmp_path, monkeypatch):
    """An untrained policy succeeds where the block already lies on the goal."""
    easy = functools.partial(PushTKeypointsEnv, reset_to_state=[100.0, 100.0, 256.0, 256.0, np.pi / 4])
    monkeypatch.setattr(collect_rollouts, "PushTKeypointsEnv", easy)
    collect_rollouts.main(["-c", str(checkpoint), "-n", "3", "-o", str(tmp_path / "demos.zarr"), "--max_steps", "8"])
    buffer = ReplayBuffer.copy_from_path(str(tmp_path / "demos.zarr"))
    assert buffer.n_episodes == 3 and set(buffer.keys()) == {"state", "keypoint", "action"}
    np.testing.assert_allclose(buffer["state"][0], [100, 100, 256, 256, np.pi / 4], atol=1e-3)
    attributes = dict(zarr.open_group(str(tmp_path / "demos.zarr"), mode="r").attrs)
    assert "not human" in attributes["description"] and attributes["episode_seeds"] == [200000, 200001, 200002]
    assert attributes["policies"][0]["policy"].endswith("IDPPolicy")
    with pytest.raises(SystemExit, match="exists already"):
        collect_rollouts.main(["-c", str(checkpoint), "-n", "3", "-o", str(tmp_path / "demos.zarr")])


def test_policies_that_never_succeed_are_said(checkpoint, tmp_path):
    with pytest.raises(SystemExit, match="none of"):
        collect_rollouts.main(["-c", str(checkpoint), "-n", "1", "-o", str(tmp_path / "demos.zarr"), "--max_steps", "2"])
    assert not (tmp_path / "demos.zarr").exists()


def test_the_shipped_demonstrations_are_successes_of_this_environment():
    """Replaying recorded actions from the recorded seeds gives the recorded states, and reaches the goal."""
    buffer = ReplayBuffer.copy_from_path(str(SHIPPED))
    attributes = dict(zarr.open_group(str(SHIPPED), mode="r").attrs)
    assert buffer.n_episodes == len(attributes["episode_seeds"]) == 500 and "not human" in attributes["description"]
    assert min(attributes["episode_seeds"]) >= 200000       # apart from the seeds of demonstrators and evaluations
    env = PushTEnv()
    for index in range(0, 500, 100):
        episode = buffer.get_episode(index)
        obs, _ = env.reset(seed=attributes["episode_seeds"][index])
        for state, action in zip(episode["state"], episode["action"]):
            np.testing.assert_allclose(obs, state, atol=0.5)
            obs, reward, terminated, _, _ = env.step(action.astype(np.float64))
        assert reward > 0.97       # float32 actions land within a hair of where float64 ones did


def test_a_study_s_table_ranks_and_keeps_its_commands():
    row = {"name": "b", "score": 0.5, "interval_95": [0.4, 0.6], "nfe": 1.0, "steps": 100, "step_ms": 50.0, "inference_ms": 1.0}
    text = study.table([row, {**row, "name": "a", "score": 0.7}, {**row, "name": "untrained", "score": 0.1, "step_ms": None}])
    lines = text.splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == ["a", "b", "untrained"]
    assert "| 50 |" in lines[0] and "| - |" in lines[2]
