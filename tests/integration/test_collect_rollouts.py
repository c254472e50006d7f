"""Demonstrations from policies, and those that come with the repository."""

import functools
import types

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
    cfg = load_config(
        "train_idp_mlp_lowdim",
        "preset=debug",
        "training.num_epochs=0",
        f"task.dataset.zarr_path={data}",
        "task.env_runner.n_test_vis=0",
    )
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
    assert "not human" in attributes["description"] and attributes["episode_seeds"] == [1000000, 1000001, 1000002]
    assert attributes["policies"][0]["policy"].endswith("IDPPolicy")
    with pytest.raises(SystemExit, match="exists already"):
        collect_rollouts.main(["-c", str(checkpoint), "-n", "3", "-o", str(tmp_path / "demos.zarr")])


def test_noise_moves_a_chunk_as_a_whole():
    chunks = []
    for noise in (0.0, 5.0):
        episode = collect_rollouts.Episode(3, types.SimpleNamespace(n_obs_steps=1, obs_dim=5))
        for _ in range(2):
            episode.act(np.full((4, 2), 250.0), max_steps=100, noise=noise)
        chunks.append(np.stack(episode.record["action"]))
    moved = (chunks[1] - chunks[0]).reshape(2, 4, 2)
    assert np.abs(moved - moved[:, :1]).max() < 1e-4  # equal within a chunk
    assert (np.abs(moved[:, 0]) > 1e-2).all() and np.abs(moved[0] - moved[1]).min() > 1e-2  # another next


def test_policies_that_never_succeed_are_reported(checkpoint, tmp_path):
    with pytest.raises(SystemExit, match="none of"):
        collect_rollouts.main(
            ["-c", str(checkpoint), "-n", "1", "-o", str(tmp_path / "demos.zarr"), "--max_steps", "2"]
        )
    assert not (tmp_path / "demos.zarr").exists()


def test_the_shipped_demonstrations_are_successes_of_this_environment():
    """Replaying recorded actions from the recorded seeds gives the recorded states, and reaches the goal."""
    buffer = ReplayBuffer.copy_from_path(str(SHIPPED))
    attributes = dict(zarr.open_group(str(SHIPPED), mode="r").attrs)
    assert buffer.n_episodes == len(attributes["episode_seeds"]) == 600 and "not human" in attributes["description"]
    assert min(attributes["episode_seeds"]) >= 1_000_000  # apart from the seeds of demonstrators and evaluations
    env = PushTEnv()
    for index in range(0, 600, 120):
        episode = buffer.get_episode(index)
        obs, _ = env.reset(seed=attributes["episode_seeds"][index])
        for state, action in zip(episode["state"], episode["action"]):
            np.testing.assert_allclose(obs, state, atol=0.5)
            obs, reward, *_ = env.step(action.astype(np.float64))
        assert reward > 0.97  # float32 actions land very near where float64 ones did


def test_a_study_s_table_ranks_and_keeps_its_commands():
    row = {
        "name": "b",
        "score": 0.5,
        "interval_95": [0.4, 0.6],
        "nfe": 1.0,
        "steps": 100,
        "step_ms": 50.0,
        "inference_ms": 1.0,
    }
    text = study.table(
        [row, {**row, "name": "a", "score": 0.7}, {**row, "name": "untrained", "score": 0.1, "step_ms": None}]
    )
    lines = text.splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == ["a", "b", "untrained"]
    assert "| 50 |" in lines[0] and "| - |" in lines[2]


GRID = {
    "name": "grid",
    "eval": None,
    "grid": {"tasks": {"push": "hard", "reach": ""}, "methods": {"A": "train_a", "B": "train_b x=1"}, "seeds": [0, 1]},
    "paper": {"A": {"push": 60, "reach": 30}},
}


def test_a_grid_is_all_tasks_and_methods_with_the_first_seed_then_with_the_next():
    runs = study.runs_of(GRID)
    assert [run.name for run in runs[:5]] == ["push A 0", "push B 0", "reach A 0", "reach B 0", "push A 1"]
    assert len(runs) == 8 and all(run.evaluations == {} for run in runs)
    assert runs[1].arguments == ["train.py", "--config-name=train_b", "task.name=push", "training.seed=0", "x=1"]


def test_a_grid_s_table_averages_seeds_and_says_what_is_missing():
    row = {"nfe": None, "step_ms": None, "inference_ms": None}
    rows = [
        {**row, "name": f"push {method} {seed}", "mean_of_best": 0.5 + 0.1 * seed, "score": 0.2 * seed}
        for method in "AB"
        for seed in (0, 1)
    ]
    rows += [
        {
            **row,
            "name": "reach A 0",
            "mean_of_best": 0.3,
            "score": 0.35,
            "nfe": 1.0,
            "step_ms": 40.0,
            "inference_ms": 2.0,
        }
    ]
    lines = study.grid_table(GRID, rows).splitlines()
    assert lines[0] == "| task | A | B | paper: A |" and lines[2] == "| push (hard) | 55 / 10 | 55 / 10 | 60 |"
    assert (
        lines[3] == "| reach | 30 / 35 (of 1 seed) | - | 30 |"
        and lines[4] == "| mean of the 1 complete tasks | 55 / 10 | 55 / 10 | 60 |"
    )
    assert lines[-1] == "| A | 1 | 40 | 2.0 |"
