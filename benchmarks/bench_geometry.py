"""The geometry: its share of a training step, and its memory in units of one (B, B) matrix."""

import torch

from benchmarks.common import TrainingStep, free_bytes, interleaved, peak_bytes, ratio, row
from idp_workspace.geometry import geometry_excess

HORIZON, ACTION_DIM, FEATURES = 16, 10, 768
FULL_BATCH, SMALL_BATCH = 1024, 256
STEP_BYTES = 18e9  # a step of the transformer at FULL_BATCH holds about this much


def geometry_task(batch: int):
    """A function that computes the geometry of a random batch."""
    features, actions = torch.randn(batch, FEATURES), torch.randn(batch, HORIZON, ACTION_DIM)
    return lambda: geometry_excess(features, actions)


def expected_peak(batch: int) -> float:
    """Peak memory by counting, in units of a (B, B) matrix.

    Either the similarities with the normalised features, or the weights with five (B, H D) arrays: a, W a^2, and three
    temporaries of the variance.
    """
    return max(1 + FEATURES / batch, 1 + 5 * HORIZON * ACTION_DIM / batch)


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
    ]
