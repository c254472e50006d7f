"""Does a policy reach both modes of demonstrations that are half left, half right, and does a rollout keep its mode?

    python -m benchmarks.mode_coverage [--tasks pusht pick_peach] [--methods ...] [--seeds ...]

pusht: the agent goes left or right around the block (`benchmarks.bimodal_pusht`). pick_peach: the arm puts the peach
on the left or the right of the plate. In both, the observation does not tell the side until the demonstration turns.

Each run is trained with `train.py` in data/mode_coverage/, and acts from starts that no demonstration has. What is done
is skipped, so an interrupted command continues. The tables go to results/mode_coverage/.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import bimodal_pusht
from benchmarks.__main__ import machine
from benchmarks.bimodal_pusht import BimodalPushTRunner, to_axes
from diffusion_policy import load_policy
from diffusion_policy.common.config_util import PACKAGE
from diffusion_policy.storage.atomic import write_text
from idp_workspace.suite import jobs
from idp_workspace.suite.statistics import interval

ROOT = PACKAGE.parent
RUNS, RESULTS = ROOT / "data/mode_coverage", ROOT / "results/mode_coverage"
EPISODES = 50
SIDES = ("left", "right")
NEIGHBOURS = 16
EXPERT_SHARE = 0.95  # of the experts' own chunks that count as valid


@dataclasses.dataclass(frozen=True)
class Method:
    """A name, what `train.py` is told, and options that acting changes."""

    label: str
    overrides: tuple[str, ...]
    acting: dict[str, Any] = dataclasses.field(default_factory=dict)
    executed: int | None = None
    """Steps of a chunk that are executed, if not the task's."""
    trained_as: str | None = None
    """The method whose checkpoint it uses; its own if None."""


MULTIMODAL = ("objective=idp_multimodal",)
METHODS = {
    "idp": Method("IDP", ("objective=idp",)),
    "idp_drift": Method(
        "IDP, 4 proposals: drift",
        (
            "objective=idp",
            "policy.proposal.noise=gaussian",
            "policy.proposal.samples=4",
            "policy.proposal.assign=drift",
        ),
    ),
    "naive_drifting": Method("Naive Drifting", ("objective=naive_drifting",)),
    "drifting_top8": Method(
        "drifting, weighted, top 8", ("objective=naive_drifting", "policy.positives=weighted", "policy.topk=8")
    ),
    "idp_multimodal": Method("IDP multimodal", MULTIMODAL, {"draw": "chunk"}),
    "idp_multimodal_episode": Method(
        "IDP multimodal, a draw per episode", MULTIMODAL, {"draw": "episode"}, trained_as="idp_multimodal"
    ),
    "idp_multimodal_likeliest": Method(
        "IDP multimodal, likeliest code", MULTIMODAL, {"draw": "likeliest"}, trained_as="idp_multimodal"
    ),
    "idp_2": Method("IDP, 2 steps of a chunk", ("objective=idp",), executed=2, trained_as="idp"),
    "idp_multimodal_2": Method(
        "IDP multimodal, 2 steps of a chunk", MULTIMODAL, {"draw": "chunk"}, executed=2, trained_as="idp_multimodal"
    ),
    "idp_multimodal_episode_2": Method(
        "IDP multimodal, a draw per episode, 2 steps of a chunk",
        MULTIMODAL,
        {"draw": "episode"},
        executed=2,
        trained_as="idp_multimodal",
    ),
    "idp_multimodal_all_neighbours": Method(
        "IDP multimodal, neighbours of all modes", (*MULTIMODAL, "policy.same_mode=false"), {"draw": "chunk"}
    ),
}


# ---------------------------------------------------------------------- the tasks
@dataclasses.dataclass(frozen=True)
class Task:
    """How a task is trained and played, and how its modes are told apart.

    `open` says for observations (N, Do) whether the mode is still open there; `side` gives the sign of the mode that
    action chunks (N, H, Da) choose, 0 if they choose none; `outcome` the side of an episode, if it succeeded.
    """

    title: str
    overrides: tuple[str, ...]
    seeds: tuple[int, ...]
    """Of the training."""
    first_start: int
    """Seed of the evaluation's first start. Hyper-parameters were chosen on other starts, but for what `note` says."""
    make_data: Callable[[], pathlib.Path]
    runner: Callable[..., Any]
    open: Callable[[Tensor], Tensor]
    side: Callable[[Tensor], Tensor]
    outcome: Callable[[dict[str, Any], float], str | None]
    note: str = ""
    """What a reader of the results should know."""


