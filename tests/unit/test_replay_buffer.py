"""Replay buffers: upstream's files, round trips through every storage, and damaged data."""

import base64
import contextlib
import json
import os
import pickle
import shutil
import tempfile
import tracemalloc
import warnings
import zipfile
import zlib

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diffusion_policy.common.errors import DataError, DataNotFoundError
from diffusion_policy.common.replay_buffer import ReplayBuffer, get_optimal_chunks, read_array


def episode(length, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "action": rng.normal(size=(length, 2)).astype(np.float32),
        "img": rng.integers(0, 255, (length, 3, 3), dtype=np.uint8),
    }


def filled(buffer=None, lengths=(5, 7, 3)) -> ReplayBuffer:
    buffer = ReplayBuffer.create_empty_numpy() if buffer is None else buffer
    for seed, length in enumerate(lengths):
        buffer.add_episode(episode(length, seed))
    return buffer


def assert_equal(a: ReplayBuffer, b: ReplayBuffer):
    assert sorted(a.keys()) == sorted(b.keys())
    np.testing.assert_array_equal(a.episode_ends, b.episode_ends)
    for key in a.keys():
        assert a[key].dtype == b[key].dtype
        np.testing.assert_array_equal(a[key][:], b[key][:])


# Upstream's files


@pytest.mark.parametrize(
    "name",
    ["pusht_like_zarr_backend.zarr", "pusht_like_numpy_backend.zarr", "create_from_path.zarr", "pusht_like.zarr.zip"],
)
def test_reads_what_upstream_wrote(golden_files, name):
    expected = np.load(golden_files / "replay_buffer_fixture/expected.npz")
    path = golden_files / "replay_buffer_fixture" / name
    for buffer in (
        ReplayBuffer.copy_from_path(path),
        ReplayBuffer.create_from_path(path),
        ReplayBuffer.copy_from_path(path, store=zarr.storage.MemoryStore()),
    ):
        n = 2 if name == "create_from_path.zarr" else 3  # of that one, the last episode was dropped
        np.testing.assert_array_equal(buffer.episode_ends, expected["episode_ends"][:n])
        for key in set(expected) - {"episode_ends"}:
            np.testing.assert_array_equal(buffer[key][:], expected[key][: buffer.n_steps])


def test_writes_upstreams_layout(golden_files, tmp_path):
    folder = golden_files / "replay_buffer_fixture"
    source = ReplayBuffer.copy_from_path(folder / "pusht_like_zarr_backend.zarr")
    layout = json.loads((folder / "layout.json").read_text())
    buffer = ReplayBuffer.create_empty_zarr(str(tmp_path / "added.zarr"))
    for i in range(source.n_episodes):
        buffer.add_episode(source.get_episode(i), compressors="disk")
    source.save_to_path(tmp_path / "saved.zarr")

    for name, expected in (("added", layout), ("saved", layout["numpy_backend"])):
        for key in source.keys():
            written = json.loads((tmp_path / f"{name}.zarr/data/{key}/.zarray").read_text())
            reference = json.loads((folder / f"pusht_like_zarr_backend.zarr/data/{key}/.zarray").read_text())
            assert written["zarr_format"] == 2 and written["dimension_separator"] == "."
            for field in ("shape", "dtype", "fill_value", "filters", "order"):
                assert written[field] == reference[field]
            assert written["chunks"] == expected[key]["chunks"] and written["compressor"] == expected[key]["compressor"]
    ends = json.loads((tmp_path / "added.zarr/meta/episode_ends/.zarray").read_text())
    assert (
        ends["chunks"] == layout["meta/episode_ends"]["chunks"]
        and ends["compressor"] is None
        and ends["dtype"] == "<i8"
    )


# Round trips


