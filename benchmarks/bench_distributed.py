"""Training over ranks: cost of the path at one rank, bytes gathered, two ranks beside one, a cost model for GPUs."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common import build, random_batch, row

#: What the cost model assumes of a GPU: sustained FLOP/s of fp32 with TF32, bytes/s between GPUs of one machine and
#: between machines, and seconds to start a collective.
FLOPS, NEAR, FAR, LATENCY = 40e12, 150e9, 20e9, 30e-6
GPUS_PER_MACHINE = 8


def launched(ranks: int, *arguments: object) -> dict:
    """What benchmarks.rank_speed prints in this number of ranks with one thread each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, "-m", "benchmarks.rank_speed", *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def parts(backbone: str, batch: int) -> dict[str, float]:
    """What a step of the paper's networks computes and sends, counted on a small batch."""
    policy, _ = build(f"train_idp_{backbone}_lowdim", "policy.geometry=false")
    few = 4
    with FlopCounterMode(display=False) as counter:
        policy.train().compute_loss(random_batch(few, policy)).backward()
    actions = policy.generator.horizon * policy.action_dim
    with torch.no_grad():
        sample = random_batch(few, policy)["obs"]
        features = policy.generator.embedding(policy.generator.encode(sample)).shape[1]
    return {
        "network": counter.get_total_flops() / few * batch,
        "geometry": 2 * batch**2 * (features + 2 * actions),  # similarities, and two products with the actions
        "gathered": 4 * batch * (features + actions),
        "gradient": 4 * sum(p.numel() for p in policy.parameters() if p.requires_grad),
    }


def step_seconds(p: dict[str, float], gpus: int) -> float:
    """Seconds of a step: network and geometry are divided, the gradient is reduced in a ring, features are gathered."""
    compute = (p["network"] + p["geometry"]) / gpus / FLOPS
    if gpus == 1:
        return compute
    bandwidth = NEAR if gpus <= GPUS_PER_MACHINE else FAR
    others = (gpus - 1) / gpus
    return compute + (2 * others * p["gradient"] + others * p["gathered"]) / bandwidth + 4 * LATENCY


def cost_model(backbone: str, batch: int) -> list[dict]:
    p = parts(backbone, batch)
    one = step_seconds(p, 1)
    detail = (
        f"network {p['network']:.2e} FLOP, geometry {p['geometry']:.2e} FLOP, all-gather {p['gathered'] / 1e6:.1f} MB, "
        f"gradient {p['gradient'] / 1e6:.1f} MB; assumed {FLOPS:.0e} FLOP/s, {NEAR:.1e} B/s in a machine, "
        f"{FAR:.1e} B/s between machines"
    )
    return [
        row(
            f"cost model, {backbone}, batch {batch}: {gpus} GPUs / 1 GPU",
            one / step_seconds(p, gpus),
            "x",
            detail=detail,
        )
        for gpus in (8, 64)
    ]


def paired(rounds: int, one: Callable[[], dict], two: Callable[[], dict]) -> tuple[float, dict]:
    """Median over rounds of the seconds of `one` over those of `two`, and what `two` found."""
    found = [(one(), two()) for _ in range(rounds)]
    return statistics.median(a["seconds"] / b["seconds"] for a, b in found), found[-1][1]


def run(quick: bool = False) -> list[dict]:
    batch, count, rounds = (32, 2, 1) if quick else (64, 5, 3)
    path = launched(1, "path", "mlp", 256, 10 if quick else 60)
    speedup, two = paired(
        rounds,
        lambda: launched(1, "speed", "transformer", batch, count),
        lambda: launched(2, "speed", "transformer", batch, count),
    )
    rows = [
        row(
            "distributed path at one rank, mlp, batch 256, beyond one process",
            100 * (path["ratio"] - 1),
            "%",
            "<= 2",
            f"one process {1e3 * path['seconds']:.1f} ms",
        ),
        row(
            f"bytes gathered per step / B (F + H D) 4, transformer, batch {batch}, two ranks",
            two["bytes"] / two["expected"],
            "x",
            detail=f"{two['bytes']:.0f} bytes",
        ),
        row(
            f"two ranks / one rank of one thread, transformer, batch {batch}",
            speedup,
            "x",
            ">= 1.6",
            f"{rounds} rounds",
        ),
    ]
    for backbone in ("transformer",) if quick else ("transformer", "unet", "mlp"):
        rows += cost_model(backbone, 1024)
    return rows