def pusht_data() -> pathlib.Path:
    path = ROOT / bimodal_pusht.DATA
    if not path.exists():
        bimodal_pusht.write(path, pairs=50, seed=0)
    return path


def pick_peach_data() -> pathlib.Path:
    path = ROOT / "data/pick_peach"
    if not path.exists():
        command = ["-m", "diffusion_policy.scripts.generate_demos", "pick_peach", "--episodes", "100", "-o", str(path)]
        subprocess.run([sys.executable, *command], check=True, cwd=ROOT)
    return path


def around_the_block(obs: Tensor) -> Tensor:
    """Whether the agent is still in front of the block's foot or beside the block."""
    return torch.from_numpy(to_axes(obs[:, :2].numpy())[:, 0] > to_axes(obs[:, 2:4].numpy())[:, 0] + 30)


def sideways(chunk: Tensor) -> Tensor:
    v = torch.from_numpy(to_axes(chunk.numpy())[..., 1]).mean(dim=1)
    return v.sign() * (v.abs() > 15)


def pick_peach_runner(output: str, **options: Any) -> Any:
    from diffusion_policy.env_runner.pick_peach_runner import PickPeachRunner

    return PickPeachRunner(output, max_steps=600, **options)


def above_the_plate(obs: Tensor) -> Tensor:
    """Whether the hand is above the middle of the plate and holds the peach, which keeps the fingers apart."""
    return (obs[:, 0].abs() < 0.06) & (obs[:, 6] > 0.45) & (obs[:, 6] < 0.75)


def waist(chunk: Tensor) -> Tensor:
    last = chunk[:, -1, 0]
    return last.sign() * (last.abs() > 0.05)


TASKS = {
    "pusht": Task(
        "PushT, left and right around the block",
        ("task=pusht_state", "augment=null", "training.num_epochs=2"),
        (0, 1, 2),
        400000,
        pusht_data,
        lambda output, **options: BimodalPushTRunner(output, max_steps=200, **options),
        around_the_block,
        sideways,
        lambda episode, side: ("left" if side > 0 else "right") if episode["max_reward"] >= 1 and side else None,
        "One run with another width of a mode (0.05: 50 of 50 solved, 21 left, 29 right) was seen on these starts\n"
        "before the default of 0.2 was chosen.",
    ),
    "pick_peach": Task(
        "Pick Peach, left and right of the plate, from joint positions",
        ("task=pick_peach_qpos", "training.num_epochs=2"),
        (3, 4, 5),
        600000,
        pick_peach_data,
        pick_peach_runner,
        above_the_plate,
        waist,
        lambda episode, side: episode["placement"],
    ),
}


# ---------------------------------------------------------------------- acting
class Watched:
    """A policy that keeps what it saw and predicted."""

    def __init__(self, policy: Any):
        self.policy, self.device = policy, policy.device
        self.seen: list[Tensor] = []
        self.chunks: list[Tensor] = []
        self.calls = 0
        policy.model.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def reset(self) -> None:
        self.policy.reset()
        self.seen, self.chunks, self.calls = [], [], 0

    def predict_action(self, obs: dict[str, Tensor]) -> dict[str, Tensor]:
        result = self.policy.predict_action(obs)
        steps = self.policy.n_obs_steps
        self.seen.append(obs["obs"][:, steps - 1].clone())
        self.chunks.append(result["action_pred"][:, steps - 1 :].clone())
        return result


