"""robomimic's hdf5 files: upstream's numbers, and what must not be read."""

import os
import pickle
import resource
import signal
import zlib

import h5py
import numpy as np
import pytest
import torch

from diffusion_policy.common.errors import ConfigError, DataError, DataNotFoundError
from diffusion_policy.dataset.robomimic_replay_lowdim_dataset import RobomimicReplayLowdimDataset
from diffusion_policy.storage import hdf5_child, hdf5_reader
from diffusion_policy.storage.hdf5_reader import Hdf5Process, read_demos
from tests import golden

KEYS = ("actions", "obs/object")


def write(path, lengths=(12, 15, 9), action_dim=7, libver="earliest", **arguments):
    rng = np.random.default_rng(0)
    with h5py.File(path, "w", libver=libver) as file:
        data = file.create_group("data")
        data.attrs["env_args"] = '{"env_name": "Lift"}'
        for i, length in enumerate(lengths):
            demo = data.create_group(f"demo_{i}")
            demo.attrs["num_samples"] = length
            demo.create_dataset("actions", data=rng.normal(size=(length, action_dim)), **arguments)
            demo.create_dataset("obs/object", data=rng.normal(size=(length, 10)), **arguments)
    return path


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "low_dim.hdf5")


@pytest.fixture(scope="module")
def process():
    """One for many tests: starting it takes most of their time."""
    with Hdf5Process(time_limit=300) as process:
        yield process


# The dataset


@pytest.mark.parametrize("case", ["lowdim_abs", "lowdim_abs_legacy_norm", "lowdim_delta", "lowdim_abs_dual"])
def test_upstream_s_numbers(golden_files, case):
    expected = golden.read("robomimic_dataset")[case]
    arguments = dict(expected["kwargs"])
    arguments["dataset_path"] = golden_files / "robomimic_fixture" / arguments["dataset_path"]
    dataset = RobomimicReplayLowdimDataset(
        horizon=expected["horizon"],
        pad_before=expected["pad_before"],
        pad_after=expected["pad_after"],
        val_ratio=0.34,
        **arguments,
    )
    assert len(dataset) == expected["len"] and len(dataset.get_validation_dataset()) == expected["val_len"]
    assert (
        dataset.train_mask.tolist() == expected["train_mask"]
        and dataset.replay_buffer.episode_ends.tolist() == expected["episode_ends"]
    )
    torch.testing.assert_close(dataset.get_all_actions(), expected["all_actions"])
    for sample, name in (
        (dataset[0], "sample0"),
        (dataset[len(dataset) - 1], "sample_last"),
        (dataset.get_validation_dataset()[0], "val_sample0"),
    ):
        for key in ("obs", "action"):
            torch.testing.assert_close(sample[key], expected[name][key])
    state = dataset.get_normalizer().state_dict()
    assert set(state) == set(expected["normalizer"])
    for key, value in state.items():
        torch.testing.assert_close(value, expected["normalizer"][key], rtol=1e-6, atol=1e-6)


def test_min_max_normalisation_is_mip_s(path):
    dataset = RobomimicReplayLowdimDataset(
        path, horizon=4, obs_keys=["object"], abs_action=True, normalization="min_max"
    )
    normalizer = dataset.get_normalizer()
    for key in ("obs", "action"):
        values = normalizer[key].normalize(dataset.steps[key])
        torch.testing.assert_close(values.amax(0), torch.ones(values.shape[1]))
        torch.testing.assert_close(values.amin(0), -torch.ones(values.shape[1]))
    assert dataset[0]["obs"].shape == (4, 10) and dataset[0]["action"].shape == (4, 10)


def test_arguments_that_cannot_work(path, tmp_path):
    for arguments, words in (
        ({"normalization": "both"}, "normalization"),
        ({"obs_keys": []}, "obs_keys"),
        ({"rotation_rep": "x", "abs_action": True}, "'x'"),
    ):
        with pytest.raises(ConfigError, match=words):
            RobomimicReplayLowdimDataset(path, **{"obs_keys": ["object"], **arguments})
    with pytest.raises(DataError, match="data/demo_0/obs has no 'nothing'; it has: object"):
        RobomimicReplayLowdimDataset(path, obs_keys=["nothing"])
    with pytest.raises(DataError, match="7 numbers per arm, these have 5"):
        RobomimicReplayLowdimDataset(write(tmp_path / "five.hdf5", action_dim=5), obs_keys=["object"], abs_action=True)
    with pytest.raises(DataNotFoundError, match="nowhere.hdf5"):
        RobomimicReplayLowdimDataset(tmp_path / "nowhere.hdf5")
    with pytest.raises(DataError, match="not a file"):
        RobomimicReplayLowdimDataset(tmp_path)


