"""The readers of recordings: what they return, and one clear line for what they cannot read."""

import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import signal

import numpy as np
import pytest

from benchmarks import recordings as make
from diffusion_policy.common.errors import ConfigError, DataError, DataNotFoundError
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.dataset.recordings import lerobot as lerobot_module
from diffusion_policy.dataset.recordings import open_recordings
from tests.util import ROOT

LENGTHS = [12, 9, 15]


@pytest.fixture(scope="module")
def lerobot(tmp_path_factory):
    return make.write_lerobot_v2(tmp_path_factory.mktemp("lerobot") / "set")


@pytest.fixture
def copy(lerobot, tmp_path):
    return shutil.copytree(lerobot, tmp_path / "set")


def edit_info(folder, change):
    file = folder / "meta/info.json"
    info = json.loads(file.read_text())
    change(info)
    file.write_text(json.dumps(info))


def check_images(found, expected, tolerance=12):
    found = np.stack(list(found))
    assert found.shape == expected.shape and found.dtype == np.uint8
    assert np.abs(found.astype(int) - expected).mean() < tolerance


# ---------------------------------------------------------------------- formats
def test_lerobot_v2(lerobot):
    found = open_recordings(lerobot)
    assert (found.kind, found.fps, found.lengths, len(found)) == ("lerobot v2.1", 20.0, LENGTHS, 3)
    assert list(found.features) == ["observation.state", "action"] and found.obs_keys == ["observation.state"]
    feature = found.features["action"]
    assert (feature.shape, feature.dtype, feature.names) == ((4,), "float32", ["x", "y", "z", "grip"])
    assert found.cameras[make.CAMERA].shape == [32, 48, 3] and found.action_key == "action"
    assert found.tasks == ["task 0", "task 1"] and found.task_of == [0, 1, 0] and not found.left_out
    for index, length in enumerate(LENGTHS):
        numbers, expected = found.episode(index), make.episode(length, index)
        np.testing.assert_array_equal(numbers["observation.state"], expected["state"])
        np.testing.assert_array_equal(numbers["action"], expected["action"])
        np.testing.assert_allclose(found.timestamps(index), np.arange(length) / 20, rtol=1e-6)
        assert found.has_frames(index, make.CAMERA) and not found.has_frames(index, "other")
        check_images(found.frames(index, make.CAMERA), make.images(length, index))
    assert len(list(found.frames(0, make.CAMERA, count=2))) == 2


@pytest.mark.parametrize("compressed", [False, True])
def test_aloha(tmp_path, compressed):
    found = open_recordings(make.write_aloha(tmp_path / "a", lengths=(10, 7, *[3] * 10), compressed=compressed))
    assert found.kind == "aloha hdf5" and found.lengths == [10, 7] + [3] * 10 and found.fps is None
    assert set(found.features) == {"action", "qpos", "qvel"} and found.obs_keys == ["qpos"]
    assert found.episode_names[2] == "episode_2.hdf5" and found.episode_names[10] == "episode_10.hdf5"
    np.testing.assert_array_equal(found.episode(1)["qpos"], make.episode(7, 1)["state"])
    check_images(found.frames(1, "top"), make.images(7, 1), tolerance=4 if compressed else 0.001)
    alone = open_recordings(tmp_path / "a/episode_1.hdf5")
    assert alone.lengths == [7] and alone.kind == "aloha hdf5"


def test_robomimic(tmp_path):
    found = open_recordings(make.write_robomimic(tmp_path / "demos.hdf5", lengths=(10, *[4] * 11)))
    assert found.kind == "robomimic hdf5" and found.fps == 20 and found.lengths == [10] + [4] * 11
    assert found.obs_keys == ["eef"] and found.action_key == "action" and list(found.cameras) == ["agentview_image"]
    assert found.episode_names[2] == "demo_2 (demos.hdf5)"
    assert open_recordings(tmp_path).kind == "robomimic hdf5"
    np.testing.assert_array_equal(found.episode(10)["eef"], make.episode(4, 10)["state"])
    np.testing.assert_array_equal(np.stack(list(found.frames(1, "agentview_image"))), make.images(4, 1))
    shutil.copy(tmp_path / "demos.hdf5", tmp_path / "other.hdf5")
    with pytest.raises(DataError, match="2 robomimic files: give one"):
        open_recordings(tmp_path)