@settings(max_examples=15)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_storages_agree(lengths, data):
    values = [
        {
            "x": data.draw(hnp.arrays(np.float32, (n, 2), elements=st.floats(-9, 9, width=32))),
            "k": np.zeros((n, 1), dtype=np.int64),
        }
        for n in lengths
    ]  # zeros: chunks that zarr would leave out by default
    memory, stored = ReplayBuffer.create_empty_numpy(), ReplayBuffer.create_empty_zarr()
    for buffer in (memory, stored):
        for value in values:
            buffer.add_episode(value, chunks={"x": (3, 2)})
    assert_equal(memory, stored)

    with tempfile.TemporaryDirectory() as folder:
        for name in ("buffer.zarr", "buffer.zarr.zip"):
            stored.save_to_path(f"{folder}/{name}", compressors="disk")
            assert_equal(memory, ReplayBuffer.copy_from_path(f"{folder}/{name}"))
            assert_equal(memory, ReplayBuffer.create_from_path(f"{folder}/{name}"))
        grown = ReplayBuffer.create_from_path(f"{folder}/buffer.zarr", mode="r+")
        grown.extend(values[0])
        popped = grown.pop_episode()
        np.testing.assert_array_equal(popped["x"], values[0]["x"])
        assert_equal(memory, ReplayBuffer.copy_from_path(f"{folder}/buffer.zarr"))

    for buffer in (memory, stored):
        buffer.drop_episode()
    assert_equal(memory, stored)
    assert memory.n_steps == sum(lengths[:-1])


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_reads_zarr_format_3(tmp_path, kind):
    buffer = filled()
    path = tmp_path / "v3.zarr" if kind == "folder" else tmp_path / "v3.zarr.zip"
    store = str(path) if kind == "folder" else zarr.storage.ZipStore(path, mode="w")
    root = zarr.create_group(store, zarr_format=3)
    for key, value in buffer.items():
        root.create_array(f"data/{key}", data=value, chunks=(4, *value.shape[1:]), config={"write_empty_chunks": True})
    root.create_array("meta/episode_ends", data=buffer.episode_ends)
    root.store.close()
    assert_equal(buffer, ReplayBuffer.copy_from_path(path))
    copy = ReplayBuffer.copy_from_path(path, store=zarr.storage.MemoryStore())
    assert_equal(buffer, copy)
    assert copy.root.metadata.zarr_format == 2
    if kind == "folder":
        with pytest.raises(DataError, match="only be read"):
            buffer.save_to_path(path)


def test_reading_an_episode():
    buffer = filled()
    assert (buffer.n_steps, buffer.n_episodes, buffer.backend, buffer.chunk_size) == (15, 3, "numpy", None)
    assert buffer.episode_lengths.tolist() == [5, 7, 3]
    assert buffer.get_episode_idxs().tolist() == [0] * 5 + [1] * 7 + [2] * 3
    assert buffer.get_episode_slice(-1) == slice(12, 15)
    np.testing.assert_array_equal(buffer.get_episode(1)["action"], episode(7, 1)["action"])
    assert np.shares_memory(buffer.get_episode(1)["action"], buffer["action"])
    assert not np.shares_memory(buffer.get_episode(1, copy=True)["action"], buffer["action"])
    assert len(buffer.get_steps_slice(0, 10, 2)["action"]) == 5
    assert "action" in buffer and "goal" not in buffer
    assert "3 episodes, 15 steps: action (15, 2) float32" in repr(buffer)
    with pytest.raises(IndexError):
        buffer.get_episode(3)


def test_chunks_and_compressors():
    buffer = filled(ReplayBuffer.create_empty_zarr())
    assert buffer.backend == "zarr" and buffer.chunk_size == 5
    assert buffer.get_chunks() == {"action": (5, 2), "img": (5, 3, 3)}
    assert buffer.get_compressors()["img"] == ReplayBuffer.resolve_compressor("default")
    buffer.set_chunks({"img": (1, 3, 3)})
    buffer.set_compressors({"img": "disk", "action": numcodecs.Zlib(3)})
    assert buffer.get_chunks()["img"] == (1, 3, 3)
    assert buffer.get_compressors() == {"img": ReplayBuffer.resolve_compressor("disk"), "action": numcodecs.Zlib(3)}
    assert_equal(buffer, filled())
    with pytest.raises(DataError, match="Chunks"):
        buffer.set_chunks({"img": (1, 3)})
    assert get_optimal_chunks((100, 1000, 1000), "float32") == (1, 500, 1000)
    assert get_optimal_chunks((100, 3), "float32", max_chunk_length=7) == (7, 3)


