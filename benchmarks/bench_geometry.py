"""The geometry: its share of a training step, how its cost grows with the batch, and its memory."""

import math
import statistics

import torch

from benchmarks.common import TrainingStep, free_bytes, interleaved, peak_bytes, ratio, row
from idp_workspace.geometry import geometry_excess

HORIZON, ACTION_DIM, FEATURES = 16, 10, 768
FULL_BATCH, SMALL_BATCH = 1024, 256
#: Batches over which the growth of the cost is measured, up to the largest that is meant to run on one device.
SIZES, QUICK_SIZES = (64, 256, 1024, 4096, 16384), (64, 256, 1024)
STEP_BYTES = 18e9  # a step of the transformer at FULL_BATCH holds about this much


def geometry_task(batch: int):
    """A function that computes the geometry of a random batch."""
    features, actions = torch.randn(batch, FEATURES), torch.randn(batch, HORIZON, ACTION_DIM)
    return lambda: geometry_excess(features, actions)


def expected_peak(batch: int) -> float:
    """Peak memory by counting, in units of a (B, B) matrix.

    Either the similarities with the normalised features, or the weights with six (B, H D) arrays: the centred actions
    twice, W a^2, and three temporaries of the variance.
    """
    return max(1 + FEATURES / batch, 1 + 6 * HORIZON * ACTION_DIM / batch)


def exponent(seconds: dict[int, float]) -> float:
    """p of the least-squares line log seconds = p log B + c."""
    x, y = ([math.log(value) for value in values] for values in (seconds.keys(), seconds.values()))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def growth(sizes: tuple[int, ...], rounds: int) -> list[dict]:
    """The cost over the batch in processor time, and the memory of the largest batch."""
    tasks = {str(size): geometry_task(size) for size in sizes}
    repeats = {str(size): max(1, 4096 // size) for size in sizes}
    times = interleaved("geometry over the batch", tasks, rounds, repeats)
    seconds = {size: statistics.median(times[str(size)].cpu) for size in sizes}
    large = {size: value for size, value in seconds.items() if size >= sizes[-3]}
    span, peak = f"{sizes[0]} to {sizes[-1]}", peak_bytes(tasks[str(sizes[-1])])
    detail = ", ".join(f"{size}: {1e3 * value:.3g} ms" for size, value in seconds.items())
    return [
        row(f"geometry, exponent of the cost over the batch, {span}", exponent(seconds), "", detail=detail),
        row(f"geometry, exponent, {sizes[-3]} to {sizes[-1]}", exponent(large), "", "<= 2.2"),
        row(
            f"geometry, peak memory, batch {sizes[-1]}",
            peak / 1e6,
            "MB",
            detail=f"a (B, B) matrix has {4e-6 * sizes[-1] ** 2:.0f} MB",
        ),
    ]


def run(quick: bool = False) -> list[dict]:
    fits = free_bytes() > STEP_BYTES
    batch = FULL_BATCH if fits and not quick else SMALL_BATCH
    why = (
        ""
        if batch == FULL_BATCH
        else " (--quick)"
        if quick
        else f" (batch {FULL_BATCH} needs {STEP_BYTES / 1e9:.0f} GB of memory)"
    )
    geometry = geometry_task(batch)
    geometry()
    step = TrainingStep("train_idp_transformer_lowdim", batch=batch, action_dim=ACTION_DIM)
    step.warm_up()
    times = interleaved(
        "geometry", {"geometry": geometry, "step": step}, rounds=1 if quick else 2, repeats={"geometry": 20}, warmup=0
    )

    # This needs no training step, so the batch is always the full one.
    matrices = peak_bytes(geometry_task(FULL_BATCH)) / (4 * FULL_BATCH**2)
    return [
        row(
            f"geometry, share of the IDP step, transformer, batch {batch}{why}",
            100 * ratio(times["geometry"], times["step"]),
            "%",
            "<= 5",
            f"geometry {1e3 * times['geometry'].median:.1f} ms, step {times['step'].median:.2f} s",
        ),
        row(
            f"geometry, peak memory, batch {FULL_BATCH}",
            matrices,
            "(B, B) matrices",
            "< 4",
            f"counted by hand: {expected_peak(FULL_BATCH):.2f}",
        ),
        *growth(QUICK_SIZES if quick else SIZES, rounds=1 if quick else 3),
    ]
