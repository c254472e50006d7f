"""Fetching a batch: its share of a training step, and the gain over collecting it sample by sample."""
import contextlib
import itertools
import os
import tempfile

import numpy as np
from torch.utils.data import default_collate

from benchmarks.common import TrainingStep, interleaved, ratio, row
from diffusion_policy.common.batch_stream import BatchStream
from diffusion_policy.common.config_util import project_path
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.dataset.pusht_dataset import PushTStateDataset

DEMOS = "data/demos/pusht_policy_rollouts.zarr"
EPISODES, LENGTH = 200, 125


@contextlib.contextmanager
def demonstrations():
    """(path, description) of the demonstrations of the project, or of random ones of their size."""
    path = project_path(DEMOS)
    if os.path.exists(path):
        yield path, DEMOS
        return
    rng = np.random.default_rng(0)
    buffer = ReplayBuffer.create_empty_numpy()
    for _ in range(EPISODES):
        shapes = {"state": (5,), "keypoint": (9, 2), "action": (2,)}
        buffer.add_episode({key: rng.uniform(0, 512, (LENGTH, *shape)).astype(np.float32) for key, shape in shapes.items()})
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "random.zarr")
        buffer.save_to_path(path)
        yield path, f"{EPISODES} random episodes of {LENGTH} steps"


def pass_task(stream: BatchStream):
    """A function that fetches all batches of a pass: a whole pass, so that its shuffling is part of the price."""
    batches = stream.batches()

    def fetch_pass():
        for _ in itertools.islice(batches, stream.batches_per_pass):
            pass

    return fetch_pass


def _gain(dataset, batch: int, rounds: int, source: str) -> dict:
    """Sample by sample / one gather, on the same order of indices."""
    stream = BatchStream(dataset, batch, drop_last=True)
    indices = stream.indices(0)

    def sample_by_sample():
        return default_collate([dataset[i] for i in next(indices).tolist()])

    times = interleaved("data", {"pass": pass_task(stream), "samples": sample_by_sample}, rounds, repeats={"samples": 5})
    count = stream.batches_per_pass
    return row(f"batch fetch, gain over sample by sample, batch {batch}", ratio(times["samples"], times["pass"]) * count, "x", ">= 20",
               f"fetch {1e3 * times['pass'].median / count:.3f} ms, sample by sample {1e3 * times['samples'].median:.2f} ms; {source}")


def _share(dataset, batch: int, rounds: int, source: str) -> dict:
    """Fetch / training step."""
    stream = BatchStream(dataset, batch, drop_last=True)
    step = TrainingStep("train_idp_transformer_lowdim", batch=stream.batch(0), obs_dim=5, action_dim=2,
                        normalizer=dataset.get_normalizer())
    step.warm_up()
    fetch_pass = pass_task(stream)
    fetch_pass()
    times = interleaved("data, training step", {"pass": fetch_pass, "step": step}, rounds, warmup=0)
    count = stream.batches_per_pass
    return row(f"batch fetch, share of the IDP step, transformer, batch {batch}", 100 * ratio(times["pass"], times["step"]) / count, "%",
               "<= 2", f"fetch {1e3 * times['pass'].median / count:.3f} ms, step {times['step'].median:.2f} s; {source}")


def run(quick: bool = False) -> list[dict]:
    with demonstrations() as (path, source):
        dataset = PushTStateDataset(path, horizon=16, pad_before=1, pad_after=7)
    return [
        _share(dataset, batch=64 if quick else 256, rounds=1 if quick else 3, source=source),
        _gain(dataset, batch=256, rounds=5 if quick else 11, source=source),
    ]
