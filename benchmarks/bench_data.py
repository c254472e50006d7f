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


def run(quick: bool = False) -> list[dict]:
    batch = 64 if quick else 256
    with demonstrations() as (path, source):
        dataset = PushTStateDataset(path, horizon=16, pad_before=1, pad_after=7)
    stream = BatchStream(dataset, batch, drop_last=True)
    batches, indices = stream.batches(), stream.indices(0)
    count = stream.batches_per_pass

    def fetch_pass():               # a whole pass, so that its shuffling is part of the price
        for _ in itertools.islice(batches, count):
            pass

    def sample_by_sample():
        return default_collate([dataset[i] for i in next(indices).tolist()])

    step = TrainingStep("train_idp_transformer_lowdim", batch=stream.batch(0), obs_dim=5, action_dim=2,
                        normalizer=dataset.get_normalizer())
    step.warm_up()
    speed = interleaved("data", {"pass": fetch_pass, "samples": sample_by_sample}, rounds=5 if quick else 11, repeats={"samples": 5})
    share = interleaved("data, training step", {"pass": fetch_pass, "step": step}, rounds=1 if quick else 3, warmup=0)
    fetch = speed["pass"].median / count
    return [
        row(f"batch fetch, share of the IDP step, transformer, batch {batch}", 100 * ratio(share["pass"], share["step"]) / count, "%",
            "<= 2", f"fetch {1e3 * fetch:.3f} ms, step {share['step'].median:.2f} s; {source}"),
        row(f"batch fetch, gain over sample by sample, batch {batch}", ratio(speed["samples"], speed["pass"]) * count, "x", ">= 20",
            f"sample by sample {1e3 * speed['samples'].median:.2f} ms"),
    ]
