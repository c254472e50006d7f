"""Fetching a batch: its share of a training step, the speedup over single samples, the memory of an image dataset."""

import contextlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import hydra
import numpy as np
from omegaconf import DictConfig
from torch.utils.data import default_collate

from benchmarks.common import TrainingStep, fetch_and_step, interleaved, ratio, row
from benchmarks.data import write_robomimic
from benchmarks.soak import measure
from diffusion_policy.common.batch_stream import BatchStream
from diffusion_policy.common.config_util import config_dir, project_path, register_configs, register_resolvers
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.dataset.pusht_dataset import PushTStateDataset

DEMOS = "data/demos/pusht_policy_rollouts.zarr"
EPISODES, LENGTH = 200, 125
IMAGE_LENGTH = 100  # steps of an episode with images


@contextlib.contextmanager
def demonstrations():
    """(path, description) of the project's demonstrations, or of random ones of the same size."""
    path = project_path(DEMOS)
    if os.path.exists(path):
        yield path, DEMOS
        return
    rng = np.random.default_rng(0)
    buffer = ReplayBuffer.create_empty_numpy()
    for _ in range(EPISODES):
        shapes = {"state": (5,), "keypoint": (9, 2), "action": (2,)}
        buffer.add_episode(
            {key: rng.uniform(0, 512, (LENGTH, *shape)).astype(np.float32) for key, shape in shapes.items()}
        )
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "random.zarr")
        buffer.save_to_path(path)
        yield path, f"{EPISODES} random episodes of {LENGTH} steps"


def pass_task(stream: BatchStream):
    """A function that fetches all batches of a pass. A whole pass, so that shuffling is included."""
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

    times = interleaved(
        "data", {"pass": pass_task(stream), "samples": sample_by_sample}, rounds, repeats={"samples": 5}
    )
    count = stream.batches_per_pass
    return row(
        f"batch fetch, gain over sample by sample, batch {batch}",
        ratio(times["samples"], times["pass"]) * count,
        "x",
        ">= 20",
        f"fetch {1e3 * times['pass'].median / count:.3f} ms, sample by sample {1e3 * times['samples'].median:.2f} ms; "
        f"{source}",
    )


def _share(dataset, batch: int, rounds: int, source: str) -> dict:
    """Fetch / training step."""
    stream = BatchStream(dataset, batch, drop_last=True)
    step = TrainingStep(
        "train_idp_transformer_lowdim",
        batch=stream.batch(0),
        obs_dim=5,
        action_dim=2,
        normalizer=dataset.get_normalizer(),
    )
    step.warm_up()
    fetch_pass = pass_task(stream)
    fetch_pass()
    times = interleaved("data, training step", {"pass": fetch_pass, "step": step}, rounds, warmup=0)
    count = stream.batches_per_pass
    return row(
        f"batch fetch, share of the IDP step, transformer, batch {batch}",
        100 * ratio(times["pass"], times["step"]) / count,
        "%",
        "<= 2",
        f"fetch {1e3 * times['pass'].median / count:.3f} ms, step {times['step'].median:.2f} s; {source}",
    )


def image_config(path: str) -> DictConfig:
    """A small run on images of two cameras."""
    register_resolvers()
    register_configs()
    with hydra.initialize_config_dir(str(config_dir()), version_base=None):
        return hydra.compose(
            "train_idp_transformer_image", ["task=lift_ph_image", "preset=cpu", f"task.dataset_path={path}"]
        )


def print_memory(path: str) -> None:
    """Print the memory that opening an image dataset and a pass over it add to this process. Run in a new process."""
    cfg = image_config(path)
    hydra.utils.get_class(cfg.task.dataset._target_)  # imported before the first measurement
    before = measure(os.getpid())
    dataset = hydra.utils.instantiate(cfg.task.dataset, max_train_episodes=None)
    opened = measure(os.getpid())
    stream = BatchStream(dataset, cfg.dataloader.batch_size)
    looks = [measure(os.getpid()) for _ in itertools.islice(stream.batches(), stream.batches_per_pass)]
    most = max(look["rss"] for look in looks)
    print(
        json.dumps(
            {
                "images": len(dataset.frames) * dataset.frames.bytes,
                "opened": opened["rss"] - before["rss"],
                "most": most - before["rss"],
            }
        )
    )


def _image_memory(sizes: list[int]) -> dict:
    """Growth of memory / growth of the images, from the smallest to the largest dataset."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for steps in sizes:
            path = write_robomimic(
                pathlib.Path(folder) / f"{steps}.hdf5", lengths=[IMAGE_LENGTH] * (steps // IMAGE_LENGTH)
            )
            code = f"from benchmarks.bench_data import print_memory; print_memory({str(path)!r})"
            # Freed buffers of this size or more are returned to the system, so that only memory in use is counted.
            done = subprocess.run(
                [sys.executable, "-c", code],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                cwd=pathlib.Path(__file__).parents[1],
                env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
            )
            found.append(json.loads(done.stdout.splitlines()[-1]))

    def megabytes(key: str) -> str:
        return " / ".join(f"{entry[key] / 1e6:.0f}" for entry in found)

    growth = (found[-1]["most"] - found[0]["most"]) / (found[-1]["images"] - found[0]["images"])
    return row(
        "memory of an image dataset, growth for each byte of images",
        100 * growth,
        "%",
        "<= 5",
        f"{' / '.join(map(str, sizes))} steps with {megabytes('images')} MB of images take {megabytes('opened')} MB "
        f"once opened, and at most {megabytes('most')} MB during a pass",
    )


def _image_share(steps: int, rounds: int, workers: int = 2) -> dict:
    """Waiting for a batch / training step, with worker processes that prepare batches in the meantime."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_robomimic(
            pathlib.Path(folder) / "image_abs.hdf5", lengths=[IMAGE_LENGTH] * (steps // IMAGE_LENGTH)
        )
        cfg = image_config(str(path))
        dataset = hydra.utils.instantiate(cfg.task.dataset)
        alone = BatchStream(dataset, cfg.dataloader.batch_size, drop_last=True).batches()
        tasks = fetch_and_step(cfg, dataset, workers) | {"alone": lambda: next(alone)}
        times = interleaved("data, images", tasks, rounds, warmup=2)
    return row(
        f"waiting for a batch of images, share of the IDP step, {workers} workers",
        100 * ratio(times["fetch"], times["step"]),
        "%",
        "<= 5",
        f"preset=cpu, two cameras, batch {cfg.dataloader.batch_size}: wait {1e3 * times['fetch'].median:.2f} ms, step "
        f"{times['step'].median:.2f} s; without workers the fetch takes {1e3 * times['alone'].median:.2f} ms; "
        f"{steps} random steps",
    )


def run(quick: bool = False) -> list[dict]:
    with demonstrations() as (path, source):
        dataset = PushTStateDataset(path, horizon=16, pad_before=1, pad_after=7)
    return [
        _share(dataset, batch=64 if quick else 256, rounds=1 if quick else 3, source=source),
        _gain(dataset, batch=256, rounds=5 if quick else 11, source=source),
        _image_memory([500, 1000, 2000] if quick else [1000, 4000, 16000]),
        _image_share(steps=1000, rounds=3 if quick else 11),
    ]
