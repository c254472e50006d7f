"""Do the objectives cover the modes of demonstrations that disagree? A toy task with two modes.

The observation is one number o ~ U(-1, 1); the expert does m(o) or -m(o) with equal probability:

    m(o) = (0.6 + 0.2 sin(pi o), 0.4 cos(pi o))        in normalised actions, |m| between 0.4 and 0.8

The mean of the experts is zero, which no expert ever does. A sample is valid within 0.1 (Euclidean distance) of +m or
-m. Every method trains the same small network on the same number of batches. Each run is stored as one JSON file, so an
interrupted command continues where it stopped. The table and the figure show the requested runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import sys
import time
from typing import Any

import torch
from torch import Tensor

import idp_workspace.policy
from benchmarks.__main__ import machine
from diffusion_policy.model.common.normalizer import LinearNormalizer
from diffusion_policy.model.mip.networks import ResidualMLP, StateEncoder
from diffusion_policy.storage.atomic import write_atomically
from idp_workspace.policy.base import GeneratorPolicy

TOLERANCE = 0.1
STEPS = 1000
TRAINING = {"batch": 128, "learning_rate": 1e-3, "schedule": "cosine to 0", "width": 64, "blocks": 2, "grad_clip": 10.0}
EVALUATED = 4000  # samples, one per observation
PLOTTED = 500
HOT = (0.2, 0.5, 1.0)
# Scales the times of the diffusion objectives, 0..99 and 250 ln(sigma), to a range that a small MLP can resolve.
DDPM_TIME, EDM_TIME = 0.01, 0.1


@dataclasses.dataclass(frozen=True)
class Method:
    """A policy class by name, its options, and the numbers of network calls to evaluate (empty: the policy's default).

    Methods of one family share a row of the figure.
    """

    family: str
    label: str
    policy: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    nfe: tuple[int, ...] = ()
    teacher: str | None = None


def proposal(assign: str) -> dict[str, Any]:
    return {"proposal": {"noise": "gaussian", "samples": 8, "assign": assign}}


METHODS = {
    "regression_like": Method(
        "squared error", "IDP, no probe, m = 0", "IDPPolicy", {"lambda_prox": 0.0, "geometry": False}
    ),
    "regression": Method("squared error", "regression", "RegressionPolicy"),
    "idp": Method("squared error", "IDP", "IDPPolicy", nfe=(1, 2)),
    "idp_m0": Method("squared error", "IDP, m = 0", "IDPPolicy", {"geometry": False}, (1, 2)),
    "mip": Method("squared error", "MIP", "MIPPolicy", nfe=(1, 2)),
    "tsd": Method("squared error", "two-step denoising", "TSDPolicy", nfe=(1, 2)),
    "straight_flow": Method("squared error", "straight flow", "StraightFlowPolicy"),
    "idp_noise_all": Method("IDP from noise", "IDP, 8 proposals: all", "IDPPolicy", proposal("all"), (1, 2)),
    "idp_noise_wta": Method("IDP from noise", "IDP, 8 proposals: wta", "IDPPolicy", proposal("wta"), (1, 2)),
    "idp_noise_relaxed_wta": Method(
        "IDP from noise", "IDP, 8 proposals: relaxed wta", "IDPPolicy", proposal("relaxed_wta"), (1, 2)
    ),
    "idp_noise_drift": Method("IDP from noise", "IDP, 8 proposals: drift", "IDPPolicy", proposal("drift"), (1, 2)),
    "idp_multimodal": Method("IDP from codes", "IDP multimodal", "IDPMultimodalPolicy", nfe=(1, 2)),
    "idp_multimodal_4": Method("IDP from codes", "IDP multimodal, 4 codes", "IDPMultimodalPolicy", {"modes": 4}),
    "idp_multimodal_narrow": Method(
        "IDP from codes", "4 codes, width 0.05", "IDPMultimodalPolicy", {"modes": 4, "mode_width": 0.05}
    ),
    "idp_multimodal_wta": Method(
        "IDP from codes", "4 codes, winner takes all", "IDPMultimodalPolicy", {"modes": 4, "mode_width": 0.001}
    ),
    "idp_multimodal_all": Method(
        "IDP from codes", "IDP multimodal, all neighbours", "IDPMultimodalPolicy", {"same_mode": False}
    ),
    "naive_drifting": Method("explicit drifting", "drifting, as published", "NaiveDriftingPolicy"),
    "drifting_hot": Method("explicit drifting", "drifting, hot", "NaiveDriftingPolicy", {"temperatures": HOT}),
    "drifting_no_floor": Method(
        "explicit drifting", "drifting, no affinity floor", "NaiveDriftingPolicy", {"affinity_floor": 0.0}
    ),
    "drifting_knn": Method(
        "explicit drifting", "drifting, 8 nearest experts", "NaiveDriftingPolicy", {"positives": "knn", "knn_k": 8}
    ),
    "drifting_weighted": Method(
        "explicit drifting", "drifting, weighted experts", "NaiveDriftingPolicy", {"positives": "weighted"}
    ),
    "drifting_weighted_sharp": Method(
        "explicit drifting", "drifting, weighted, tau 0.1", "NaiveDriftingPolicy", {"positives": "weighted", "tau": 0.1}
    ),
    "drifting_weighted_top8": Method(
        "explicit drifting", "drifting, weighted, top 8", "NaiveDriftingPolicy", {"positives": "weighted", "topk": 8}
    ),
    "flow": Method("flows", "flow matching from noise", "FlowMatchingPolicy", {"start": "gaussian"}, (1, 2, 9)),
    "flow_zero": Method("flows", "flow matching from zero", "FlowMatchingPolicy", {"start": "zero"}, (1, 9)),
    "flow_policy": Method("flows", "FlowPolicy", "ConsistencyFlowPolicy", nfe=(1, 2)),
    "mean_flow": Method("flows", "MeanFlow", "MeanFlowPolicy"),
    "ofp": Method("flows", "OFP", "OFPPolicy"),
    "diffusion": Method("diffusion", "DDPM", "DDPMPolicy", {"time_scale": DDPM_TIME}),
    "edm_teacher": Method("diffusion", "EDM", "EDMTeacherPolicy", {"time_scale": EDM_TIME}),
    "consistency_training": Method(
        "diffusion", "consistency training", "ConsistencyTrainingPolicy", {"time_scale": EDM_TIME}, (1, 2)
    ),
    "consistency": Method(
        "diffusion", "Consistency Policy", "ConsistencyPolicy", {"time_scale": EDM_TIME}, (1, 2), teacher="edm_teacher"
    ),
    "onedp": Method("diffusion", "OneDP", "OneStepDiffusionPolicy", {"time_scale": DDPM_TIME}, teacher="diffusion"),
}


# ---------------------------------------------------------------------- the task
def modes(obs: Tensor) -> Tensor:
    """m(o) (B, 1, 2) for observations (B, 1, 1); the other mode is -m(o)."""
    return torch.cat([0.6 + 0.2 * torch.sin(math.pi * obs), 0.4 * torch.cos(math.pi * obs)], dim=-1)


def demonstrations(count: int) -> dict[str, Tensor]:
    obs = torch.rand(count, 1, 1) * 2 - 1
    sign = torch.randint(0, 2, (count, 1, 1)) * 2 - 1
    return {"obs": obs, "action": sign * modes(obs)}


# ---------------------------------------------------------------------- training
def available() -> list[str]:
    return [name for name, method in METHODS.items() if hasattr(idp_workspace.policy, method.policy)]


def build(method: Method) -> GeneratorPolicy:
    width = TRAINING["width"]
    options = dict(method.options)
    if method.policy in ("DDPMPolicy", "OneStepDiffusionPolicy"):
        from diffusers import DDPMScheduler

        options["noise_scheduler"] = DDPMScheduler(
            100, beta_schedule="squaredcos_cap_v2", variance_type="fixed_small", clip_sample=True
        )
    return getattr(idp_workspace.policy, method.policy)(
        horizon=1,
        obs_dim=1,
        action_dim=2,
        n_obs_steps=1,
        n_action_steps=1,
        obs_as_cond=True,
        model=ResidualMLP(2, 2, 1, 1, n_layer=TRAINING["blocks"], n_emb=width, p_drop=0.0),
        obs_encoder=StateEncoder(1, 1, width),
        **options,
    )


def train(method: Method, steps: int, seed: int) -> GeneratorPolicy:
    """Train a policy of the method; if it has a teacher, train that first in the same way."""
    teacher = train(METHODS[method.teacher], steps, seed) if method.teacher else None
    torch.manual_seed(seed)
    policy = build(method)
    normalizer = LinearNormalizer()
    # The identity: all values are in [-1, 1].
    normalizer.fit({"obs": torch.tensor([[-1.0], [1.0]]), "action": torch.tensor([[-1.0, -1.0], [1.0, 1.0]])})
    if teacher is None:
        policy.set_normalizer(normalizer)
    else:  # what on_train_start does with a teacher's checkpoint
        policy._teacher = (teacher.eval().requires_grad_(False),)
        policy.set_normalizer(normalizer)
        policy.take_over(teacher)
    parameters = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=TRAINING["learning_rate"], betas=(0.9, 0.95), weight_decay=1e-5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        policy.set_progress(step / steps)
        policy.compute_loss(demonstrations(TRAINING["batch"])).backward()
        torch.nn.utils.clip_grad_norm_(parameters, TRAINING["grad_clip"])
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return policy.eval()


# ---------------------------------------------------------------------- measuring
def evaluate(
    policy: GeneratorPolicy, nfe: int | None = None, count: int = EVALUATED
) -> tuple[dict[str, float], Tensor, Tensor, Tensor]:
    """The numbers of one row, and the observations (count,), actions (count, 2) and validity (count,) behind them.

    valid: share of samples within TOLERANCE of a mode; plus: share of +m among these; at_mean: share within TOLERANCE
    of zero.
    """
    if nfe is not None:
        policy.nfe = nfe
    calls = []
    hook = policy.model.register_forward_hook(lambda *_: calls.append(1))
    obs = torch.linspace(-1, 1, count)[:, None, None]
    action = policy.predict_action({"obs": obs})["action_pred"]
    hook.remove()

    def near(point: Tensor) -> Tensor:
        return (action - point).flatten(1).norm(dim=1) <= TOLERANCE

    plus, minus = near(modes(obs)), near(-modes(obs))
    valid = plus | minus
    total = valid.sum().item()
    numbers = {
        "nfe": len(calls),
        "valid": total / count,
        "plus": plus.sum().item() / total if total else None,
        "at_mean": near(torch.zeros(2)).float().mean().item(),
    }
    return numbers, obs.flatten(), action[:, 0], valid


def run(name: str, steps: int, seed: int, folder: pathlib.Path) -> dict[str, Any]:
    """The record of one method and seed, from its file if the settings are the same, else from a new run."""
    method = METHODS[name]
    settings = {
        "steps": steps,
        **TRAINING,
        "policy": method.policy,
        "options": json.loads(json.dumps(method.options)),
        "teacher": method.teacher,
    }
    path = folder / f"{name}_seed{seed}.json"
    if path.exists():
        record = json.loads(path.read_text())
        if record["settings"] == settings:
            return record
    started = time.process_time()
    policy = train(method, steps, seed)
    seconds = time.process_time() - started
    rows = []
    for nfe in method.nfe or (None,):
        torch.manual_seed(seed)
        numbers, obs, action, valid = evaluate(policy, nfe)
        points = zip(obs.tolist(), action[:, 0].tolist(), valid.tolist(), strict=True)
        rows.append(
            {**numbers, "points": [[round(o, 3), round(a, 3), int(ok)] for o, a, ok in points][:: EVALUATED // PLOTTED]}
        )
    record = {
        "method": name,
        "label": method.label,
        "seed": seed,
        "settings": settings,
        "cpu_seconds": round(seconds, 1),
        "rows": rows,
    }
    write_atomically(path, lambda file: file.write((json.dumps(record) + "\n").encode()))
    return record


# ---------------------------------------------------------------------- reporting
def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per method and number of calls: means over seeds, the range of the valid share."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for record in records:
        for row in record["rows"]:
            groups.setdefault((record["method"], row["nfe"]), []).append(row)
    rows = []
    for (name, nfe), members in groups.items():
        valid, plus = [m["valid"] for m in members], [m["plus"] for m in members if m["plus"] is not None]
        rows.append(
            {
                "method": name,
                "label": METHODS[name].label,
                "nfe": nfe,
                "seeds": len(members),
                "valid": sum(valid) / len(valid),
                "valid_range": [min(valid), max(valid)],
                "plus": sum(plus) / len(plus) if plus else None,
                "at_mean": sum(m["at_mean"] for m in members) / len(members),
            }
        )
    order = list(METHODS)
    return sorted(rows, key=lambda row: (order.index(row["method"]), row["nfe"]))


def percent(value: float) -> str:
    return f"{100 * value:.0f} %" if value == 0 or value >= 0.01 else "< 1 %"


def shares(row: dict[str, Any]) -> str:
    """Shares of +m and -m among the valid samples; empty if there are too few."""
    return (
        "" if row["plus"] is None or row["valid"] < 0.01 else f"{100 * row['plus']:.0f} / {100 * (1 - row['plus']):.0f}"
    )


def markdown(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    fewest, most = min(row["seeds"] for row in rows), max(row["seeds"] for row in rows)
    seeds = f"{fewest} to {most} seeds" if fewest < most else f"{most} seed{'s' if most > 1 else ''}"
    lines = ["| method | name | seeds | NFE | valid | +m / -m | at the mean |", "|---|---|---:|---:|---:|---:|---:|"]
    for row in rows:
        spread = f" ({percent(row['valid_range'][0])} to {percent(row['valid_range'][1])})" if row["seeds"] > 1 else ""
        lines.append(
            f"| {row['label']} | `{row['method']}` | {row['seeds']} | {row['nfe']} | {percent(row['valid'])}{spread} "
            f"| {shares(row)} | {percent(row['at_mean'])} |"
        )
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("python", "torch", "diffusers"))
    return "\n".join(
        [
            "# Two modes, one observation",
            "",
            "Experts do m(o) or -m(o), half and half, with m(o) = (0.6 + 0.2 sin(pi o), 0.4 cos(pi o)) and o uniform "
            "on [-1, 1]. In these",
            "normalised actions the modes are 0.8 to 1.6 apart and their mean is zero.",
            "",
            f"- valid: share of {EVALUATED} samples, at evenly spaced o, within {TOLERANCE} (Euclidean distance) "
            "of a mode",
            "- +m / -m: shares of the two modes among the valid samples",
            f"- at the mean: share of samples within {TOLERANCE} of zero",
            "- NFE: network calls per action, counted",
            "",
            *lines,
            "",
            "![samples](toy.png)",
            "",
            f"Made with `{about['command']}`: {seeds}, {about['steps']} steps of {TRAINING['batch']}",
            f"observations, AdamW {TRAINING['learning_rate']:g} with cosine decay, a residual MLP of "
            f"{TRAINING['blocks']} blocks of width {TRAINING['width']}; methods with several samples",
            "per observation draw 8. A teacher is trained for as many steps before its student. One step budget and "
            "one learning rate for",
            "all: a low share says what a method does here, not what it could do when tuned. "
            f"{'One seed says nothing of the spread. ' if fewest == 1 else ''}{versions}.",
            "",
            "`runs/` holds one file per method and seed; delete one to make it again. `toy.json` is the table as data.",
            "",
        ]
    )


def figure(records: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Plot the first action coordinate of samples against o: a row per family, a panel per method.

    A panel shows the method's first seed and fewest calls.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    first = {record["method"]: record for record in sorted(records, key=lambda r: -r["seed"])}
    families: dict[str, list[dict[str, Any]]] = {}
    for name, method in METHODS.items():
        if name in first:
            families.setdefault(method.family, []).append(first[name])
    columns = max(map(len, families.values()))
    height = 2.1 * len(families) + 0.6
    fig, axes = plt.subplots(
        len(families), columns, figsize=(max(7.0, 2.2 * columns), height), sharex=True, sharey=True, squeeze=False
    )
    grid = torch.linspace(-1, 1, 200)
    curve = modes(grid[:, None, None])[:, 0, 0]
    for line, (family, members) in zip(axes, families.items(), strict=True):
        line[0].set_ylabel(f"{family}\n", fontsize=10, fontweight="bold")
        for axis in line[len(members) :]:
            axis.set_visible(False)
        for axis, record in zip(line, members, strict=False):  # the rest of the row is empty
            for sign in (1, -1):
                axis.fill_between(
                    grid, sign * curve - TOLERANCE, sign * curve + TOLERANCE, color="0.86", linewidth=0, zorder=1
                )
            points = record["rows"][0]["points"]
            for wanted, color in ((0, "#d1502f"), (1, "#1f5fa8")):
                chosen = [(o, a) for o, a, valid in points if valid == wanted]
                if chosen:
                    axis.scatter(*zip(*chosen, strict=True), s=3, color=color, linewidths=0, zorder=2 + wanted)
            axis.set_title(METHODS[record["method"]].label, fontsize=9, pad=14)
            valid = ",  ".join(
                f"{percent(row['valid'])} at NFE {row['nfe']}" for row in [record["rows"][0], *record["rows"][1:][-1:]]
            )
            axis.text(0.5, 1.03, valid, transform=axis.transAxes, ha="center", va="bottom", fontsize=7, color="0.35")
            axis.set(xlim=(-1, 1), ylim=(-1.05, 1.05), xticks=(-1, 0, 1), yticks=(-1, 0, 1))
            axis.tick_params(labelsize=7, length=2)
            axis.spines[["top", "right"]].set_visible(False)
    for column in axes.T:
        lowest = [axis for axis in column if axis.get_visible()][-1]
        lowest.tick_params(labelbottom=True)
        lowest.set_xlabel("observation", fontsize=8)
    fig.suptitle(
        "First action coordinate of samples, at the fewest network calls, where experts do either of two things "
        "(grey).  Blue: valid, red: not.",
        fontsize=10,
        y=1 - 0.1 / height,
        va="top",
        wrap=True,
    )
    fig.tight_layout(rect=(0, 0, 1, 1 - 0.3 / height), h_pad=1.2, w_pad=0.8)
    fig.savefig(path, dpi=100)
    plt.close(fig)


def report(records: list[dict[str, Any]], output: pathlib.Path, about: dict[str, Any]) -> str:
    rows = summarise(records)
    text = markdown(rows, about)
    data = json.dumps({**about, "training": TRAINING, "tolerance": TOLERANCE, "rows": rows}, indent=1) + "\n"
    write_atomically(output / "toy.json", lambda file: file.write(data.encode()))
    write_atomically(output / "README.md", lambda file: file.write(text.encode()))
    figure(records, output / "toy.png")
    return text


def main(argv: list[str] | None = None) -> None:
    listing = "\n".join(f"  {name:<24} {METHODS[name].label}" for name in available())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.toy",
        description=f"{__doc__}\nmethods:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--methods", nargs="+", metavar="name", default=available(), help="all without a name")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (default: %(default)s)")
    parser.add_argument(
        "--seeds", type=int, default=1, help="runs per method, with seeds 0, 1, ... (default: %(default)s)"
    )
    parser.add_argument("--made", action="store_true", help="train nothing: the table of the runs that have been made")
    parser.add_argument("--output", default="results/toy", help="folder (default: %(default)s)")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.methods if name not in available()]
    if unknown:
        parser.error(f"unknown method {', '.join(unknown)}; choose from {', '.join(available())}")
    if arguments.steps < 1 or arguments.seeds < 1:
        parser.error("--steps and --seeds must be at least 1")

    output = pathlib.Path(arguments.output)
    about = {
        "command": " ".join(["python -m benchmarks.toy", *(sys.argv[1:] if argv is None else argv)]),
        "steps": arguments.steps,
        **machine(),
    }
    records = []
    for name in arguments.methods:
        for seed in range(arguments.seeds):
            if arguments.made and not (output / f"runs/{name}_seed{seed}.json").exists():
                continue
            records.append(run(name, arguments.steps, seed, output / "runs"))
            for row in records[-1]["rows"]:
                print(
                    f"{name:<24} seed {seed}  NFE {row['nfe']:<4} valid {percent(row['valid']):>6}  "
                    f"+m/-m {shares(row):>8}",
                    file=sys.stderr,
                    flush=True,
                )
    print(report(records, output, about))


if __name__ == "__main__":
    main()