# The reader


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"chunks": (4, 3)},
        {"chunks": True, "compression": "gzip", "shuffle": True},
        {"chunks": True, "compression": "lzf", "fletcher32": True},
        {"libver": "latest"},
        {"libver": "latest", "chunks": (2, 2), "compression": "gzip"},
        {"chunks": (5, 5), "maxshape": (None, None)},
    ],
    ids=str,
)
def test_reads_what_h5py_writes(tmp_path, process, arguments):
    path = write(tmp_path / "x.hdf5", **arguments)
    demos = process.read(path, KEYS)
    assert demos.episode_ends.tolist() == [12, 27, 36] and demos.env_args == {"env_name": "Lift"}
    with h5py.File(path) as file:
        for key in KEYS:
            np.testing.assert_array_equal(
                demos.arrays[key], np.concatenate([file[f"data/demo_{i}/{key}"][:] for i in range(3)])
            )


def test_starts_fast_and_without_torch(path):
    def cpu_seconds():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = cpu_seconds()
    read_demos(path, KEYS)
    assert cpu_seconds() - before < 2
    assert "torch" not in {
        line.split()[1].split(".")[0] for line in open(hdf5_child.__file__) if line.startswith(("import", "from"))
    }


def replaced(key, make):
    def change(file):
        shape = file[key].shape
        del file[key]
        make(file, key, shape)

    return change


ACTIONS = "data/demo_1/actions"


@pytest.mark.parametrize(
    "change, words",
    [
        (replaced(ACTIONS, lambda f, k, s: None), "data/demo_1 has no 'actions'; it has: obs"),
        (
            replaced(ACTIONS, lambda f, k, s: f.__setitem__(k, h5py.SoftLink("/data/demo_0/actions"))),
            "data/demo_1/actions is a link",
        ),
        (
            replaced(ACTIONS, lambda f, k, s: f.__setitem__(k, h5py.ExternalLink("/etc/passwd", "/x"))),
            "data/demo_1/actions is a link",
        ),
        (
            lambda f: (f.pop("data/demo_1"), f.__setitem__("data/demo_1", h5py.SoftLink("/data/demo_0"))),
            "data/demo_1 is a link",
        ),
        (
            replaced(
                ACTIONS, lambda f, k, s: f.create_dataset(k, s, "f8", external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)])
            ),
            "other files",
        ),
        (replaced(ACTIONS, lambda f, k, s: f.create_virtual_dataset(k, h5py.VirtualLayout(s, "f8"))), "other files"),
        (replaced(ACTIONS, lambda f, k, s: f.create_dataset(k, s, h5py.vlen_dtype(float))), "plain numbers"),
        (replaced(ACTIONS, lambda f, k, s: f.create_dataset(k, s, h5py.ref_dtype)), "plain numbers"),
        (replaced(ACTIONS, lambda f, k, s: f.create_dataset(k, s, "S8")), "plain numbers"),
        (replaced(ACTIONS, lambda f, k, s: f.create_dataset(k, s, [("a", "f8")])), "plain numbers"),
        (
            replaced(ACTIONS, lambda f, k, s: f.create_dataset(k, s, "f8", chunks=s, scaleoffset=2)),
            "filter 6; read are gzip",
        ),
        (replaced(ACTIONS, lambda f, k, s: f.create_dataset(k, s, "f8")), "0 of 840 bytes"),
        (replaced(ACTIONS, lambda f, k, s: f.create_dataset(k, s, "f8", chunks=(5, 7))), "0 of 3 chunks"),
        (
            replaced(ACTIONS, lambda f, k, s: f.create_dataset(k, (10**12, 7), "f8", chunks=(1000, 7))),
            r"\(1000000000000, 7\), 50.9 TB",
        ),
        (
            replaced(ACTIONS, lambda f, k, s: f.__setitem__(k, np.zeros((15, 8)))),
            r"data/demo_1/actions holds steps of shape \(8,\).*demo_0.*\(7,\)",
        ),
        (
            replaced(ACTIONS, lambda f, k, s: f.__setitem__(k, np.zeros((14, 7)))),
            "data/demo_1: its arrays do not have the same number of steps.*num_samples': 15",
        ),
        (replaced(ACTIONS, lambda f, k, s: f.__setitem__(k, np.zeros((0, 7)))), "no steps"),
        (replaced(ACTIONS, lambda f, k, s: f.__setitem__(k, 1.0)), "no steps"),
        (
            replaced(ACTIONS, lambda f, k, s: f.__setitem__(k, np.zeros(s, "f4"))),
            "float32, but in demo_0 they are .* float64",
        ),
        (
            replaced(
                ACTIONS, lambda f, k, s: f.__setitem__(k, np.where(np.arange(15)[:, None] == 3, np.nan, np.zeros(s)))
            ),
            "data/demo_1/actions holds NaN or infinity, first at step 3",
        ),
        (replaced(ACTIONS, lambda f, k, s: f.__setitem__(k, f["data/demo_1/obs/object"])), "in the same place"),
        (replaced(ACTIONS, lambda f, k, s: f.create_group(k)), "is not a dataset"),
        (lambda f: f.move("data/demo_1", "data/demo_3"), "demo_1 is missing and 'demo_3' is there"),
        (lambda f: f["data"].create_group("extra"), "demo_3 is missing and 'extra' is there"),
        (lambda f: f.move("data", "date"), "has no 'data'; it has: date"),
        (lambda f: [f.pop(f"data/demo_{i}") for i in range(3)], "no demonstrations"),
        (lambda f: f["data"].attrs.__setitem__("env_args", "{"), "env_args of data is not a JSON object"),
        (lambda f: f["data/demo_2"].attrs.__setitem__("num_samples", "many"), "cannot be read|number of steps"),
    ],
)
def test_odd_files_are_refused_with_their_place(path, process, change, words):
    with h5py.File(path, "r+") as file:
        change(file)
    with pytest.raises(DataError, match=words) as error:
        process.read(path, KEYS)
    assert str(path) in str(error.value)


