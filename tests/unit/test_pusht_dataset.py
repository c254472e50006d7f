"""PushT datasets: what a sample is, that every way to a batch agrees, and what bad data says."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from diffusion_policy.common.errors import ConfigError, DataError, DataNotFoundError
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.common.sampler import get_val_mask
from diffusion_policy.dataset.base_dataset import BaseImageDataset, BaseLowdimDataset, LinearNormalizer
from diffusion_policy.dataset.pusht_dataset import PushTLowdimDataset, PushTStateDataset
from diffusion_policy.dataset.pusht_image_dataset import PushTImageDataset

WINDOW = dict(horizon=16, pad_before=1, pad_after=7)
CLASSES = [PushTLowdimDataset, PushTStateDataset, PushTImageDataset]


def make_buffer(lengths=(30, 25, 40, 20, 22), seed=0) -> ReplayBuffer:
    rng = np.random.default_rng(seed)
    buffer = ReplayBuffer.create_empty_numpy()
    for n in lengths:
        buffer.add_episode(
            {
                "action": rng.uniform(0, 512, (n, 2)).astype(np.float32),
                "state": rng.uniform(0, 512, (n, 5)).astype(np.float32),
                "keypoint": rng.uniform(0, 512, (n, 9, 2)).astype(np.float32),
                "img": rng.integers(0, 256, (n, 96, 96, 3)).astype(np.float32),
            }
        )
    return buffer


@pytest.fixture(scope="module")
def zarr_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("pusht") / "pusht.zarr"
    make_buffer().save_to_path(path)
    return path


def leaves(sample):
    """By key; images as floats, which a batch holds as bytes."""
    obs = {"obs": sample["obs"]} if isinstance(sample["obs"], torch.Tensor) else sample["obs"]
    return {key: value / 255 if value.dtype == torch.uint8 else value for key, value in obs.items()} | {
        "action": sample["action"]
    }


def test_lowdim_sample_is_upstreams(zarr_path):
    dataset, buffer = PushTLowdimDataset(zarr_path, **WINDOW), make_buffer()
    for i in (0, 1, 17, len(dataset) - 1):
        raw, sample = dataset.sampler.sample_sequence(i), dataset[i]
        obs = np.concatenate([raw["keypoint"].reshape(16, 18), raw["state"][:, :2]], axis=1)
        np.testing.assert_array_equal(sample["obs"], obs)
        np.testing.assert_array_equal(sample["action"], raw["action"])
        assert sample["obs"].dtype == sample["action"].dtype == torch.float32
    first = dataset[0]["action"]  # begins one step before the episode does
    np.testing.assert_array_equal(first, buffer["action"][[0, *range(15)]])
    assert len(dataset) == sum(n - 16 + 9 for n in (30, 25, 40, 20, 22))
    torch.testing.assert_close(dataset.get_all_actions(), torch.from_numpy(buffer["action"]))
    assert all(value.is_contiguous() for value in dataset.steps.values())


def test_image_sample_is_upstreams(zarr_path):
    dataset = PushTImageDataset(zarr_path, **WINDOW)
    raw, sample = make_buffer(), dataset[5]
    rows = dataset.index_table[5]
    assert dataset.frames.rows.dtype == torch.uint8
    assert sample["obs"]["image"].dtype == torch.float32 and sample["obs"]["image"].is_contiguous()
    np.testing.assert_array_equal(sample["obs"]["image"], np.moveaxis(raw["img"][rows], -1, 1) / np.float32(255))
    np.testing.assert_array_equal(sample["obs"]["agent_pos"], raw["state"][rows, :2])
    assert isinstance(dataset, BaseImageDataset) and not isinstance(dataset, BaseLowdimDataset)


def test_state_sample(zarr_path):
    dataset = PushTStateDataset(zarr_path, **WINDOW)
    np.testing.assert_array_equal(dataset[9]["obs"], make_buffer()["state"][dataset.index_table[9]])
    assert isinstance(dataset, BaseLowdimDataset)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_way_to_a_batch_agrees(zarr_path, cls):
    dataset = cls(zarr_path, **WINDOW)
    indices = [3, 0, len(dataset) - 1, 3]
    batch = leaves(dataset.get_batch(indices))
    by_tensor = leaves(dataset.get_batch(torch.tensor(indices)))
    loaded = leaves(next(iter(DataLoader(torch.utils.data.Subset(dataset, indices), batch_size=4))))
    singles = [leaves(dataset[i]) for i in indices]
    views = dataset.__getitems__(indices)
    for key, value in batch.items():
        assert value.shape[:2] == (4, 16)
        assert torch.equal(value, by_tensor[key]) and torch.equal(value, loaded[key])
        assert torch.equal(value, torch.stack([sample[key] for sample in singles]))
    assert (
        leaves(views[0])["action"].untyped_storage().data_ptr()
        == leaves(views[3])["action"].untyped_storage().data_ptr()
    )
    with pytest.raises(IndexError):
        dataset[len(dataset)]


@pytest.mark.parametrize("cls", CLASSES)
def test_normaliser(zarr_path, cls):
    dataset = cls(zarr_path, **WINDOW)
    normalizer = dataset.get_normalizer()
    assert isinstance(normalizer, LinearNormalizer)
    batch = leaves(dataset.get_batch(range(len(dataset))))
    assert set(normalizer.params_dict.keys()) == set(batch)
    for value in normalizer.normalize(batch).values():
        assert value.min() >= -1 - 1e-4 and value.max() <= 1 + 1e-4
    gaussian = dataset.get_normalizer(mode="gaussian")["action"](dataset.get_all_actions())
    torch.testing.assert_close(gaussian.mean(0), torch.zeros(2), atol=1e-4, rtol=0)


def test_validation_holds_the_held_out_episodes_only(zarr_path):
    dataset = PushTLowdimDataset(zarr_path, **WINDOW, val_ratio=0.2, max_train_episodes=2, seed=42)
    validation = dataset.get_validation_dataset()
    episode_of = dataset.replay_buffer.get_episode_idxs()
    train_episodes = np.unique(episode_of[dataset.index_table])
    val_episodes = np.unique(episode_of[validation.index_table])
    np.testing.assert_array_equal(val_episodes, np.flatnonzero(get_val_mask(5, 0.2, 42)))
    assert len(train_episodes) == 2 and not set(train_episodes) & set(val_episodes)
    assert validation.steps is dataset.steps  # no second copy of the data
    assert len(dataset.index_table) == len(dataset)
    assert len(PushTLowdimDataset(zarr_path, **WINDOW).get_validation_dataset()) == 0


def test_empty_base_classes():
    for cls in (BaseLowdimDataset, BaseImageDataset):
        assert len(cls()) == 0 and type(cls().get_validation_dataset()) is cls


def test_tiny_upstream_dataset(golden_files):
    path = golden_files / "tiny_pusht.zarr"
    lowdim, image = PushTLowdimDataset(path, **WINDOW), PushTImageDataset(path, **WINDOW)
    ends = ReplayBuffer.create_from_path(path).episode_ends
    assert len(lowdim) == len(image) == np.maximum(np.diff(ends, prepend=0) - 16 + 9, 0).sum()
    assert lowdim[0]["obs"].shape == (16, 20) and image[0]["obs"]["image"].shape == (16, 3, 96, 96)


def test_human_demonstrations(human_pusht):
    dataset = PushTLowdimDataset(human_pusht, **WINDOW)
    assert len(dataset) == 24208 and dataset.replay_buffer.n_episodes == 206
    assert PushTStateDataset(human_pusht, **WINDOW)[0]["obs"].shape == (16, 5)
    dataset = PushTLowdimDataset(human_pusht, **WINDOW, val_ratio=0.02, max_train_episodes=90)
    assert dataset.train_mask.sum() == 90 and np.flatnonzero(dataset.val_mask).tolist() == [18, 90, 134, 157]


# What goes wrong


def test_missing_dataset_says_how_to_get_it(tmp_path):
    for cls in CLASSES:
        with pytest.raises(DataNotFoundError) as error:
            cls(tmp_path / "nope.zarr")
        for words in (
            "nope.zarr",
            "https://diffusion-policy.cs.columbia.edu/data/training/pusht.zip",
            "python -m diffusion_policy.scripts.download pusht",
        ):
            assert words in str(error.value)


def without(key):
    return lambda buffer: buffer.data.pop(key)


def spoil(key, value):
    def change(buffer):
        buffer.data[key][37].flat[1] = value  # episode 1 begins at step 30

    return change


@pytest.mark.parametrize(
    "change, words",
    [
        (without("keypoint"), "no array data/keypoint; it has: .*action"),
        (without("action"), "no array data/action"),
        (
            lambda b: b.data.update(action=np.zeros((137, 3), np.float32)),
            r"'action' holds steps of shape \(3,\), expected \(2,\)",
        ),
        (lambda b: b.data.update(keypoint=np.zeros((137, 18), np.float32)), r"'keypoint' holds .* expected \(9, 2\)"),
        (spoil("action", np.nan), "'action' holds NaN or infinity in 1 steps, first in episode 1 at step 7"),
        (spoil("state", np.inf), "'state' holds NaN or infinity .* episode 1 at step 7"),
    ],
)
def test_bad_data(tmp_path, change, words):
    buffer = make_buffer()
    buffer.data.pop("img")
    change(buffer)
    buffer.save_to_path(tmp_path / "bad.zarr")
    with pytest.raises(DataError, match=words):
        PushTLowdimDataset(tmp_path / "bad.zarr", **WINDOW)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda b: b.data.update(img=np.zeros((137, 3, 96, 96), np.uint8)), "no images"),
        (spoil("img", 0.5), "data/img.*uint8"),
        (spoil("img", np.nan), "data/img.*uint8"),
    ],
)
def test_bad_images(tmp_path, change, words):
    buffer = make_buffer()
    change(buffer)
    buffer.save_to_path(tmp_path / "bad.zarr")
    with pytest.raises(DataError, match=words):
        PushTImageDataset(tmp_path / "bad.zarr", **WINDOW)


def test_no_window_fits(zarr_path):
    with pytest.raises(DataError, match="horizon is 50 .* longest of 5 episodes has 40 steps"):
        PushTLowdimDataset(zarr_path, horizon=50)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(horizon=0), "horizon"),
        (dict(pad_before=-1), "pad_before"),
        (dict(val_ratio=1.0), "val_ratio"),
        (dict(val_ratio=-0.1), "val_ratio"),
        (dict(max_train_episodes=0), "max_train_episodes"),
    ],
)
def test_bad_arguments(zarr_path, arguments, words):
    with pytest.raises(ConfigError, match=words):
        PushTLowdimDataset(zarr_path, **arguments)
