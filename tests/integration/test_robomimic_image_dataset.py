"""robomimic's hdf5 files with images: upstream's numbers, the image cache, and files that must be rejected."""

import errno
import logging
import os
import pickle

import h5py
import hydra
import numpy as np
import pytest
import torch

from benchmarks.data import write_robomimic
from diffusion_policy.common.batch_stream import BatchStream
from diffusion_policy.common.errors import ConfigError, DataError, DataNotFoundError
from diffusion_policy.common.pytorch_util import dict_apply
from diffusion_policy.dataset import robomimic_replay_image_dataset as module
from diffusion_policy.dataset.robomimic_replay_image_dataset import RobomimicReplayImageDataset
from diffusion_policy.storage import hdf5_reader
from diffusion_policy.storage.hdf5_reader import Hdf5Process
from tests import golden
from tests.util import load_config

SIZE = 8
CAMERAS = ("agentview_image", "robot0_eye_in_hand_image")


def meta(cameras=CAMERAS, size=SIZE, action=10, **more):
    images = {key: {"shape": [3, size, size], "type": "rgb"} for key in cameras}
    return {
        "obs": {
            **images,
            "robot0_eef_pos": {"shape": [3]},
            "robot0_eef_quat": {"shape": [4], "type": "low_dim"},
            **more,
        },
        "action": {"shape": [action]},
    }


def make(path, shape_meta=None, **arguments):
    return RobomimicReplayImageDataset(
        shape_meta or meta(), path, **{"horizon": 4, "pad_before": 1, "pad_after": 2, "abs_action": True, **arguments}
    )


def stored(path, key):
    with h5py.File(path) as file:
        return np.concatenate([file[f"data/demo_{i}/obs/{key}"][:] for i in range(len(file["data"]))])


def kept(path):
    return sorted(path.parent.glob(f"{path.name}.images-*"))


@pytest.fixture
def path(tmp_path):
    return write_robomimic(tmp_path / "image_abs.hdf5", size=SIZE)