def test_pickles_in_attributes_never_run(path, process, tmp_path):
    class Payload:
        def __reduce__(self):
            return open, (str(tmp_path / "ran"), "w")

    with h5py.File(path, "r+") as file:
        file["data"].attrs["env_args"] = np.void(pickle.dumps(Payload()))
    with pytest.raises(DataError, match="not a JSON object"):
        process.read(path, KEYS)
    with h5py.File(path, "r+") as file:
        file["data"].attrs["env_args"] = "{}"
        file["data/demo_0"].attrs["model_file"] = np.void(pickle.dumps(Payload()))
    process.read(path, KEYS)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("size", [2 * 10**7, 10**5, 505, 503, 100, 0])
def test_a_chunk_that_inflates_to_another_size_is_refused(tmp_path, process, size):
    """libhdf5 would unpack all of them; with fewer than the expected 504 bytes it would return adjacent memory."""
    path = write(tmp_path / "bomb.hdf5", chunks=(9, 7), compression="gzip")
    with h5py.File(path, "r+") as file:
        file["data/demo_0/actions"].id.write_direct_chunk((0, 0), zlib.compress(bytes(size), 9))
    with pytest.raises(DataError, match=r"data/demo_0/actions: its chunk \(0, 0\) is damaged"):
        process.read(path, KEYS)
    with h5py.File(path, "r+") as file:
        file["data/demo_0/actions"].id.write_direct_chunk((0, 0), zlib.compress(bytes(504)) + b"more")
    with pytest.raises(DataError, match="is damaged"):
        process.read(path, KEYS)


def test_every_death_of_the_child_is_an_error_and_the_next_read_works(path, tmp_path, monkeypatch):
    """As if libhdf5 had crashed, and as if it looped."""
    with Hdf5Process(time_limit=300) as process:
        process.read(path, KEYS)
        os.kill(process.child.pid, signal.SIGSEGV)
        with pytest.raises(DataError, match="signal 11"):
            process.read(path, KEYS)
        process.read(path, KEYS)
        os.kill(process.child.pid, signal.SIGSTOP)
        process.time_limit = 0.2
        with pytest.raises(DataError, match="took longer than 0.2 s"):
            process.read(path, KEYS)
        process.time_limit = 300
        assert process.read(path, KEYS).episode_ends[-1] == 36


def test_memory_is_bounded(path, process, monkeypatch):
    monkeypatch.setattr(hdf5_reader, "available_bytes", lambda: 6000.0)
    with pytest.raises(DataError, match="declares arrays of 4.8 KB, but only 2.0 KB"):
        process.read(path, KEYS)


def test_no_hdf5_at_all(tmp_path, process):
    for content in (b"", b"hello", b"\x89HDF\r\n\x1a\n", b"\x89HDF\r\n\x1a\n" + bytes(1000)):
        (tmp_path / "x.hdf5").write_bytes(content)
        with pytest.raises(DataError, match="not an HDF5 file or it is damaged"):
            process.read(tmp_path / "x.hdf5", KEYS)


def test_a_truncated_download_is_an_error(path, process):
    data = path.read_bytes()
    for keep in (0.1, 0.5, 0.99):
        path.write_bytes(data[: int(len(data) * keep)])
        with pytest.raises(DataError):
            process.read(path, KEYS)
