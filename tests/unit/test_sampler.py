"""Windows: upstream's indices, and what holds for any episodes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.common.replay_buffer import ReplayBuffer, get_optimal_chunks
from diffusion_policy.common.sampler import SequenceSampler, create_indices, downsample_mask, get_val_mask
from tests import golden


@pytest.fixture(scope="module")
def upstream():
    return golden.read("sampler")


def buffer_of(lengths) -> ReplayBuffer:
    """`obs` counts the steps of the whole buffer."""
    buffer = ReplayBuffer.create_empty_numpy()
    for length in lengths:
        obs = np.arange(buffer.n_steps, buffer.n_steps + length, dtype=np.float32)
        buffer.add_episode({"obs": np.stack([obs, -obs], axis=1), "img": obs.astype(np.uint8)})
    return buffer


def test_indices_are_upstreams(upstream):
    for case in upstream["cases"]:
        indices = create_indices(
            np.array(upstream["episode_ends"]),
            case["sequence_length"],
            np.array(case["episode_mask"]),
            case["pad_before"],
            case["pad_after"],
        )
        # upstream fails where no window fits; the golden file then has null
        assert indices.dtype == np.int64 and list(indices.shape) == (case["shape"] or [0, 4])
        assert indices.tolist() == (case["indices"] or [])


def test_sequences_are_upstreams(upstream):
    buffer = buffer_of([5, 7, 8])
    case = upstream["sample_sequences"]
    arguments = {key: case[key] for key in ("sequence_length", "pad_before", "pad_after")}
    sampler = SequenceSampler(buffer, **arguments)
    assert [sampler.sample_sequence(i)["obs"][:, 0].tolist() for i in range(len(sampler))] == case["obs_col0"]

    sampler = SequenceSampler(buffer, **arguments, key_first_k={"obs": 2, "img": 2})
    expected = np.array(upstream["sample_sequences_key_first_k2"], dtype=float)
    np.testing.assert_array_equal([sampler.sample_sequence(i)["obs"][:, 0] for i in range(len(sampler))], expected)
    np.testing.assert_array_equal(
        [sampler.sample_sequence(i)["img"] for i in range(len(sampler))], np.nan_to_num(expected)
    )


def test_masks_are_upstreams(upstream):
    for case in upstream["val_mask"]:
        mask = get_val_mask(case["n_episodes"], case["val_ratio"], case["seed"])
        assert np.flatnonzero(mask).tolist() == case["val_idx"]
    train = downsample_mask(~get_val_mask(206, 0.02, 42), 90, 42)
    assert np.flatnonzero(train).tolist() == upstream["pusht_206_val0.02_max90_seed42"]["train_idx"]
    assert downsample_mask(train, None) is train and downsample_mask(train, 90) is train


def test_chunk_sizes_are_upstreams(upstream):
    for case in upstream["optimal_chunks"]:
        assert list(get_optimal_chunks(tuple(case["shape"]), case["dtype"])) == case["chunks"]


lengths = st.lists(st.integers(1, 12), min_size=1, max_size=5)


@settings(max_examples=150)
@given(lengths, st.integers(1, 9), st.integers(-2, 12), st.integers(-2, 12), st.randoms())
def test_windows(lengths, horizon, pad_before, pad_after, random):
    mask = np.array([random.random() < 0.7 for _ in lengths])
    buffer = buffer_of(lengths)
    sampler = SequenceSampler(buffer, horizon, pad_before, pad_after, episode_mask=mask)
    table = sampler.index_table
    assert table.shape == (len(sampler), horizon) and table.dtype == np.int64

    before, after = (min(max(pad, 0), horizon - 1) for pad in (pad_before, pad_after))
    assert len(sampler) == sum(max(0, n - horizon + 1 + before + after) for n in np.array(lengths)[mask])
    episode_of = buffer.get_episode_idxs()[table]
    assert (episode_of == episode_of[:, :1]).all()  # no window leaves its episode
    assert mask[episode_of[:, 0]].all()
    assert np.isin(np.diff(table, axis=1), (0, 1)).all()  # consecutive, or a repeated edge
    assert len(np.unique(sampler.indices, axis=0)) == len(sampler)
    for i in range(len(sampler)):
        for key, value in sampler.sample_sequence(i).items():
            np.testing.assert_array_equal(value, buffer[key][table[i]])


@pytest.mark.parametrize("horizon, count", [(10, 99), (16, 93)])
def test_counts_of_the_protocol(horizon, count):
    assert len(create_indices(np.array([100]), horizon, np.array([True]), pad_before=1, pad_after=7)) == count


def test_human_demonstrations_have_24208_windows(human_pusht):
    buffer = ReplayBuffer.create_from_path(human_pusht)
    assert len(SequenceSampler(buffer, 16, 1, 7)) == 24208


def test_reads_from_zarr_as_from_memory():
    memory = buffer_of([4, 6])
    stored = ReplayBuffer.create_empty_zarr()
    for i in range(2):
        stored.add_episode(memory.get_episode(i))
    a, b = (SequenceSampler(buffer, 5, 2, 2, key_first_k={"obs": 2}) for buffer in (memory, stored))
    for i in range(len(a)):
        for key, value in a.sample_sequence(i).items():
            np.testing.assert_array_equal(value, b.sample_sequence(i)[key])


def test_nothing_fits():
    assert create_indices(np.array([3, 6]), 10, np.array([True, True])).shape == (0, 4)
    assert create_indices(np.array([3, 6]), 2, np.array([False, False])).shape == (0, 4)
    assert create_indices(np.array([], dtype=np.int64), 2, np.array([], dtype=bool)).shape == (0, 4)
    assert SequenceSampler(buffer_of([3]), 10).index_table.shape == (0, 10)
    with pytest.raises(ConfigError, match="sequence_length"):
        SequenceSampler(buffer_of([3]), 0)


def test_validation_never_takes_every_episode():
    assert get_val_mask(1, 0.5).sum() == 0
    assert get_val_mask(3, 0.99).sum() == 2
    assert get_val_mask(50, 0.001).sum() == 1
    assert get_val_mask(50, 0).sum() == 0