@pytest.mark.parametrize("create", [ReplayBuffer.create_empty_numpy, ReplayBuffer.create_empty_zarr])
def test_meta(create, tmp_path):
    buffer = filled(create())
    buffer.update_meta({"fps": 10, "weights": [1.0, 2.0]})
    buffer.save_to_path(tmp_path / "b.zarr")
    loaded = ReplayBuffer.copy_from_path(tmp_path / "b.zarr")
    assert loaded.meta["fps"] == 10 and loaded.meta["weights"].tolist() == [1, 2]
    with pytest.raises(DataError, match="meta/names"):
        buffer.update_meta({"names": [None]})


def test_saving_over_an_older_buffer(tmp_path):
    filled(lengths=(9, 9)).save_to_path(tmp_path / "b.zarr")
    new = ReplayBuffer.create_empty_numpy()
    new.add_episode({"action": episode(4)["action"]})
    new.save_to_path(tmp_path / "b.zarr")
    assert_equal(new, ReplayBuffer.copy_from_path(tmp_path / "b.zarr"))  # nothing is left of the old one
    with pytest.raises(DataError, match="already has"):
        new.save_to_path(tmp_path / "b.zarr", if_exists="raise")
    new.save_to_path(tmp_path / "b.zarr", if_exists="skip")
    assert ReplayBuffer.create_from_path(tmp_path / "b.zarr", mode="w").n_episodes == 0
    assert ReplayBuffer.create_from_path(tmp_path / "b.zarr", mode="a").n_episodes == 0


def test_nothing_is_lost_by_saving_a_buffer_over_itself(tmp_path, monkeypatch):
    filled().save_to_path(tmp_path / "b.zarr")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="over itself"):
        ReplayBuffer.create_from_path(tmp_path / "b.zarr").save_to_path("./b.zarr")
    assert_equal(filled(), ReplayBuffer.copy_from_path("b.zarr"))
    filled().save_to_path("b.zarr.zip")
    with pytest.raises(DataError, match="exists already"):
        filled().save_to_path("b.zarr.zip", if_exists="raise")


@pytest.mark.parametrize(
    "bad, words",
    [
        ({"action": np.zeros((3, 2)), "img": np.zeros((4, 3, 3))}, "same length"),
        ({"action": np.zeros((0, 2)), "img": np.zeros((0, 3, 3))}, "at least 1"),
        ({"action": np.zeros((3, 2))}, "keys"),
        ({"action": np.zeros((3, 5)), "img": np.zeros((3, 3, 3))}, r"data/action holds steps of shape \(2,\)"),
    ],
)
def test_bad_episodes_change_nothing(bad, words):
    buffer = filled()
    with pytest.raises(DataError, match=words):
        buffer.add_episode(bad)
    assert_equal(buffer, filled())
    with pytest.raises(DataError, match="no episode"):
        ReplayBuffer.create_empty_numpy().drop_episode()


# Damaged data


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "b.zarr"
    filled(lengths=(20, 30)).save_to_path(path, chunks={"action": (10, 2)}, compressors="disk")
    return path


@pytest.fixture
def copied(good, tmp_path):
    """To be damaged."""
    shutil.copytree(good, tmp_path / "b.zarr")
    return tmp_path / "b.zarr"


def without_checksums(path):
    """As other software writes it."""
    (path / ".zattrs").unlink()
    return path


