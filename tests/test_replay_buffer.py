"""Replay buffers: upstream's files, round trips through every storage, and damaged data."""
import json
import shutil
import tempfile

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from diffusion_policy.common.errors import DataError, DataNotFoundError
from diffusion_policy.common.replay_buffer import ReplayBuffer, get_optimal_chunks, read_array


def episode(length, seed=0):
    rng = np.random.default_rng(seed)
    return {"action": rng.normal(size=(length, 2)).astype(np.float32), "img": rng.integers(0, 255, (length, 3, 3), dtype=np.uint8)}


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

@pytest.mark.parametrize("name", [
    "pusht_like_zarr_backend.zarr", "pusht_like_numpy_backend.zarr", "create_from_path.zarr", "pusht_like.zarr.zip"])
def test_reads_what_upstream_wrote(golden, name):
    expected = np.load(golden / "replay_buffer_fixture/expected.npz")
    path = golden / "replay_buffer_fixture" / name
    for buffer in (ReplayBuffer.copy_from_path(path), ReplayBuffer.create_from_path(path),
                   ReplayBuffer.copy_from_path(path, store=zarr.storage.MemoryStore())):
        n = 2 if name == "create_from_path.zarr" else 3  # of that one, the last episode was dropped
        np.testing.assert_array_equal(buffer.episode_ends, expected["episode_ends"][:n])
        for key in set(expected) - {"episode_ends"}:
            np.testing.assert_array_equal(buffer[key][:], expected[key][:buffer.n_steps])


def test_writes_upstreams_layout(golden, tmp_path):
    folder = golden / "replay_buffer_fixture"
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
    assert ends["chunks"] == layout["meta/episode_ends"]["chunks"] and ends["compressor"] is None and ends["dtype"] == "<i8"


# Round trips

@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_storages_agree(lengths, data):
    values = [{"x": data.draw(hnp.arrays(np.float32, (n, 2), elements=st.floats(-9, 9, width=32))),
               "k": np.zeros((n, 1), dtype=np.int64)} for n in lengths]  # zeros: chunks that zarr would leave out by default
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
        with pytest.raises(DataError, match="only read"):
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
    with pytest.raises(DataError, match="already there"):
        filled().save_to_path("b.zarr.zip", if_exists="raise")


@pytest.mark.parametrize("bad, words", [
    ({"action": np.zeros((3, 2)), "img": np.zeros((4, 3, 3))}, "same length"),
    ({"action": np.zeros((0, 2)), "img": np.zeros((0, 3, 3))}, "at least 1"),
    ({"action": np.zeros((3, 2))}, "keys"),
    ({"action": np.zeros((3, 5)), "img": np.zeros((3, 3, 3))}, r"data/action holds steps of shape \(2,\)"),
])
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


def rewrite(path, name, values):
    root = zarr.open_group(path, mode="r+")
    root.create_array(name, data=np.asarray(values), overwrite=True, config={"write_empty_chunks": True})


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize("damage, words", [
    (lambda p: (p / ".zgroup").unlink() or shutil.rmtree(p / "data") or shutil.rmtree(p / "meta"), "not a zarr group"),
    (lambda p: shutil.rmtree(p / "data"), "no group 'data'"),
    (lambda p: shutil.rmtree(p / "meta"), "no group 'meta'"),
    (lambda p: shutil.rmtree(p / "meta/episode_ends"), "no array meta/episode_ends"),
    (lambda p: rewrite(p, "data/action", np.ones((49, 2))), "data/action has shape .49, 2., but .* 50 steps"),
    (lambda p: rewrite(p, "data/action", np.float32(1)), "data/action has shape"),
    (lambda p: rewrite(p, "meta/episode_ends", [30, 20]), "increase"),
    (lambda p: rewrite(p, "meta/episode_ends", [20, 20, 50]), "increase"),
    (lambda p: rewrite(p, "meta/episode_ends", [-5, 50]), "increase"),
    (lambda p: rewrite(p, "meta/episode_ends", [20.0, 50.0]), "integers"),
    (lambda p: [rewrite(p, f"data/{k}", np.ones((0, 2))) for k in ("action", "img")]
        and rewrite(p, "meta/episode_ends", np.zeros(0, dtype=np.int64)), "no episodes"),
    (lambda p: (p / "data/action/2.0").unlink(), "data/action: 1 of 5 chunks are missing"),
    (lambda p: (p / "meta/episode_ends/0").unlink(), "episode_ends: 1 of 1 chunks are missing"),
    (lambda p: cut(p / "data/action/2.0"), "data/action cannot be read"),
    (lambda p: (p / "data/action/2.0").write_bytes(b""), "data/action cannot be read"),
    (lambda p: (p / "data/action/2.0").write_bytes(b"\x07" * 90), "data/action cannot be read"),
    (lambda p: cut(p / "meta/episode_ends/0"), "episode_ends cannot be read"),
    (lambda p: (p / "data/action/.zarray").unlink(), "no array data/action; it has: img"),
    (lambda p: cut(p / "data/action/.zarray"), "metadata of an array .* cannot be read"),
    (lambda p: cut(p / "meta/episode_ends/.zarray"), "metadata of an array .* cannot be read"),
])
def test_damage_is_found_at_load(good, tmp_path, damage, words):
    path = tmp_path / "b.zarr"
    shutil.copytree(good, path)
    damage(path)
    with pytest.raises(DataError, match=words):
        ReplayBuffer.copy_from_path(path, keys=["action", "img"])


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
    with pytest.raises(DataError, match="only read in place"):
        ReplayBuffer.create_from_path(tmp_path / "b.zarr.zip", mode="a")


def test_a_cast_must_keep_the_values():
    assert read_array(np.array([0.0, 255.0]), "uint8").tolist() == [0, 255]
    for bad in (0.5, -1.0, 256.0, np.nan):
        with pytest.raises(DataError, match="uint8"):
            read_array(np.array([1.0, bad]), "uint8")