@pytest.mark.parametrize("zipped", [False, True])
def test_replay_buffer(tmp_path, zipped):
    buffer = ReplayBuffer.create_empty_numpy()
    for seed, length in enumerate((10, 7)):
        frames = make.images(length, seed)
        buffer.add_episode({**make.episode(length, seed), "img": frames, "timestamp": np.arange(length) / 50})
    buffer.data["img"] = buffer.data["img"].astype(np.float32)  # as in the PushT demonstrations
    path = tmp_path / ("a.zarr.zip" if zipped else "a.zarr")
    buffer.save_to_path(path)
    found = open_recordings(path)
    assert found.kind == "replay buffer zarr" and found.lengths == [10, 7] and found.fps == 50
    assert set(found.features) == {"state", "action"} and list(found.cameras) == ["img"]
    np.testing.assert_array_equal(found.episode(1)["state"], make.episode(7, 1)["state"])
    np.testing.assert_array_equal(np.stack(list(found.frames(1, "img"))), make.images(7, 1))
    np.testing.assert_allclose(found.timestamps(1), np.arange(7) / 50)


def test_npz(tmp_path):
    found = open_recordings(make.write_npz(tmp_path / "a", lengths=(10, 7, *[3] * 10)))
    assert found.kind == "npz folder" and found.fps == 20 and found.lengths[:3] == [10, 7, 3]
    assert set(found.features) == {"state", "action"} and found.episode_names[10] == "take_10.npz"
    np.testing.assert_array_equal(found.episode(1)["action"], make.episode(7, 1)["action"])
    many = {key: np.concatenate([make.episode(5, 0)[key], make.episode(6, 1)[key]]) for key in ("state", "action")}
    np.savez_compressed(tmp_path / "many.npz", **many, episode_ends=np.array([5, 11]))
    found = open_recordings(tmp_path / "many.npz")
    assert found.lengths == [5, 6]
    np.testing.assert_array_equal(found.episode(1)["action"], make.episode(6, 1)["action"])


def test_the_g1_recording(g1_recording):
    found = open_recordings(g1_recording)
    camera = "observation.images.cam_high"
    assert len(found) == 100 and sum(found.lengths) == 35_965 and found.fps == 30
    assert sum(found.has_frames(index, camera) for index in range(100)) == 24
    assert found.episode(3)["action"].shape == (459, 26) and found.features["action"].names[3] == "kLeftElbow"
    (frame,) = found.frames(14, camera, count=1)
    assert frame.shape == (480, 640, 3) and 50 < frame.mean() < 200
    with pytest.raises(DataNotFoundError, match="episode 0 .*no video .*episode_000000.mp4"):
        next(found.frames(0, camera))


# ---------------------------------------------------------------------- what cannot be read
def test_an_unknown_path_is_one_line_that_lists_the_kinds(tmp_path):
    (tmp_path / "a.txt").write_text("")
    for path in (tmp_path, tmp_path / "a.txt"):
        with pytest.raises(DataError, match="LeRobotDataset.*ALOHA.*robomimic.*zarr.*npz"):
            open_recordings(path)
    with pytest.raises(DataNotFoundError, match="nothing at"):
        open_recordings(tmp_path / "none")