@pytest.mark.parametrize("case", ["image_abs_nobsNone", "image_abs_nobs2"])
def test_upstream_s_numbers(golden_files, case, tmp_path):
    expected = golden.read("robomimic_dataset")
    path = tmp_path / "image_abs.hdf5"
    path.write_bytes((golden_files / "robomimic_fixture/image_abs.hdf5").read_bytes())
    window, expected = expected["lowdim_abs"], expected[case]
    dataset = RobomimicReplayImageDataset(
        expected["shape_meta"],
        path,
        horizon=8,
        pad_before=window["pad_before"],
        pad_after=window["pad_after"],
        n_obs_steps=2 if case.endswith("2") else None,
        abs_action=True,
        use_cache=True,
        val_ratio=0.34,
    )
    assert len(dataset) == expected["len"] and len(dataset.get_validation_dataset()) == expected["val_len"]
    for sample, name in (
        (dataset[0], "sample0"),
        (dataset[len(dataset) - 1], "sample_last"),
        (dataset.get_validation_dataset()[0], "val_sample0"),
    ):
        torch.testing.assert_close(sample["action"], expected[name]["action"])
        assert set(sample["obs"]) == set(expected[name]["obs"])
        for key, value in sample["obs"].items():
            if key.endswith("image"):  # upstream's cache is lossy, by a few of 255 levels
                torch.testing.assert_close(value, expected[name]["obs"][key] / 255, rtol=0, atol=5 / 255)
            else:
                torch.testing.assert_close(value, expected[name]["obs"][key])
    state = dataset.get_normalizer().state_dict()
    assert set(state) == set(expected["normalizer"])
    for key, value in state.items():
        torch.testing.assert_close(value, expected["normalizer"][key], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("storage", [{}, {"chunks": (5, 4, 4, 3), "compression": "gzip"}], ids=str)
def test_samples_are_the_file_s_images_as_floats_and_batches_as_bytes(tmp_path, storage):
    path = write_robomimic(tmp_path / "x.hdf5", size=SIZE, **storage)
    dataset = make(path, n_obs_steps=2)
    rows = dataset.index_table[[0, 7]][:, :2]
    batch, samples = dataset.get_batch([0, 7]), dataset.__getitems__([0, 7])
    for key in CAMERAS:
        images = torch.from_numpy(stored(path, key))[rows].movedim(-1, -3)
        assert (
            batch["obs"][key].dtype == torch.uint8
            and torch.equal(batch["obs"][key], images)
            and batch["obs"][key].is_contiguous()
        )
        for i, sample in enumerate((samples[0], dataset[7])):
            assert torch.equal(sample["obs"][key], (images.float() / 255)[i])
    np.testing.assert_array_equal(
        batch["obs"]["robot0_eef_pos"], stored(path, "robot0_eef_pos").astype(np.float32)[rows]
    )
    assert batch["action"].shape == (2, 4, 10) and batch["obs"]["robot0_eef_quat"].shape == (2, 2, 4)
    assert make(path, n_obs_steps=None)[0]["obs"][CAMERAS[0]].shape == (4, 3, SIZE, SIZE)


def test_min_max_normalisation_is_mip_s(path):
    dataset = make(path, meta(object={"shape": [10]}), normalization="min_max")
    normalizer = dataset.get_normalizer()
    for key in ("action", "robot0_eef_pos", "robot0_eef_quat", "object"):
        values = normalizer[key].normalize(dataset.steps[key])
        torch.testing.assert_close(values.amax(0), torch.ones(values.shape[1]))
        torch.testing.assert_close(values.amin(0), -torch.ones(values.shape[1]))
    assert normalizer[CAMERAS[1]].normalize(torch.tensor([0.0, 1.0])).tolist() == [-1, 1]


def test_images_are_read_once_and_fetched_from_their_file(path, monkeypatch, caplog):
    with caplog.at_level(logging.INFO):
        first = make(path)
    (file,) = kept(path)
    assert "caching images" in caplog.text and np.load(file).shape == (36, 2 * SIZE * SIZE * 3)
    expected = first.get_batch(range(len(first)))

    def only_numbers(path, keys, frames=None, *rest):
        assert frames is None
        return hdf5_reader.read_demos(path, keys)

    monkeypatch.setattr(module, "read_demos", only_numbers)
    second = make(path, use_cache=False)
    assert torch.equal(second.get_batch(range(len(second)))["obs"][CAMERAS[0]], expected["obs"][CAMERAS[0]])
    assert os.path.samefile(second.frames.file, file)
    # A worker process that is not forked gets the file's name, not its content.
    copy = pickle.loads(pickle.dumps(second))
    assert len(pickle.dumps(second.frames)) < 1000 and torch.equal(
        copy.get_batch([3])["obs"][CAMERAS[1]], expected["obs"][CAMERAS[1]][3:4]
    )
    os.truncate(file, 5000)
    with pytest.raises(DataError, match="cut short"):
        second.get_batch(range(len(second)))


def test_a_changed_dataset_or_other_cameras_do_not_find_the_file(path):
    make(path)
    make(path, meta(cameras=CAMERAS[1:]))
    make(path, meta(cameras=CAMERAS[::-1]))
    assert len(kept(path)) == 3
    write_robomimic(path, size=SIZE, seed=1)
    np.testing.assert_array_equal(
        make(path, pad_before=0).get_batch([0])["obs"][CAMERAS[0]][0], np.moveaxis(stored(path, CAMERAS[0])[:4], -1, 1)
    )
    assert len(kept(path)) == 4


def test_a_damaged_file_of_images_is_made_again(path, caplog):
    make(path)
    (file,) = kept(path)
    good = file.read_bytes()
    for content in (good[:-1], b"", b"hello"):
        file.write_bytes(content)
        make(path)
        assert file.read_bytes() == good
    assert caplog.text.count("rebuilding it") == 3


@pytest.mark.parametrize("error", [errno.EACCES, errno.ENOSPC, errno.EROFS])
def test_without_a_place_to_write_the_images_stay_in_memory(path, error, monkeypatch, caplog):
    expected = make(path).get_batch(range(20))
    (file,) = kept(path)
    file.unlink()

    def refuse(*_):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("diffusion_policy.storage.frame_cache.write_atomically", refuse)
    dataset = make(path)
    assert "kept in memory" in caplog.text and not kept(path)
    assert torch.equal(dataset.get_batch(range(20))["obs"][CAMERAS[1]], expected["obs"][CAMERAS[1]])
    assert len(pickle.loads(pickle.dumps(dataset)).frames) == 36


def test_a_full_disk_is_noticed_by_the_child(path):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    with Hdf5Process() as process, pytest.raises(OSError, match="No space left"):
        process.read(path, ["actions"], {f"obs/{CAMERAS[0]}": (SIZE, SIZE, 3)}, "/dev/full")


def test_no_process_holds_the_images(tmp_path, monkeypatch):
    """Memory for one demonstration is enough for many."""
    path = write_robomimic(tmp_path / "x.hdf5", lengths=[10] * 20, size=32)
    one = 10 * 2 * 32 * 32 * 3
    for available, works in ((6 * one, True), (2 * one, False)):
        monkeypatch.setattr(hdf5_reader, "available_bytes", lambda available=available: available)
        if works:
            assert make(path, meta(size=32)).frames.take(torch.tensor([7, 8, 3])).shape == (3, 2 * 32 * 32 * 3)
            kept(path)[0].unlink()
        else:
            with pytest.raises(DataError, match="a demonstration with 60.0 KB of images, but only 40.0 KB"):
                make(path, meta(size=32))
    assert not kept(path)


def test_progress_is_reported_and_keeps_a_slow_reading_alive(path):
    seen = []
    with Hdf5Process() as process:
        process.read(path, ["actions"], {f"obs/{CAMERAS[0]}": (SIZE, SIZE, 3)}, progress=lambda *now: seen.append(now))
        assert seen == [(i, 6) for i in range(1, 7)]
        assert process.read(path, ["actions"]).frames is None


@pytest.mark.parametrize(
    "shape_meta, arguments, words",
    [
        (
            meta(cameras=["sideview_image"]),
            {},
            "data/demo_0/obs has no 'sideview_image'; it has: agentview_image.*low_dim.*hold no images",
        ),
        (meta(robot1_eef_pos={"shape": [3]}), {}, "data/demo_0/obs has no 'robot1_eef_pos'; it has: "),
        (
            meta(size=84),
            {},
            r"agentview_image holds steps of shape \(8, 8, 3\), uint8, but images of shape \(84, 84, 3\)",
        ),
        (
            meta(robot0_gripper_qpos={"shape": [3]}),
            {},
            r"'robot0_gripper_qpos' holds steps of shape \(2,\), expected \(3,\)",
        ),
        (meta(action=7), {}, r"with abs_action=True its actions have 10 numbers, but shape_meta.action.shape is \[7\]"),
        (meta(action=10), {"abs_action": False}, "with abs_action=False its actions have 7 numbers"),
        (meta(object={"shape": [10]}), {}, "object: normalization=upstream selects"),
        (meta(robot0_eef_pos={"shape": [3], "type": "depth"}), {}, "type must be rgb or low_dim, not 'depth'"),
        (meta(cameras=[]), {}, "no image"),
        (meta(agentview_image={"shape": [8, 8, 3], "type": "rgb"}), {}, r"\[3, height, width\]"),
        (meta(robot0_eef_pos={"shape": [3, 1]}), {}, "one dimension"),
        (meta(), {"normalization": "both"}, "normalization"),
        (meta(), {"n_obs_steps": 0}, "n_obs_steps"),
        (meta(), {"rotation_rep": "x"}, "'x'"),
    ],
)
def test_what_does_not_fit_is_reported(path, shape_meta, arguments, words):
    with pytest.raises((ConfigError, DataError), match=words):
        make(path, shape_meta, **arguments)
    assert not kept(path) and not list(path.parent.glob(".*"))


def test_other_files(tmp_path):
    with pytest.raises(DataNotFoundError):
        make(tmp_path / "nowhere.hdf5")
    five = write_robomimic(tmp_path / "five.hdf5", size=SIZE, cameras=CAMERAS)
    with h5py.File(five, "r+") as file:
        for demo in file["data"].values():
            length = len(demo["actions"])
            del demo["actions"]
            demo["actions"] = np.zeros((length, 5))
    with pytest.raises(DataError, match="7 numbers per arm, these have 5"):
        make(five)


def replaced(key, value):
    def change(file):
        length = len(file[f"data/demo_1/{key}"])
        del file[f"data/demo_1/{key}"]
        value(file, f"data/demo_1/{key}", length)

    return change


IMAGE = f"obs/{CAMERAS[0]}"


@pytest.mark.parametrize(
    "change, words",
    [
        (
            replaced(IMAGE, lambda f, k, n: f.__setitem__(k, np.zeros((n, SIZE, SIZE, 3), np.float32))),
            "float32, but images",
        ),
        (
            replaced(IMAGE, lambda f, k, n: f.__setitem__(k, np.zeros((n, SIZE, SIZE), np.uint8))),
            r"\(8, 8\), uint8, but images",
        ),
        (
            replaced(IMAGE, lambda f, k, n: f.__setitem__(k, np.zeros((n + 1, SIZE, SIZE, 3), np.uint8))),
            "same number of steps",
        ),
        (replaced(IMAGE, lambda f, k, n: f.__setitem__(k, h5py.ExternalLink("/etc/passwd", "/x"))), "is a link"),
        (
            replaced(
                IMAGE,
                lambda f, k, n: f.create_dataset(
                    k, (n, SIZE, SIZE, 3), "u1", external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)]
                ),
            ),
            "other files",
        ),
        (
            replaced(IMAGE, lambda f, k, n: f.create_dataset(k, (n, SIZE, SIZE, 3), "u1", chunks=(1, SIZE, SIZE, 3))),
            "0 of 15 chunks",
        ),
        (replaced(IMAGE, lambda f, k, n: f.__setitem__(k, f[f"data/demo_1/obs/{CAMERAS[1]}"])), "in the same place"),
    ],
)
def test_odd_images_are_refused_and_nothing_is_left(path, change, words):
    with h5py.File(path, "r+") as file:
        change(file)
    with pytest.raises(DataError, match=words):
        make(path)
    assert not kept(path) and not list(path.parent.glob(".*"))


