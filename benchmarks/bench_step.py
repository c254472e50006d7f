"""Cost of the objective in a training step: IDP and Naive Drifting compared with MIP, which is IDP without geometry."""

from benchmarks.common import TrainingStep, cpu_ratio, interleaved, ratio, row


def _compare(backbone: str, batch: int, rounds: int) -> dict:
    """IDP / MIP."""
    steps = {
        "idp": TrainingStep(f"train_idp_{backbone}_lowdim", batch=batch),
        "mip": TrainingStep(f"train_idp_{backbone}_lowdim", "policy.geometry=false", batch=batch),
    }
    for step in steps.values():
        step.warm_up()
    times = interleaved(f"step, {backbone}", steps, rounds)
    return row(
        f"IDP step / MIP step, {backbone}, batch {batch}",
        ratio(times["idp"], times["mip"]),
        "x",
        "<= 1.05",
        f"MIP {times['mip'].median:.3f} s, {rounds} rounds; "
        f"in processor time {cpu_ratio(times['idp'], times['mip']):.3f} x",
    )


def _naive(backbone: str, batch: int, rounds: int) -> dict:
    """Naive Drifting / MIP, on a batch that fits in memory: it draws several samples per observation."""
    steps = {
        "naive": TrainingStep(f"train_naive_drifting_{backbone}_lowdim", batch=batch),
        "mip": TrainingStep(f"train_idp_{backbone}_lowdim", "policy.geometry=false", batch=batch),
    }
    count = steps["naive"].policy.options.gens_per_obs
    times = interleaved(f"naive drifting, {backbone}", steps, rounds)
    return row(
        f"Naive Drifting step / MIP step, {backbone}, batch {batch}",
        ratio(times["naive"], times["mip"]),
        "x",
        detail=f"{count} samples per observation; MIP makes 2 network calls",
    )


def run(quick: bool = False) -> list[dict]:
    rows = [_compare("transformer", 64 if quick else 256, 3 if quick else 5)]
    rows.append(_compare("mlp", 256, 5 if quick else 15))
    rows.append(_naive("mlp", 256, 3))
    if not quick:
        rows.append(_compare("unet", 256, 5))
        rows.append(_naive("transformer", 32, 3))
    return rows
