"""Recordings written as a replay buffer and as a LeRobotDataset v3: numbers stay exact."""

import json
import os
import subprocess

import numpy as np
import pytest
import torch

from benchmarks import recordings as make
from diffusion_policy.common.errors import ConfigError, DataError
from diffusion_policy.dataset.conversion import lerobot_tables, lerobot_videos, to_lerobot, to_zarr
from diffusion_policy.dataset.conversion.lerobot_stats import episode_stats, total_stats
from diffusion_policy.dataset.recorded_dataset import RecordedDataset
from diffusion_policy.dataset.recordings import open_recordings
from diffusion_policy.scripts import inspect_data
from tests.util import equal


@pytest.fixture(scope="module")
def lerobot(tmp_path_factory):
    return make.write_lerobot_v2(tmp_path_factory.mktemp("lerobot") / "set")


def same_numbers(first, second):
    assert first.features == second.features and first.lengths == second.lengths and first.fps == second.fps
    assert first.tasks == second.tasks and first.task_of == second.task_of
    for index in range(len(first)):
        one, two = first.episode(index), second.episode(index)
        for key in one:
            assert one[key].dtype == two[key].dtype
            np.testing.assert_array_equal(one[key], two[key])
        np.testing.assert_array_equal(first.timestamps(index), second.timestamps(index))


@pytest.mark.parametrize("split", [False, True])
def test_from_v2_to_zarr_to_v3_and_back(lerobot, tmp_path, monkeypatch, split):
    if split:  # a new file after every episode
        monkeypatch.setattr(lerobot_tables, "FILE_BYTES", 1)
        monkeypatch.setattr(lerobot_videos, "FILE_BYTES", 1)
    original = open_recordings(lerobot)
    to_zarr(original, tmp_path / "a.zarr", images=True, quiet=True)
    buffer = open_recordings(tmp_path / "a.zarr")
    assert buffer.kind == "replay buffer zarr"
    # zarr sorts its arrays
    buffer.features = {key: buffer.features[key] for key in original.features}
    same_numbers(original, buffer)
    to_lerobot(buffer, tmp_path / "v3", images=True, quiet=True)
    again = open_recordings(tmp_path / "v3")
    assert again.kind == "lerobot v3" and again.cameras == original.cameras
    assert len(list((tmp_path / "v3/data").rglob("*.parquet"))) == (3 if split else 1)
    assert len(list((tmp_path / "v3/videos").rglob("*.mp4"))) == (3 if split else 1)
    same_numbers(original, again)
    windows = dict(horizon=6, pad_before=1, pad_after=3)
    batches = [
        RecordedDataset(path, ["observation.state"], "action", **windows).get_batch(torch.arange(20))
        for path in (lerobot, tmp_path / "a.zarr", tmp_path / "v3")
    ]
    assert equal(batches[0], batches[1]) and equal(batches[0], batches[2])
    assert [again.frame_count(index, make.CAMERA) for index in range(3)] == original.lengths
    for index in range(3):
        frames = [np.stack(list(source.frames(index, make.CAMERA))) for source in (original, buffer, again)]
        np.testing.assert_array_equal(frames[0], frames[1])
        assert np.abs(frames[2].astype(int) - frames[1]).mean() < 6


def test_the_g1_recording(g1_recording, tmp_path):
    original = open_recordings(g1_recording)
    original.keep([14, 10])
    to_zarr(original, tmp_path / "a.zarr", quiet=True)
    to_lerobot(open_recordings(tmp_path / "a.zarr"), tmp_path / "v3", quiet=True)
    again = open_recordings(tmp_path / "v3")
    again.features = {key: again.features[key] for key in original.features}
    same_numbers(original, again)


def test_other_layouts_get_the_names_that_lerobot_looks_for(tmp_path):
    recordings = open_recordings(make.write_aloha(tmp_path / "a"))
    with pytest.raises(ConfigError, match="--fps"):
        to_lerobot(recordings, tmp_path / "v3", quiet=True)
    names = to_lerobot(recordings, tmp_path / "v3", images=True, fps=50, quiet=True)
    assert names == {"action": "action", "qpos": "observation.state", "qvel": "qvel", "top": "observation.images.top"}
    again = open_recordings(tmp_path / "v3")
    np.testing.assert_array_equal(again.episode(1)["observation.state"], make.episode(7, 1)["state"])
    assert again.fps == 50 and again.cameras["observation.images.top"].shape == [32, 48, 3]


