"""torch.compile of the loss, and proposal and probe as one network call: training steps beside the plain ones."""

import torch

from benchmarks.common import TrainingStep, interleaved, ratio, row
from idp_workspace.policy.idp import potential
from idp_workspace.proposals import probe


def compiled(backbone: str, batch: int, rounds: int) -> dict:
    """Compiled step / eager step."""
    steps = {name: TrainingStep(f"train_idp_{backbone}_lowdim", batch=batch) for name in ("eager", "compiled")}
    policy = steps["compiled"].policy
    policy.compute_loss = torch.compile(policy.compute_loss)
    times = interleaved(f"compile, {backbone}", steps, rounds, warmup=2)
    return row(
        f"compiled step / eager step, {backbone}, batch {batch}",
        ratio(times["compiled"], times["eager"]),
        "x",
        detail=f"eager {times['eager'].median:.3f} s, {rounds} rounds",
    )


def one_call(backbone: str, batch: int, rounds: int) -> dict:
    """Proposal and probe of the whole batch in one network call / in two."""
    steps = {name: TrainingStep(f"train_mip_{backbone}_lowdim", batch=batch) for name in ("two", "one")}
    policy = steps["one"].policy

    def energies(cond, a, m):
        t, power = policy.options.t_star, policy.options.energy_power
        y, z = policy.generator.together((cond, policy.zeros(len(a)), 0.0), (cond, probe(a, t), t))
        return potential((y - a) / t, m, power), potential((z - a) / (1 - t), m, power)

    policy.energies = energies
    times = interleaved(f"one call, {backbone}", steps, rounds)
    return row(
        f"proposal and probe in one call / in two, {backbone}, batch {batch}",
        ratio(times["one"], times["two"]),
        "x",
        detail=f"two calls {times['two'].median:.3f} s, {rounds} rounds",
    )


def run(quick: bool = False) -> list[dict]:
    sizes = {"mlp": 64} if quick else {"mlp": 256, "transformer": 64, "unet": 32}
    rounds = 3 if quick else 7
    return [measure(name, batch, rounds) for name, batch in sizes.items() for measure in (compiled, one_call)]
