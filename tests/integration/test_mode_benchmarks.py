"""The bimodal PushT and the measures of modes: experts reach both sides, and a measure sees what it should."""

import json

import numpy as np
import pytest
import torch

from benchmarks import bimodal_pusht, mode_coverage
from benchmarks.bimodal_pusht import to_axes, to_window
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.env.pusht.pusht_env import PushTEnv


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "bimodal.zarr"
    bimodal_pusht.main(["--pairs", "4", "--seed", "3", "--output", str(path)])
    buffer = ReplayBuffer.copy_from_path(str(path))
    return path, [buffer.get_episode(i) for i in range(buffer.n_episodes)]


def test_coordinates_are_those_of_the_symmetry():
    points = np.random.default_rng(0).uniform(0, 512, (5, 2))
    np.testing.assert_allclose(to_window(to_axes(points)), points)
    np.testing.assert_allclose(to_axes(512 - points[:, ::-1]), to_axes(points) * [1, -1], atol=1e-9)


def test_one_half_goes_left_and_one_half_right_from_the_same_observation(demonstrations):
    _, episodes = demonstrations
    assert len(episodes) == 8
    sides = [np.sign(to_axes(episode["state"][:, :2])[:, 1][len(episode["state"]) // 4]) for episode in episodes]
    assert sorted(sides) == [-1] * 4 + [1] * 4
    for one, other in zip(episodes[::2], episodes[1::2], strict=True):
        np.testing.assert_allclose(one["state"][0], other["state"][0], atol=1e-3)


def test_the_mirror_image_of_a_demonstration_solves_the_task(demonstrations):
    for episode in demonstrations[1][:2]:
        env = PushTEnv()
        env.reset(options={"state": episode["state"][0]})
        done = [env.step(action)[2] for action in episode["action"]]
        assert done[-1] and not any(done[:-1])


def test_sides_of_chunks_and_where_they_are_open():
    start = bimodal_pusht.start(np.random.default_rng(0))
    behind = start.copy()
    behind[:2] = to_window(to_axes(start[2:4]) - [60, 0])
    assert mode_coverage.around_the_block(torch.tensor(np.stack([start, behind]))).tolist() == [True, False]
    v = np.array([80.0, -80.0, 3.0])
    chunks = torch.tensor(np.stack([np.tile(to_window(np.array([0.0, x])), (16, 1)) for x in v]))
    assert mode_coverage.sideways(chunks).tolist() == [1, -1, 0]
    qpos = torch.tensor(
        [[0.02, 0, 0, 0, 0, 0, 0.5], [0.3, 0, 0, 0, 0, 0, 0.5], [0.02, 0, 0, 0, 0, 0, 1.0], [0.02, 0, 0, 0, 0, 0, 0.3]]
    )
    assert mode_coverage.above_the_plate(qpos).tolist() == [True, False, False, False]
    assert mode_coverage.waist(qpos[:2, None]).tolist() == [0, 1]


def test_a_run_is_trained_measured_reported_and_not_repeated(demonstrations, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mode_coverage, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(mode_coverage, "EPISODES", 3)
    monkeypatch.setattr(mode_coverage, "DATASETS", {})
    monkeypatch.setattr(bimodal_pusht, "DATA", demonstrations[0])
    methods = ["idp_multimodal", "idp_multimodal_likeliest"]
    arguments = ["--tasks", "pusht", "--seeds", "0", "--steps", "2", "--output", str(tmp_path / "results")]
    mode_coverage.main([*arguments, "--methods", *methods])
    rows = json.loads((tmp_path / "results/results.json").read_text())["rows"]
    assert [row["method"] for row in rows] == methods and all(row["nfe"] == 1 for row in rows)
    for row in rows:
        assert 0 <= row["left"] + row["right"] <= row["success"] <= 1
        assert row["dataset"]["sha256"] and "objective=idp_multimodal" in row["command"]
    text = (tmp_path / "results/README.md").read_text()
    assert "IDP multimodal, likeliest code" in text and "3 starts" in text
    assert len(list((tmp_path / "runs").iterdir())) == 1  # both act with the same checkpoint
    monkeypatch.setattr(mode_coverage, "play", lambda *_: pytest.fail("made again"))
    mode_coverage.main([*arguments, "--methods", *methods])
    capsys.readouterr()
    with pytest.raises(SystemExit):
        mode_coverage.main(["--methods", "idp_multimodl"])


def test_valid_chunks_are_those_that_experts_do(demonstrations, monkeypatch):
    """Experts' own chunks are valid, and the mean of left and right is not."""
    path, _ = demonstrations
    monkeypatch.setattr(bimodal_pusht, "DATA", path)
    monkeypatch.setattr(mode_coverage, "DATASETS", {})
    mode_coverage.load_experts("pusht")
    task = mode_coverage.TASKS["pusht"]

    class Policy:
        n_obs_steps, horizon = 2, 16
        normalizer = dict.fromkeys(("obs", "action"), type("Unit", (), {"normalize": staticmethod(lambda x: x / 256)}))

    seen, chunks, _ = mode_coverage.windows(task, Policy)
    assert mode_coverage.validity(task, Policy, seen, chunks) > 0.9
    mean = torch.stack([chunks, 512 - chunks.flip(-1)]).mean(0)
    first = torch.tensor(to_axes(seen[:, :2].numpy())[:, 0] > to_axes(seen[:, 2:4].numpy())[:, 0] + 150)
    assert mode_coverage.validity(task, Policy, seen[first], mean[first]) < 0.5
    assert mode_coverage.validity(task, Policy, seen[:0], chunks[:0]) is None