def play(task: Task, checkpoint: pathlib.Path, method: Method, seed: int, output: pathlib.Path) -> dict[str, Any]:
    """Numbers of a checkpoint over EPISODES starts."""
    torch.manual_seed(seed)
    policy = load_policy(checkpoint, device="cpu")
    policy.options = dataclasses.replace(policy.options, **method.acting)
    policy.n_action_steps = method.executed or policy.n_action_steps
    watched = Watched(policy)
    runner = task.runner(
        str(output),
        n_train=0,
        n_train_vis=0,
        n_test=EPISODES,
        n_test_vis=0,
        test_start_seed=task.first_start,
        n_obs_steps=policy.n_obs_steps,
        n_action_steps=policy.n_action_steps,
    )
    runner.run(watched)
    runner.close()
    seen, chunks = torch.stack(watched.seen, dim=1), torch.stack(watched.chunks, dim=1)  # (N, calls, ...)
    played = torch.arange(seen.shape[1]) * policy.n_action_steps < torch.tensor(
        [episode["steps"] for episode in runner.episodes]
    ).unsqueeze(1)
    shape = seen.shape[:2]
    undecided = task.open(seen.flatten(0, 1)).view(shape) & played
    executed = chunks[:, :, : max(policy.n_action_steps, chunks.shape[2])]
    side = (task.side(executed.flatten(0, 1)).view(shape) * undecided).numpy()
    last = np.array([next((s for s in row[::-1] if s), 0.0) for row in side])
    outcomes = [task.outcome(episode, s) for episode, s in zip(runner.episodes, last, strict=True)]
    chose = (side != 0).sum(axis=1) >= 1
    kept = np.array([len({s for s in row if s}) <= 1 for row in side])
    valid = validity(task, policy, seen[undecided], chunks[undecided])
    return {
        "success": [episode["max_reward"] >= 1 for episode in runner.episodes],
        "outcome": outcomes,
        "failures": dict(collections.Counter(e["failure"] for e in runner.episodes if e.get("failure"))),
        "first": [int(next((s for s in row if s), 0.0)) for row in side],
        "committed": float(kept[chose].mean()) if chose.any() else None,
        "valid": valid,
        "open_chunks": int(undecided.sum()),
        "nfe": watched.calls / len(watched.seen),
    }