def test_a_missing_library_is_named(lerobot, monkeypatch):
    monkeypatch.setattr(lerobot_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pyarrow and av.*lerobot-data"):
        open_recordings(lerobot)


def cut(file):
    file.write_bytes(file.read_bytes()[:-40])


BROKEN = {
    "a missing table": (lambda f: (f / "data/chunk-000/episode_000001.parquet").unlink(), "episode 1.*not finished"),
    "a cut table": (lambda f: cut(f / "data/chunk-000/episode_000001.parquet"), "episode 1 .*episode_000001"),
    "a shorter table": (
        lambda f: shutil.copy(f / "data/chunk-000/episode_000001.parquet", f / "data/chunk-000/episode_000002.parquet"),
        "episode 2 .*9 rows, and 15",
    ),
    "other shapes": (lambda f: other_shape(f / "data/chunk-000/episode_000001.parquet"), "episode 1 .*3 numbers"),
    "texts": (lambda f: other_shape(f / "data/chunk-000/episode_000001.parquet", text=True), "only numbers"),
    "an episode too many": (
        lambda f: edit_info(f, lambda info: info.update(total_episodes=5)),
        "lists 3 episodes, but meta/info.json 5",
    ),
}


def other_shape(file, text=False):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(file)
    values = np.arange(3 * len(table), dtype=np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(values.astype(str)) if text else values, 3)
    pq.write_table(table.set_column(table.schema.get_field_index("action"), "action", column), file)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_episode_is_named_or_left_out(copy, case):
    damage, message = BROKEN[case]
    damage(copy)
    with pytest.raises(DataError, match=message) as error:
        found = open_recordings(copy)
        for index in range(len(found)):
            found.episode(index)
    assert "\n" not in str(error.value)
    kept = open_recordings(copy, skip_broken=True)
    assert len(kept) == (3 if case == "an episode too many" else 2)
    assert len(kept.left_out) == 1 and "episode" in kept.left_out[0]
    assert [len(kept.episode(index)["action"]) for index in range(len(kept))] == kept.lengths


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(codebase_version="v1.6"), "version 'v1.6'; read are v2.0, v2.1, v3.0"),
        (dict(fps="fast"), "fps is 'fast'"),
        (dict(fps=0), "fps is '0'"),
        (dict(features={}), "no features"),
        (dict(features={"action": {"dtype": "float32", "shape": [2**40]}}), "larger than any real one"),
        (dict(features={"action": {"dtype": "float32", "shape": [-1]}}), "not a whole number"),
        (dict(features={"action": {"dtype": "object", "shape": [2]}}), "only numbers"),
        (dict(data_path="../../{episode_index}.parquet"), "outside of the dataset"),
        (dict(data_path="/etc/passwd"), "outside of the dataset"),
        (dict(data_path="{episode_index.__class__}"), "cannot be used"),
        (dict(data_path="{episode_index:0999999999d}"), "cannot be used"),
        (dict(data_path="{other}"), "unknown part"),
        (dict(data_path=7), "no data_path"),
    ],
)
def test_metadata_are_checked(copy, change, message):
    edit_info(copy, lambda info: info.update(change))
    with pytest.raises(DataError, match=message):
        open_recordings(copy)


def test_unfinished_recordings(copy, tmp_path):
    (copy / "meta/episodes.jsonl").write_text('{"episode_index": 0, "len')
    with pytest.raises(DataError, match="cut short"):
        open_recordings(copy)
    (copy / "meta/info.json").unlink()
    with pytest.raises(DataError, match="not finished"):
        open_recordings(copy)
    folder = make.write_aloha(tmp_path / "a", lengths=(5, 5))
    cut(folder / "episode_1.hdf5")
    with pytest.raises(DataError, match="episode_1.hdf5 cannot be read"):
        open_recordings(folder)
    kept = open_recordings(folder, skip_broken=True)
    assert kept.lengths == [5] and "episode_1.hdf5" in kept.left_out[0]