def test_max_train_episodes_and_validation(path):
    dataset = make(path, max_train_episodes=1, val_ratio=0.34)
    assert dataset.train_mask.sum() == dataset.val_mask.sum() == 1
    rows = dataset.get_validation_dataset().index_table
    assert set(dataset.replay_buffer.get_episode_idxs()[rows.flatten()]) == set(np.flatnonzero(dataset.val_mask))


def test_workers_give_the_batches_that_the_run_itself_would_make(path):
    dataset = make(path, n_obs_steps=2)
    here, there = (next(BatchStream(dataset, 8, seed=3, num_workers=count).batches(2)) for count in (0, 1))
    for key in CAMERAS:
        assert torch.equal(here["obs"][key], there["obs"][key])


@pytest.mark.parametrize(
    "method, backbone, task",
    [("idp", "transformer", "lift_ph_image"), ("mip", "unet", "can_mh_image"), ("flow", "mlp", "transport_ph_image")],
)
def test_policies_take_the_bytes_of_all_cameras(tmp_path, method, backbone, task):
    cfg = load_config(
        f"train_{method}_{backbone}_image",
        f"task={task}",
        "preset=debug",
        f"task.dataset_path={tmp_path}/image_abs.hdf5",
    )
    cameras = [key for key, entry in cfg.task.shape_meta.obs.items() if entry.type == "rgb"]
    write_robomimic(tmp_path / "image_abs.hdf5", cameras=cameras, arms=cfg.task.action_dim // 10)
    dataset = hydra.utils.instantiate(cfg.task.dataset)
    policy = hydra.utils.instantiate(cfg.policy)
    policy.set_normalizer(dataset.get_normalizer())
    batch = dataset.get_batch(range(4))
    floats = dict_apply(batch, lambda value: value.float() / 255 if value.dtype == torch.uint8 else value)
    losses = []
    for given in (batch, floats):
        torch.manual_seed(0)
        losses.append(policy.compute_loss(given))
    assert losses[0] == losses[1] and losses[0].isfinite()
    policy.eval()
    torch.manual_seed(0)
    action = policy.predict_action(batch["obs"])["action"]
    torch.manual_seed(0)
    assert torch.equal(policy.predict_action(floats["obs"])["action"], action) and action.shape == (
        4,
        8,
        cfg.task.action_dim,
    )
    # Every camera counts.
    for key in cameras:
        other = {**batch["obs"], key: 255 - batch["obs"][key]}
        torch.manual_seed(0)
        assert not torch.equal(policy.predict_action(other)["action"], action)
