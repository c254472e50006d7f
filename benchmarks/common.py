"""Timing, memory measurement, rows of the result table, and the measured policies."""

from __future__ import annotations

import dataclasses
import json
import operator
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import hydra
import torch
from omegaconf import DictConfig
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from diffusion_policy.common.batch_stream import BatchStream
from diffusion_policy.common.config_util import config_dir, register_configs, register_resolvers
from diffusion_policy.model.common.normalizer import LinearNormalizer
from diffusion_policy.workspace.optimizer import make_optimizer

COMPARE = {"<=": operator.le, "<": operator.lt, ">=": operator.ge, ">": operator.gt}


def row(name: str, value: float | None, unit: str = "", target: str | None = None, detail: str = "") -> dict[str, Any]:
    """One measured number. `target` is like '<= 5', in the same unit; `met` is None without a target or value."""
    met = None
    if target is not None and value is not None:
        sign, bound = target.split()
        met = COMPARE[sign](value, float(bound))
    return {"name": name, "value": value, "unit": unit, "target": target, "met": met, "detail": detail}


# ---------------------------------------------------------------------- time
@dataclasses.dataclass
class Times:
    """Seconds of each round: wall-clock time, and processor time of this process, which other load affects less."""

    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.wall)


def interleaved(
    what: str, tasks: dict[str, Callable[[], Any]], rounds: int, repeats: dict[str, int] | None = None, warmup: int = 1
) -> dict[str, Times]:
    """Time the tasks in turn, A, B, A, B, ..., so that other load affects all of them.

    A task is called `repeats` times (by default once) per round; the round's time is that of the median call.
    """
    repeats = repeats or {}
    times = {name: Times() for name in tasks}
    for number in tqdm(range(-warmup, rounds), desc=what, leave=False, disable=None):
        for name, task in tasks.items():
            walls, cpus = [], []
            for _ in range(repeats.get(name, 1)):
                wall, cpu = time.perf_counter(), time.process_time()
                task()
                walls.append(time.perf_counter() - wall)
                cpus.append(time.process_time() - cpu)
            if number >= 0:
                times[name].wall.append(statistics.median(walls))
                times[name].cpu.append(statistics.median(cpus))
    return times


def ratio(a: Times, b: Times) -> float:
    """Median over rounds of a / b."""
    return statistics.median(x / y for x, y in zip(a.wall, b.wall, strict=True))


def cpu_ratio(a: Times, b: Times) -> float:
    """Median over rounds of a / b in processor time."""
    return statistics.median(x / y for x, y in zip(a.cpu, b.cpu, strict=True))


# ---------------------------------------------------------------------- memory
def peak_bytes(task: Callable[[], Any]) -> int:
    """Peak memory of torch's CPU allocator during `task`, relative to its start.

    Computed from the profiler's log of allocations and releases: buffers inside an operator count, in-place operators
    do not. Blocks that the task releases but did not allocate are not subtracted.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        task()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        events = json.loads(pathlib.Path(path).read_text())["traceEvents"]
    held = peak = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def free_bytes() -> float:
    """Memory available without swapping; infinite on systems without /proc/meminfo."""
    meminfo = pathlib.Path("/proc/meminfo")
    if not meminfo.exists():
        return float("inf")
    return next(
        int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable")
    )


# ---------------------------------------------------------------------- policies
def compose(config: str, *overrides: str, obs_dim: int = 19, action_dim: int = 10) -> DictConfig:
    """Compose a configuration at the paper's size. Observation and action sizes default to those of a robot arm."""
    register_resolvers()
    register_configs()
    sizes = ("preset=paper", f"task.obs_dim={obs_dim}", f"task.action_dim={action_dim}")
    with hydra.initialize_config_dir(str(config_dir()), version_base=None):
        return hydra.compose(config, [*sizes, *overrides])


def make_policy(section: DictConfig, normalizer: LinearNormalizer | None = None):
    """Build the policy of a config section, with a normaliser; by default one fitted to random numbers."""
    policy = hydra.utils.instantiate(section)
    if normalizer is None:
        normalizer = LinearNormalizer()
        normalizer.fit(random_batch(64, policy))
    policy.set_normalizer(normalizer)
    return policy


def build(
    config: str, *overrides: str, obs_dim: int = 19, action_dim: int = 10, normalizer: LinearNormalizer | None = None
):
    """(policy, cfg) of a configuration, see `compose`."""
    cfg = compose(config, *overrides, obs_dim=obs_dim, action_dim=action_dim)
    return make_policy(cfg.policy, normalizer), cfg


def random_batch(size: int, policy) -> dict[str, torch.Tensor]:
    return {
        "obs": torch.randn(size, policy.horizon, policy.obs_dim),
        "action": torch.randn(size, policy.horizon, policy.action_dim),
    }


class TrainingStep:
    """A callable that does one optimisation step on `batch`: forward, backward, AdamW."""

    def __init__(self, config: str, *overrides: str, batch: int | dict[str, torch.Tensor], **sizes: Any):
        self.policy, cfg = build(config, *overrides, **sizes)
        self.policy.train()
        self.optimizer = make_optimizer(cfg, self.policy)
        self.batch = random_batch(batch, self.policy) if isinstance(batch, int) else batch

    def __call__(self) -> None:
        self.step(self.batch)

    def warm_up(self, size: int = 8) -> None:
        """Step on a few samples, so that the optimiser's state exists afterwards."""
        self.step({key: value[:size] for key, value in self.batch.items()})

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        self.policy.compute_loss(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def fetch_and_step(cfg: Any, dataset: Any, workers: int = 0) -> dict[str, Callable[[], None]]:
    """Two callables: `fetch` takes the next batch from a stream, `step` trains the configuration's policy on it."""
    policy = make_policy(cfg.policy, dataset.get_normalizer()).train()
    optimizer = make_optimizer(cfg, policy)
    batches = BatchStream(dataset, cfg.dataloader.batch_size, drop_last=True, num_workers=workers).batches()
    held = {}

    def fetch() -> None:
        held["batch"] = next(batches)

    def step() -> None:
        policy.compute_loss(held["batch"]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return {"fetch": fetch, "step": step}


# ---------------------------------------------------------------------- evaluations
class Still:
    """A policy that does not move: chunks of eight zero actions."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, action_dim):
        self.action_dim = action_dim

    def reset(self):
        pass

    def predict_action(self, obs):
        return {"action": torch.zeros(len(next(iter(obs.values()))), 8, self.action_dim)}


def steps_per_s(runner, policy, rounds: int) -> float:
    """Median over rounds of environment steps per second, all workers together."""
    runner.run(policy)  # builds the environments and compiles functions on first use
    rates = []
    for _ in range(rounds):
        started = time.perf_counter()
        runner.run(policy)
        rates.append(sum(episode["steps"] for episode in runner.episodes) / (time.perf_counter() - started))
    runner.close()
    return statistics.median(rates)