def test_videos_that_do_not_fit(copy):
    videos = copy / f"videos/chunk-000/{make.CAMERA}"
    make.write_video(videos / "episode_000000.mp4", make.images(9, 0))
    make.write_video(videos / "episode_000001.mp4", make.images(9, 0), fps=50)
    make.write_video(videos / "episode_000002.mp4", make.images(15, 0, height=64))
    found = open_recordings(copy)
    for index, message in enumerate(["9 of 12 frames", "50 frames per second, but the recording has 20", "64 x 48"]):
        with pytest.raises(DataError, match=f"episode {index} .*episode_00000{index}.mp4 .*{message}"):
            list(found.frames(index, make.CAMERA))
    (videos / "episode_000000.mp4").write_text(f"#EXTM3U\n#EXTINF:1,\nfile://{ROOT}/README.md\n#EXT-X-ENDLIST\n")
    with pytest.raises(DataError, match="episode 0 .*cannot be read"):
        list(found.frames(0, make.CAMERA))
    edit_info(copy, lambda info: info.update(video_path="../{video_key}.mp4"))
    with pytest.raises(DataError, match="outside of the dataset"):
        open_recordings(copy).has_frames(0, make.CAMERA)


def test_links_out_of_the_dataset_are_not_followed_but_those_of_a_snapshot_are(lerobot, tmp_path):
    root = tmp_path / "datasets--me--set"
    shutil.copytree(lerobot, root / "blobs")
    for name in ("snapshots", "other"):
        folder = root / name / "abc"
        shutil.copytree(lerobot / "meta", folder / "meta")
        (folder / "data").symlink_to(root / "blobs/data")
    assert open_recordings(root / "snapshots/abc").episode(0)["action"].shape == (12, 4)
    with pytest.raises(DataError, match="outside of the dataset"):
        open_recordings(root / "other/abc")


def test_layouts_that_change(tmp_path):
    folder = make.write_npz(tmp_path / "a")
    np.savez(folder / "take_2.npz", state=np.zeros((4, 5), np.float32), action=np.zeros((4, 4)), fps=make.FPS)
    with pytest.raises(DataError, match=r"take_2.npz: (state|timestamp)"):
        open_recordings(folder)
    assert open_recordings(folder, skip_broken=True).lengths == [10, 7]
    np.savez(folder / "take_2.npz", **make.episode(4, 0), fps=7, timestamp=np.zeros(4))
    with pytest.raises(DataError, match="the rates differ"):
        open_recordings(folder)
    np.savez(folder / "take_2.npz", action=np.array([{}], dtype=object))
    with pytest.raises(DataError, match="no arrays of numbers"):
        open_recordings(folder)


# ---------------------------------------------------------------------- processes
def test_readers_are_used_again_and_survive_a_fork(lerobot):
    found = open_recordings(lerobot)
    first = found.episode(0)
    (reader,) = found.pool.idle
    both = list(itertools.islice(zip(found.frames(0, make.CAMERA), found.frames(1, make.CAMERA)), 3))
    assert len(both) == 3 and all(process.child.poll() is None for process in found.pool.idle)
    found.episode(0)
    kept = found.pool.idle[0]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        lengths = [len(values["action"]) for values in pool.map(found.episode, range(3))]
    assert lengths == LENGTHS and kept.child.poll() is None
    again = pickle.loads(pickle.dumps(found)).episode(0)
    np.testing.assert_array_equal(again["action"], first["action"])


def test_a_reader_that_dies_or_hangs_is_one_clear_line(lerobot):
    for sent, message in (
        (signal.SIGKILL, r"episode 1 .*reader crashed \(signal 9\)"),
        (signal.SIGSTOP, "longer than 0.5 s"),
    ):
        found = open_recordings(lerobot)
        found.episode(0)
        reader = found.pool.idle[0]
        reader.time_limit = 0.5
        os.kill(reader.child.pid, sent)
        with pytest.raises(DataError, match=message):
            found.episode(1)
        assert not found.pool.idle and reader.child.poll() is not None
        assert found.episode(1)["action"].shape == (9, 4)