# ---------------------------------------------------------------------- what the experts do
def windows(task: Task, policy: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Observations (W, Do), chunks (W, H, Da) and episode numbers (W,) of the demonstrations, where modes are open."""
    dataset = DATASETS[task.title]
    start, horizon = policy.n_obs_steps - 1, policy.horizon
    obs, chunks, episodes = [], [], []
    for number, (seen, action) in enumerate(dataset):
        count = len(action) - (horizon - start) + 1
        if count > 0:
            obs.append(seen[:count])
            chunks.append(action.unfold(0, horizon - start, 1).mT[:count])
            episodes.append(torch.full((count,), number))
    seen, action, episode = torch.cat(obs), torch.cat(chunks), torch.cat(episodes)
    chosen = task.open(seen)
    return seen[chosen], action[chosen], episode[chosen]


def distances(
    policy: Any, seen: Tensor, chunks: Tensor, experts: tuple[Tensor, Tensor, Tensor], own: Tensor | None = None
) -> Tensor:
    """Distance (root mean square, normalised) to the nearest chunk of NEIGHBOURS experts in like situations."""
    obs, action, episode = experts
    normal = policy.normalizer["obs"].normalize
    chunk = policy.normalizer["action"].normalize
    situation = torch.cdist(normal(seen), normal(obs))
    if own is not None:
        situation[own.unsqueeze(1) == episode] = torch.inf
    near = situation.topk(NEIGHBOURS, dim=1, largest=False).indices
    gap = chunk(action)[near] - chunk(chunks).unsqueeze(1)
    return gap.square().sum(-1).mean(-1).sqrt().amin(dim=1)


def validity(task: Task, policy: Any, seen: Tensor, chunks: Tensor) -> float | None:
    """Share of chunks as close to an expert's as EXPERT_SHARE of the experts' own chunks are to those of others."""
    if not len(seen):
        return None
    experts = windows(task, policy)
    with torch.no_grad():
        limit = distances(policy, *experts[:2], experts, own=experts[2]).quantile(EXPERT_SHARE)
        return (distances(policy, seen, chunks, experts) <= limit).float().mean().item()


DATASETS: dict[str, list[tuple[Tensor, Tensor]]] = {}


def load_experts(name: str) -> None:
    """Read the demonstrations of a task: observations and actions of each episode."""
    task, path = TASKS[name], TASKS[name].make_data()
    if name == "pusht":
        from diffusion_policy.common.replay_buffer import ReplayBuffer

        buffer = ReplayBuffer.copy_from_path(str(path), keys=["state", "action"])
        episodes = [buffer.get_episode(i) for i in range(buffer.n_episodes)]
        pairs = [(e["state"], e["action"]) for e in episodes]
    else:
        import h5py

        pairs = []
        for file in sorted(path.glob("*.hdf5")):
            with h5py.File(file) as group:
                pairs.append((group["observations/qpos"][:], group["action"][:]))
    DATASETS[task.title] = [tuple(torch.from_numpy(np.asarray(x, np.float32)) for x in pair) for pair in pairs]  # type: ignore[misc]


# ---------------------------------------------------------------------- runs
def run(name: str, method_name: str, seed: int, steps: int | None) -> dict[str, Any]:
    """The record of one task, method and training seed: from its file, or made."""
    task, method = TASKS[name], METHODS[method_name]
    trained = method.trained_as or method_name
    folder = RUNS / f"{name}-{trained}-seed{seed}"
    data = task.make_data()
    place = "task.dataset.zarr_path" if name == "pusht" else "task.path"
    command = [
        "train.py", "backbone=mlp", "preset=cpu", *METHODS[trained].overrides, *task.overrides, f"{place}={data}",
        "task.env_runner.n_test=1", "task.env_runner.n_test_vis=0", f"training.seed={seed}",
    ]  # fmt: skip
    if steps is not None:
        command.append(f"training.steps_per_epoch={steps}")
    path = folder / f"{method_name}.json"
    words = [word.replace(f"{ROOT}/", "") for word in command]
    settings = {"command": words, "acting": method.acting, "executed": method.executed}
    if path.exists() and (record := json.loads(path.read_text()))["settings"] == settings:
        return record
    made = folder / "made.json"
    if made.exists() and jobs.read_json(made) != words:
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    jobs.write_json(made, words)
    jobs.make(folder, command, {})
    if task.title not in DATASETS:
        load_experts(name)
    numbers = play(task, folder / "checkpoints/latest.ckpt", method, seed, folder)
    cost = folder / jobs.COST  # not there if the command was stopped while it trained
    minutes = jobs.read_json(cost)["minutes"] if cost.is_file() else None
    dataset = jobs.read_json(folder / "summary.json").get("dataset")
    record = {
        "task": name, "method": method_name, "seed": seed, "settings": settings, "dataset": dataset,
        "core_minutes": minutes, **numbers,
    }  # fmt: skip
    write_text(path, json.dumps(record, indent=1) + "\n")
    return record


# ---------------------------------------------------------------------- reporting
def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per task and method: means over seeds."""
    rows = []
    for name in TASKS:
        for method in METHODS:
            group = [r for r in records if (r["task"], r["method"]) == (name, method)]
            if not group:
                continue
            success = np.array([r["success"] for r in group], dtype=float)
            sides = {s: np.array([[o == s for o in r["outcome"]] for r in group], dtype=float) for s in SIDES}
            valid = [r["valid"] for r in group if r["valid"] is not None]
            minutes = [r["core_minutes"] for r in group if r["core_minutes"] is not None]
            kept = [r["committed"] for r in group if r["committed"] is not None]
            rows.append(
                {
                    "task": name,
                    "method": method,
                    "label": METHODS[method].label,
                    "seeds": [r["seed"] for r in group],
                    "success": success.mean(),
                    "interval_95": list(interval(success)),
                    "runs": success.mean(axis=1).tolist(),
                    **{s: sides[s].mean() for s in SIDES},
                    **{f"{s}_runs": sides[s].mean(axis=1).tolist() for s in SIDES},
                    "valid": float(np.mean(valid)) if valid else None,
                    "committed": float(np.mean(kept)) if kept else None,
                    "nfe": group[0]["nfe"],
                    "core_minutes": float(np.mean(minutes)) if minutes else None,
                    "dataset": group[0]["dataset"],
                    "command": " ".join(group[0]["settings"]["command"]),
                }
            )
    return rows


def claims(rows: list[dict[str, Any]], command: str) -> list[dict[str, Any]]:
    """The success rates, for the index of all results."""
    return [
        {
            "claim": f"{row['task']}, {row['label']}: success",
            "number": row["success"],
            "interval_95": row["interval_95"],
            "runs": len(row["seeds"]),
            "command": command,
            "stated": False,
        }
        for row in rows
    ]


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def markdown(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    parts = [
        "# Modes of rollouts",
        "Demonstrations are half left, half right, from the same observations. Rollouts are from "
        f"{EPISODES} starts that no demonstration\nhas; numbers are means over training seeds.",
        "- success: share of rollouts that solve the task, with a 95 % interval over training seeds and starts\n"
        "- left, right: share of all rollouts that solve it on this side, with the runs of the seeds\n"
        "- valid: share of chunks, while the mode is open, that are as close to one of the "
        f"{NEIGHBOURS} nearest experts' chunks as\n  {100 * EXPERT_SHARE:.0f} % of the experts' own are to those of "
        "other episodes\n"
        "- committed: share of rollouts whose chunks, while the mode is open, never change side\n"
        "- NFE: network calls per chunk, counted",
    ]
    for name, task in TASKS.items():
        chosen = [row for row in rows if row["task"] == name]
        if not chosen:
            continue
        lines = [
            "| method | success | left | right | valid | committed | NFE | core-minutes |",
            "|---|---|---|---|---:|---:|---:|---:|",
        ]
        for row in chosen:
            low, high = row["interval_95"]
            cells = [f"{percent(row['success'])} ({100 * low:.0f} to {100 * high:.0f})"]
            for side in SIDES:
                runs = ", ".join(f"{100 * share:.0f}" for share in row[f"{side}_runs"])
                cells.append(f"{percent(row[side])} ({runs})")
            cells += [percent(row["valid"]), percent(row["committed"]), f"{row['nfe']:g}"]
            cells.append("" if row["core_minutes"] is None else f"{row['core_minutes']:.1f}")
            lines.append(f"| {row['label']} | {' | '.join(cells)} |")
        seeds = sorted({seed for row in chosen for seed in row["seeds"]})
        commands = "\n".join(f"{row['method']}: {row['command']}" for row in chosen)
        parts += [
            f"## {task.title}",
            "\n".join(lines),
            *([task.note] if task.note else []),
            f"Training seeds {', '.join(map(str, seeds))}; seeds of the starts from {task.first_start}. Commands, with "
            "their first\nseed; methods with the same command are the same run, acting in another way:",
            f"```text\n{commands}\n```",
        ]
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("python", "torch"))
    parts.append(f"Made with `{about['command']}`; {versions}. `results.json` has all numbers.")
    return "\n\n".join(parts) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mode_coverage",
        description=f"{__doc__}\nmethods:\n" + "\n".join(f"  {name:<30} {m.label}" for name, m in METHODS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="all without a name")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), help="all without a name")
    parser.add_argument("--seeds", nargs="+", type=int, help="of the training (default: those of the task)")
    parser.add_argument("--steps", type=int, help="training steps of each of a task's epochs (default: the preset's)")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS, help="folder (default: results/mode_coverage)")
    arguments = parser.parse_args(argv)
    about = {
        "command": " ".join(["python -m benchmarks.mode_coverage", *(sys.argv[1:] if argv is None else argv)]),
        **machine(),
    }
    records = []
    for name in arguments.tasks:
        for seed in arguments.seeds or TASKS[name].seeds:
            for method in arguments.methods:
                record = run(name, method, seed, arguments.steps)
                records.append(record)
                sides = [sum(o == side for o in record["outcome"]) for side in SIDES]
                print(
                    f"{name:<11} {method:<30} seed {seed}  success {sum(record['success'])}  left/right {sides}  valid "
                    f"{percent(record['valid'])}  committed {percent(record['committed'])}",
                    file=sys.stderr,
                    flush=True,
                )
    rows = summarise(records)
    arguments.output.mkdir(parents=True, exist_ok=True)
    found = {**about, "rows": rows, "claims": claims(rows, about["command"])}
    write_text(arguments.output / "results.json", json.dumps(found, indent=1) + "\n")
    text = markdown(rows, about)
    write_text(arguments.output / "README.md", text)
    print(text)


if __name__ == "__main__":
    main()
