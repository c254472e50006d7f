"""Training steps of one rank or several, for bench_distributed, which starts it with torchrun. Prints JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import hydra
import torch

from benchmarks.common import compose, interleaved, ratio
from diffusion_policy.workspace import distributed
from idp_workspace import ranks

DATA = "task.dataset.zarr_path=${project:data/demos/pusht_policy_rollouts.zarr}"


class Steps:
    """Training steps of a run of IDP with the networks of the paper, one per call."""

    def __init__(self, backbone: str, batch: int) -> None:
        cfg = compose(f"train_idp_{backbone}_lowdim", DATA, f"dataloader.batch_size={batch}", obs_dim=5, action_dim=2)
        self.run: Any = hydra.utils.get_class(cfg._target_)(cfg, output_dir="unused")
        self.run.prepare()
        self.batches = self.run.stream.batches()

    def __call__(self) -> None:
        run = self.run
        run.model.set_progress(0.0)
        run.ranks.start_step(run.settings.seed, run.global_step)
        run.optimise(self.batches)
        run.ranks.any(False)
        run.global_step += 1


def speed(backbone: str, batch: int, count: int) -> dict[str, float]:
    """Seconds per step, and the bytes that a step gathers beside those that it should."""
    steps = Steps(backbone, batch)
    steps()
    ranks.received, started = 0, time.perf_counter()
    for _ in range(count):
        steps()
    seconds = (time.perf_counter() - started) / count
    phi, m, _ = steps.run.model._last
    return {
        "seconds": seconds,
        "bytes": ranks.received / count,
        "expected": 4 * batch * (phi[0].numel() + m[0].numel()),
    }


def path(backbone: str, batch: int, rounds: int) -> dict[str, float]:
    """Time of a step through the distributed path at one rank, over that of the plain one."""
    plain = Steps(backbone, batch)
    distributed.connect.cache_clear()
    one_rank = distributed.Ranks("cpu")
    distributed.connect = lambda device: one_rank  # type: ignore[assignment]
    times = interleaved("path", {"plain": plain, "ranks": Steps(backbone, batch)}, rounds)
    return {"ratio": ratio(times["ranks"], times["plain"]), "seconds": times["plain"].median}


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, backbone, *numbers = sys.argv[1:]
    found = {"speed": speed, "path": path}[what](backbone, *map(int, numbers))
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(json.dumps(found), flush=True)
    distributed.disconnect()