def rewrite(path, name, values):
    root = zarr.open_group(path, mode="r+")
    root.create_array(name, data=np.asarray(values), overwrite=True, config={"write_empty_chunks": True})


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize(
    "damage, words",
    [
        (
            lambda p: (p / ".zgroup").unlink() or shutil.rmtree(p / "data") or shutil.rmtree(p / "meta"),
            "not a zarr group",
        ),
        (lambda p: shutil.rmtree(p / "data"), "no group 'data'"),
        (lambda p: shutil.rmtree(p / "meta"), "no group 'meta'"),
        (lambda p: shutil.rmtree(p / "meta/episode_ends"), "no array meta/episode_ends"),
        (lambda p: rewrite(p, "data/action", np.ones((49, 2))), "data/action has shape .49, 2., but .* 50 steps"),
        (lambda p: rewrite(p, "data/action", np.float32(1)), "data/action has shape"),
        (lambda p: rewrite(p, "meta/episode_ends", [30, 20]), "increase"),
        (lambda p: rewrite(p, "meta/episode_ends", [20, 20, 50]), "increase"),
        (lambda p: rewrite(p, "meta/episode_ends", [-5, 50]), "increase"),
        (lambda p: rewrite(p, "meta/episode_ends", [20.0, 50.0]), "integers"),
        (
            lambda p: (
                [rewrite(p, f"data/{k}", np.ones((0, 2))) for k in ("action", "img")]
                and rewrite(p, "meta/episode_ends", np.zeros(0, dtype=np.int64))
            ),
            "no episodes",
        ),
        (lambda p: (p / "data/action/2.0").unlink(), "data/action: 1 of 5 chunks are missing"),
        (lambda p: (p / "meta/episode_ends/0").unlink(), "episode_ends: 1 of 1 chunks are missing"),
        (lambda p: cut(p / "data/action/2.0"), "data/action cannot be read"),
        (lambda p: (p / "data/action/2.0").write_bytes(b""), "data/action cannot be read"),
        (lambda p: (p / "data/action/2.0").write_bytes(b"\x07" * 90), "data/action cannot be read"),
        (lambda p: cut(p / "meta/episode_ends/0"), "episode_ends cannot be read"),
        (lambda p: (p / "data/action/.zarray").unlink(), "no array data/action; it has: img"),
        (lambda p: cut(p / "data/action/.zarray"), "metadata of an array .* cannot be read"),
        (lambda p: cut(p / "meta/episode_ends/.zarray"), "metadata of an array .* cannot be read"),
    ],
)
def test_damage_is_found_at_load(copied, damage, words):
    damage(copied)
    with pytest.raises(DataError):
        ReplayBuffer.copy_from_path(copied, keys=["action", "img"])
    without_checksums(copied)
    with pytest.raises(DataError, match=words):
        ReplayBuffer.copy_from_path(copied, keys=["action", "img"])


def test_not_a_buffer_at_all(tmp_path):
    with pytest.raises(DataNotFoundError, match="nowhere.zarr"):
        ReplayBuffer.create_from_path(tmp_path / "nowhere.zarr")
    (tmp_path / "text.zarr").write_text("hello")
    with pytest.raises(DataError, match="not a zarr group"):
        ReplayBuffer.create_from_path(tmp_path / "text.zarr")
    filled().save_to_path(tmp_path / "b.zarr.zip")
    cut(tmp_path / "b.zarr.zip")
    with pytest.raises(DataError, match="not a zarr group"):
        ReplayBuffer.copy_from_path(tmp_path / "b.zarr.zip")
    with pytest.raises(DataError, match="can only be read"):
        ReplayBuffer.create_from_path(tmp_path / "b.zarr.zip", mode="a")


def test_a_cast_must_keep_the_values():
    assert read_array(np.array([0.0, 255.0]), "uint8").tolist() == [0, 255]
    for bad in (0.5, -1.0, 256.0, np.nan):
        with pytest.raises(DataError, match="uint8"):
            read_array(np.array([1.0, bad]), "uint8")


# Checksums


def checksums(buffer_or_path):
    root = (
        buffer_or_path.root if isinstance(buffer_or_path, ReplayBuffer) else zarr.open_group(buffer_or_path, mode="r")
    )
    return root.attrs.get("checksums")


@pytest.mark.parametrize("name", ["b.zarr", "b.zarr.zip"])
def test_what_is_written_carries_checksums(tmp_path, name):
    path = tmp_path / name
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of names that are twice in a zip
        filled().save_to_path(path)
    store = zarr.storage.ZipStore(path) if name.endswith("zip") else path
    expected = checksums(store)
    crc = zlib.crc32(filled()["action"].tobytes())
    assert expected["data/action"] == f"<f4 15x2 crc32 {crc:08x}" and set(expected) == {
        "data/action",
        "data/img",
        "meta/episode_ends",
    }
    ReplayBuffer.copy_from_path(path, store=tmp_path / "copy.zarr", chunks={"img": (2, 3, 3)}, compressors="disk")
    assert checksums(tmp_path / "copy.zarr") == expected
    ReplayBuffer.copy_from_path(path, store=tmp_path / "part.zarr", keys=["img"])
    assert set(checksums(tmp_path / "part.zarr")) == {"data/img", "meta/episode_ends"}