def test_numbers_and_arrays_per_step(tmp_path):
    rng = np.random.default_rng(0)
    values = {"action": rng.normal(size=(9, 2)), "points": rng.normal(size=(9, 3, 2)), "reward": np.arange(9)}
    (tmp_path / "a").mkdir()
    np.savez(tmp_path / "a/0.npz", **values)
    to_lerobot(open_recordings(tmp_path / "a"), tmp_path / "v3", fps=10, quiet=True)
    found = open_recordings(tmp_path / "v3").episode(0)
    np.testing.assert_array_equal(found["points"], values["points"])
    np.testing.assert_array_equal(found["reward"], values["reward"][:, None])
    stats = json.loads((tmp_path / "v3/meta/stats.json").read_text())
    assert (
        np.shape(stats["points"]["mean"]) == (3, 2) and stats["reward"]["max"] == [8] and stats["index"]["max"] == [8]
    )


def test_statistics_of_parts_are_those_of_the_whole():
    rng = np.random.default_rng(1)
    parts = [rng.normal(size=(length, 3)) for length in (5, 40, 11)]
    total, whole = total_stats([episode_stats(part) for part in parts]), np.concatenate(parts)
    for name, expected in {
        "min": whole.min(0),
        "max": whole.max(0),
        "mean": whole.mean(0),
        "std": whole.std(0),
    }.items():
        np.testing.assert_allclose(total[name], expected)
    assert total["count"] == [56]


def test_nothing_is_overwritten_and_no_part_stays(lerobot, tmp_path):
    recordings = open_recordings(lerobot)
    (tmp_path / "there").mkdir()
    for convert in (to_zarr, to_lerobot):
        with pytest.raises(ConfigError, match="exists already"):
            convert(recordings, tmp_path / "there", quiet=True)
    recordings.lengths[1] = 99
    for convert in (to_zarr, to_lerobot):
        with pytest.raises(DataError, match="99 are expected"):
            convert(recordings, tmp_path / "new", quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_episodes_without_images(tmp_path, capsys, monkeypatch):
    folder = make.write_lerobot_v2(tmp_path / "set")
    (folder / f"videos/chunk-000/{make.CAMERA}/episode_000001.mp4").unlink()
    command = ["inspect_data", str(folder), "--convert", str(tmp_path / "a.zarr"), "--images"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit):
        inspect_data.main()
    assert "episode 1 " in (error := capsys.readouterr().err) and "--skip-broken" in error
    monkeypatch.setattr("sys.argv", [*command, "--skip-broken", "--to-lerobot", str(tmp_path / "v3")])
    inspect_data.main()
    assert "left out: episode 1 " in capsys.readouterr().out
    assert open_recordings(tmp_path / "a.zarr").lengths == open_recordings(tmp_path / "v3").lengths == [12, 15]


def test_lerobot_opens_it(lerobot, tmp_path):
    """LEROBOT_PYTHON: the Python of an environment with lerobot[dataset] 0.4 or later."""
    python = os.environ.get("LEROBOT_PYTHON")
    if not python:
        pytest.skip("set LEROBOT_PYTHON to run this")
    to_lerobot(open_recordings(lerobot), tmp_path / "v3", images=True, quiet=True)
    code = (
        "import sys; from lerobot.datasets.lerobot_dataset import LeRobotDataset\n"
        "data = LeRobotDataset('local/x', root=sys.argv[1], video_backend='pyav')\n"
        "print(len(data), data[20]['action'].tolist(), data[20]['task'], list(data[20][data.meta.video_keys[0]].shape))"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.environ.get("LEROBOT_PYTHONPATH", "")}
    run = subprocess.run(
        [python, "-c", code, tmp_path / "v3"], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    expected = make.episode(9, 1)["action"][8].tolist()
    assert run.stdout.strip() == f"36 {expected} task 1 [3, 32, 48]", run.stderr[-2000:]
