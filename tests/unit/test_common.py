"""Small shared parts: the batch stream, config arithmetic, intervals, random state."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffusion_policy.common.batch_stream import BatchStream
from diffusion_policy.common.config_util import evaluate, resolve_device
from diffusion_policy.common.errors import ConfigError
from diffusion_policy.common.random_state import RandomState, isolated_random_state, seed_everything
from diffusion_policy.common.statistics import mean_interval


class Numbers(torch.utils.data.Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return {"x": torch.tensor(i)}


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 30), st.booleans())
def test_a_stream_continues_where_it_is_told(n, batch, start, shuffle):
    stream = BatchStream(Numbers(n), batch, seed=3, shuffle=shuffle)
    from_zero, from_start = stream.indices(0), stream.indices(start)
    for _ in range(start):
        next(from_zero)
    for _ in range(5):
        assert torch.equal(next(from_zero), next(from_start))


@given(st.integers(1, 40), st.integers(1, 12))
def test_each_pass_sees_every_sample_once_and_passes_differ(n, batch):
    stream = BatchStream(Numbers(n), batch, seed=1)
    indices = stream.indices(0)
    passes = [torch.cat([next(indices) for _ in range(stream.batches_per_pass)]) for _ in range(2)]
    assert all(p.sort().values.tolist() == list(range(n)) for p in passes)
    assert n < 8 or not torch.equal(*passes)


def test_a_stream_does_not_touch_the_training_s_random_numbers_and_works_with_processes():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    for workers in (0, 2):
        batches = BatchStream(Numbers(10), 4, drop_last=True, num_workers=workers).batches(1)
        seen = [next(batches)["x"] for _ in range(3)]
        assert [len(x) for x in seen] == [4, 4, 4]
        if workers == 0:
            first = seen
    assert all(torch.equal(a, b) for a, b in zip(first, seen, strict=True))
    assert torch.equal(torch.rand(3), expected)


def test_a_dataset_smaller_than_a_batch_is_reported():
    with pytest.raises(ConfigError, match="fewer than one batch"):
        BatchStream(Numbers(3), 4, drop_last=True)


@pytest.mark.parametrize(
    "text, value",
    [
        ("2 - 1 + 0", 1),
        ("20 * 2 if True else None", 40),
        ("7 if False or False else 2 + 20", 22),
        ("None", None),
        ("500 if 'mh' == 'mh' else 400", 500),
        ("-(3 // 2)", -1),
        ("[1, 2]", [1, 2]),
        ("None or 90", 90),
        ("8 or None", 8),
        ("0 and 5", 0),
        (5, 5),
    ],
)
def test_config_arithmetic(text, value):
    assert evaluate(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "open('x')",
        "().__class__",
        "lambda: 1",
        "x + 1",
        "1 +",
        "2 ** 99999999",
        "'a' * 1000000000",
    ],
)
def test_config_arithmetic_runs_no_code(text):
    with pytest.raises(ConfigError):
        evaluate(text)


def test_devices():
    assert resolve_device("auto").type in ("cuda", "mps", "cpu") and resolve_device("cpu").type == "cpu"
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_device("quantum")


def test_intervals():
    low, high = mean_interval(np.ones(50))
    assert 0.9 < low < 1.0 and high == pytest.approx(1.0)  # fifty successes do not prove certainty
    low, high = mean_interval(np.array([1.0] * 40 + [0.0] * 10))
    assert (low, high) == (
        pytest.approx(0.670, abs=0.002),
        pytest.approx(0.888, abs=0.002),
    )  # Wilson's, from its formula
    scores = np.random.default_rng(0).uniform(size=400)
    low, high = mean_interval(scores)
    assert high - low == pytest.approx(2 * 1.96 * scores.std() / 20, rel=0.1)


def test_random_state_is_kept_and_isolated():
    seed_everything(1)
    keeper = RandomState()
    state = keeper.state_dict()

    def draw():
        return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()

    first = draw()
    with isolated_random_state(7):
        draw()
    second = draw()
    keeper.load_state_dict(state)
    assert (draw(), draw()) == (first, second)