def test_changing_a_buffer_keeps_its_checksums_right(tmp_path):
    grown = ReplayBuffer.create_empty_zarr(str(tmp_path / "b.zarr"))
    for seed, length in enumerate((5, 7, 3)):
        grown.add_episode({**episode(length, seed), "wide": np.arange(length)})
        grown.add_episode({**episode(length, seed), "wide": np.arange(length, dtype=np.int16)})  # stored as int64
    grown.update_meta({"fps": 10})
    grown.set_chunks({"img": (4, 3, 3)})
    grown.set_compressors({"action": "disk"})
    copy = ReplayBuffer.copy_from_path(tmp_path / "b.zarr")
    copy.save_to_path(tmp_path / "again.zarr")
    assert checksums(grown) == checksums(tmp_path / "again.zarr") and len(checksums(grown)) == 5
    grown.drop_episode()
    assert checksums(grown) is None  # known again only after reading everything
    grown.add_episode({**episode(4), "wide": np.arange(4)})
    assert checksums(grown) is None
    assert_equal(grown, ReplayBuffer.copy_from_path(tmp_path / "b.zarr"))


def test_other_attributes_stay(tmp_path):
    filled().save_to_path(tmp_path / "b.zarr")
    zarr.open_group(tmp_path / "b.zarr", mode="r+").attrs.update({"description": "mine"})
    buffer = ReplayBuffer.create_from_path(tmp_path / "b.zarr", mode="r+")
    buffer.add_episode(episode(3))
    buffer.drop_episode()
    assert dict(buffer.root.attrs) == {"description": "mine"}


def test_a_changed_value_is_found_where_the_codec_does_not(copied):
    rewrite(copied, "data/action", ReplayBuffer.copy_from_path(copied)["action"] + np.float32(1e-3))
    for read in (
        ReplayBuffer.copy_from_path,
        lambda p: ReplayBuffer.copy_from_path(p, store=zarr.storage.MemoryStore()),
        lambda p: read_array(ReplayBuffer.create_from_path(p)["action"]),
    ):
        with pytest.raises(DataError, match="data/action is not what was written.*<f4 50x2.*remove 'checksums'"):
            read(copied)
    ReplayBuffer.copy_from_path(copied, keys=["img"])
    ReplayBuffer.copy_from_path(without_checksums(copied))


@pytest.mark.parametrize("value", [5, ["data/action"], {"data/action": 5}, "text"])
def test_damaged_checksums_are_reported(copied, value):
    edit(copied / ".zattrs", checksums=value)
    with pytest.raises(DataError, match="'checksums' is damaged"):
        ReplayBuffer.copy_from_path(copied)


def test_a_lost_array_is_found(copied):
    shutil.rmtree(copied / "data/img")
    with pytest.raises(DataError, match="had an array data/img"):
        ReplayBuffer.copy_from_path(copied)


# Hostile data


