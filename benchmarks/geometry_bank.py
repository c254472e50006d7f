"""How well m of a small batch agrees with m of the whole dataset, with and without a memory bank.

    python -m benchmarks.geometry_bank --output results/geometry_bank

Batches are drawn as in training, without replacement, from the demonstrations that the repository ships. The features
are those of the policy before its first step, so that nothing depends on a training. The m of the same samples among
the whole dataset is what a batch estimates.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

import hydra
import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from scipy.stats import spearmanr
from torch import Tensor

from benchmarks.__main__ import machine
from diffusion_policy.common.config_util import config_dir, register_configs, register_resolvers
from diffusion_policy.dataset.identity import dataset_identity
from diffusion_policy.storage import atomic
from idp_workspace.geometry import Samples, compute_excess
from idp_workspace.geometry_variants import Geometry
from idp_workspace.memory_bank import MemoryBank

CONFIG = ("train_idp_mlp_lowdim", "preset=cpu", "augment=null")
BATCHES = (16, 32, 64, 128, 256, 512, 1024)
BANKS = (0, 256, 1024, 4096)
SEEDS = (0, 1, 2)
ROWS = 2048  # samples whose m is compared, for each seed


def load() -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Features (N, F) and normalised actions (N, H, D) of all windows, and the identity of the dataset."""
    register_resolvers()
    register_configs()
    with hydra.initialize_config_dir(str(config_dir()), version_base=None):
        cfg: DictConfig = hydra.compose(CONFIG[0], list(CONFIG[1:]))
    OmegaConf.resolve(cfg)
    torch.manual_seed(0)
    dataset, policy = hydra.utils.instantiate(cfg.task.dataset), hydra.utils.instantiate(cfg.policy).eval()
    policy.set_normalizer(dataset.get_normalizer())
    batch = dataset.get_batch(np.arange(len(dataset)))
    generator = policy.generator
    with torch.no_grad():
        phi = generator.embedding(generator.encode(policy.normalised(batch["obs"])))
    actions = policy.normalizer["action"].normalize(batch["action"])
    return phi, actions, dataset_identity(dataset, cfg.task.dataset)


def estimates(phi: Tensor, actions: Tensor, order: Tensor, batch: int, size: int) -> Tensor:
    """m of the last ROWS samples of `order`, drawn batch by batch; the ones before fill a bank of `size`."""
    bank, out = MemoryBank(size), []
    start = len(order) - ROWS
    first = start - -(-size // batch) * batch  # as many batches before as fill the bank
    for i in range(first, len(order), batch):
        rows = order[i : i + batch]
        own = Samples(phi[rows], actions[rows])
        if i >= start:
            among = bank.extended(own) if len(bank) else None
            out.append(compute_excess(own.phi, own.a, Geometry(), among=among))
        if size:
            bank.push(own.phi, own.a)
    return torch.cat(out)


def agreement(m: Tensor, truth: Tensor) -> dict[str, float]:
    rank: Any = spearmanr(m.flatten(), truth.flatten()).statistic
    error = (m - truth).abs().mean()
    return {"rank_correlation": float(rank), "mean_error": float(error), "relative": float(error / truth.mean())}


def measure(batches: tuple[int, ...], banks: tuple[int, ...], seeds: tuple[int, ...]) -> dict[str, Any]:
    phi, actions, identity = load()
    rows = []
    for seed in seeds:
        order = torch.randperm(len(phi), generator=torch.Generator().manual_seed(seed))
        order = order[: max(banks) + max(batches) + ROWS]
        last = order[-ROWS:]
        truth = compute_excess(phi[last], actions[last], Geometry(), among=Samples(phi, actions))
        for batch in batches:
            for size in banks:
                m = estimates(phi, actions, order, batch, size)
                rows.append({"seed": seed, "batch": batch, "bank": size, **agreement(m, truth)})
            print(f"seed {seed}, batch {batch}", file=sys.stderr, flush=True)
    return {"dataset": identity | {"windows": len(phi)}, "features": phi.shape[1], "rows": rows}


def mean(rows: list[dict[str, Any]], batch: int, bank: int, key: str) -> tuple[float, float, float]:
    values = [row[key] for row in rows if (row["batch"], row["bank"]) == (batch, bank)]
    return float(np.mean(values)), min(values), max(values)


def table(rows: list[dict[str, Any]], key: str) -> str:
    banks = sorted({row["bank"] for row in rows})
    lines = ["| batch | " + " | ".join("no bank" if not bank else f"bank of {bank}" for bank in banks) + " |"]
    lines.append("|---:|" + "---:|" * len(banks))
    for batch in sorted({row["batch"] for row in rows}):
        cells = ["{:.3f} ({:.3f} to {:.3f})".format(*mean(rows, batch, bank, key)) for bank in banks]
        lines.append(f"| {batch} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    titles = {"rank_correlation": "rank correlation with m of the dataset", "relative": "mean error / mean m"}
    for axes, (key, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for bank in sorted({row["bank"] for row in rows}):
            batches = sorted({row["batch"] for row in rows})
            points = [mean(rows, batch, bank, key) for batch in batches]
            (line,) = axes.plot(
                batches, [p[0] for p in points], marker="o", label=f"bank {bank}" if bank else "no bank"
            )
            axes.fill_between(
                batches, [p[1] for p in points], [p[2] for p in points], alpha=0.2, color=line.get_color()
            )
        axes.set_xscale("log", base=2)
        axes.set(xlabel="batch size", title=title)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)


def write(found: dict[str, Any], folder: pathlib.Path, command: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    about = {"command": command, **machine()}
    atomic.write_text(folder / "geometry_bank.json", json.dumps({**about, **found}, indent=1) + "\n")
    draw(found["rows"], folder / "geometry_bank.png")
    data, seeds = found["dataset"], sorted({row["seed"] for row in found["rows"]})
    text = f"""# m of a small batch, with and without a memory bank

Generated by `{command}`; `geometry_bank.json` has all numbers.
The m of {ROWS} samples, estimated from batches drawn as in training, beside the m of the same samples among all
{data["windows"]} windows of {data["name"]} (sha256 {data["sha256"][:16]}). Mean over the seeds
{", ".join(map(str, seeds))}, lowest and highest in brackets. `policy.bank_size` sets the bank. Features: the
{found["features"]} outputs of the untrained state encoder. In a training the features of a bank are those of an earlier
averaged encoder, which these numbers leave out.

torch {about["versions"]["torch"]}, {about["date"][:10]}.

![agreement over batch size](geometry_bank.png)

## Spearman rank correlation with m of the dataset

{table(found["rows"], "rank_correlation")}

## Mean absolute error of m, in units of the mean m of the dataset

{table(found["rows"], "relative")}
"""
    atomic.write_text(folder / "README.md", text)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.geometry_bank", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("results/geometry_bank"))
    parser.add_argument("--quick", action="store_true", help="one seed, two batch sizes, one bank")
    arguments = parser.parse_args(argv)
    quick = arguments.quick
    found = measure(BATCHES[:2] if quick else BATCHES, BANKS[:2] if quick else BANKS, SEEDS[:1] if quick else SEEDS)
    words = sys.argv[1:] if argv is None else argv
    write(found, arguments.output, " ".join(["python -m benchmarks.geometry_bank", *words]))
    print(table(found["rows"], "rank_correlation"))


if __name__ == "__main__":
    main()