class Payload:
    """Unpickling it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_pickles_in_a_zarr_never_run(copied, tmp_path, monkeypatch):
    """Data encoded with the pickle codec is refused.

    numcodecs before 0.16 decodes pickles, and later versions when allowed to. zarr uses the codec when a text
    codec comes before it.
    """
    monkeypatch.setattr("numcodecs.pickles.ALLOW_UNSAFE_PICKLE_DECODE", True, raising=False)
    allowed = {**zarr.config.config["array"], "allow_unsafe_pickle_decode": True}  # zarr 3.2 and later ask, too
    monkeypatch.setitem(zarr.config.config, "array", allowed)
    edit(
        copied / "data/action/.zarray",
        dtype="|O",
        filters=[{"id": "vlen-utf8"}, {"id": "pickle"}],
        compressor=None,
        fill_value=None,
        chunks=[50, 2],
    )  # one chunk: of several, threads of zarr would decode some after it has already failed
    (copied / "data/action/0.0").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with contextlib.suppress(Exception):
        zarr.open_group(copied, mode="r")["data/action"][:]
    assert (tmp_path / "ran").exists()  # zarr alone runs it
    (tmp_path / "ran").unlink()
    for read in (
        ReplayBuffer.create_from_path,
        ReplayBuffer.copy_from_path,
        lambda path: read_array(zarr.open_group(path, mode="r")["data/action"]),
    ):
        with pytest.raises(DataError, match="only arrays of numbers|pickle"):
            read(copied)
    attributes = {"note": base64.b64encode(pickle.dumps(Payload(tmp_path / "ran"))).decode()}
    filled().save_to_path(tmp_path / "attributes.zarr")
    zarr.open_group(tmp_path / "attributes.zarr", mode="r+").attrs.update(attributes)
    assert ReplayBuffer.copy_from_path(tmp_path / "attributes.zarr").n_episodes == 3
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"filters": [{"id": "pickle"}]},
        {"compressor": {"id": "pickle"}},
        {"filters": [{"id": "json2"}]},
        {"dtype": "|O", "fill_value": None},
        {"filters": [{"id": "delta", "dtype": "<f4"}]},
        {"compressor": {"id": "lzma"}},
        {"compressor": {"id": "nothing"}},
        {"compressor": 3},
        {"dtype": "|V4"},
        {"dtype": [["a", "<f4"]]},
        {"dtype": "<U0"},
        {"dtype": 7},
        {"filters": {"id": "pickle"}},
        {"chunks": [0, 2]},
        {"chunks": [-10, 2]},
        {"chunks": [10]},
        {"chunks": [10.5, 2]},
        {"chunks": [2**62, 2]},
        {"chunks": "10"},
        {"shape": [50, 2**61]},
        {"shape": [-50, 2]},
        {"shape": [50]},
        {"shape": "50"},
        {"shape": [50, 2, 1]},
        {"order": "X"},
        {"zarr_format": 7},
        {"dimension_separator": "!"},
        {"fill_value": [1]},
        {"fill_value": "NaN"},
    ],
)
def test_odd_metadata_is_refused_or_changes_nothing(copied, changes):
    edit(copied / "data/action/.zarray", **changes)
    try:
        buffer = ReplayBuffer.copy_from_path(copied)
    except DataError:
        return
    assert changes.keys() <= {"fill_value"}
    np.testing.assert_array_equal(buffer["action"], filled(lengths=(20, 30))["action"])


def test_declared_sizes_are_bounded_before_anything_is_allocated(copied):
    """The array says that it has 8 TB, in more chunks than could be counted, or in one."""
    without_checksums(copied)
    for changes, words in (
        ({"shape": [10**12, 2], "chunks": [10**12, 2]}, "memory|free"),
        ({"shape": [10**18, 2], "chunks": [10, 2]}, "some of 10{17} chunks are missing"),
        ({"shape": [50, 2], "chunks": [10**9, 2]}, "a chunk of shape"),
    ):
        edit(copied / "data/action/.zarray", **changes)
        with pytest.raises(DataError, match=words):
            read_array(zarr.open_group(copied, mode="r")["data/action"])


def test_an_array_larger_than_the_memory_is_named_with_both_sizes(copied, monkeypatch):
    array = zarr.open_group(copied, mode="r")["data/img"]
    monkeypatch.setattr("diffusion_policy.storage.zarr_checks.available_bytes", lambda: 400)
    with pytest.raises(DataError, match=r"shape \(50, 3, 3\), .* bytes, but only 400 bytes of memory are free"):
        read_array(array)


@pytest.mark.parametrize(
    "compressor",
    [
        numcodecs.Blosc("lz4"),
        numcodecs.Zlib(9),
        numcodecs.GZip(9),
        numcodecs.Zstd(9),
        numcodecs.LZ4(),
    ],
    ids=lambda c: c.codec_id,
)
def test_a_chunk_that_decodes_to_another_size_is_not_decoded(tmp_path, compressor, monkeypatch):
    """100 MB of zeros are a few KB; where 80 bytes belong, they must not be unpacked."""
    buffer = filled(lengths=(10,))
    buffer.save_to_path(tmp_path / "b.zarr", compressors=compressor)
    assert_equal(buffer, ReplayBuffer.copy_from_path(tmp_path / "b.zarr"))
    chunk = tmp_path / "b.zarr/data/action/0.0"
    for size in (100_000_000, 81, 79, 0):
        chunk.write_bytes(compressor.encode(np.zeros(size, dtype=np.uint8)))
        tracemalloc.start()
        with pytest.raises(DataError, match="data/action cannot be read, its chunk 0.0"):
            ReplayBuffer.copy_from_path(tmp_path / "b.zarr")
        assert tracemalloc.get_traced_memory()[1] < 5e6
        tracemalloc.stop()


def test_reads_other_compressors_of_format_3_and_no_other_codecs(tmp_path):
    values = np.arange(60, dtype=">f4").reshape(30, 2)
    codecs = zarr.codecs
    for name, arguments, good in (
        ("blosc", {"compressors": codecs.BloscCodec()}, True),
        ("gzip", {"compressors": codecs.GzipCodec()}, True),
        ("none", {"compressors": None}, True),
        ("crc", {"compressors": [codecs.ZstdCodec(), codecs.Crc32cCodec()]}, True),
        ("transpose", {"filters": codecs.TransposeCodec(order=(1, 0))}, True),
        ("twice", {"compressors": [codecs.GzipCodec(), codecs.GzipCodec()]}, False),
        ("shards", {"shards": (20, 2)}, False),
    ):
        root = zarr.create_group(tmp_path / f"{name}.zarr", zarr_format=3)
        root.create_array("data/x", shape=values.shape, dtype="float32", chunks=(10, 2), **arguments)[:] = values
        root.create_array("meta/episode_ends", data=np.array([30]))
        if good:
            np.testing.assert_array_equal(ReplayBuffer.copy_from_path(tmp_path / f"{name}.zarr")["x"], values)
        else:
            with pytest.raises(DataError, match="not read here"):
                ReplayBuffer.copy_from_path(tmp_path / f"{name}.zarr")


def test_files_that_are_none_do_not_hang(copied):
    """A pipe where a chunk or its metadata should be would be waited for."""
    (copied / "data/action/2.0").unlink()
    os.mkfifo(copied / "data/action/2.0")
    with pytest.raises(DataError, match="missing"):
        ReplayBuffer.copy_from_path(copied)
    (copied / "data/action/.zarray").unlink()
    os.mkfifo(copied / "data/action/.zarray")
    with pytest.raises(DataError, match="not a file"):
        ReplayBuffer.copy_from_path(copied)


def test_zip_bombs_are_refused(tmp_path):
    filled().save_to_path(tmp_path / "good.zip")
    with zipfile.ZipFile(tmp_path / "good.zip") as file:
        entries = {name: file.read(name) for name in file.namelist()}
    for name, kind, words in (
        ("data/action/0.0", zipfile.ZIP_DEFLATED, "cannot be read"),
        (".zattrs", zipfile.ZIP_DEFLATED, "no metadata"),
        ("data/action/0.0", zipfile.ZIP_BZIP2, "a method other than deflate"),
    ):
        with zipfile.ZipFile(tmp_path / "bomb.zip", "w") as file:
            for entry, data in entries.items():
                file.writestr(entry, bytes(100_000_000) if entry == name else data, compress_type=kind)
        tracemalloc.start()
        with pytest.raises(DataError, match=words):
            ReplayBuffer.copy_from_path(tmp_path / "bomb.zip")
        assert tracemalloc.get_traced_memory()[1] < 5e6
        tracemalloc.stop()
    with zipfile.ZipFile(tmp_path / "packed.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for entry, data in entries.items():
            file.writestr(entry, data)
    assert_equal(filled(), ReplayBuffer.copy_from_path(tmp_path / "packed.zip"))  # zipped by hand, as people do
