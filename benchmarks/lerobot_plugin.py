"""IDP inside LeRobot: the cost of a training step, and PushT through LeRobot's own commands. Writes results/lerobot.

    make bench-lerobot                  # in LeRobot's environment; ARGS="--speed-only", ARGS="--seeds 0,1,2"

Times are ratios within one run, of interleaved steps on one thread; loading data is apart. Runs of lerobot-train and
lerobot-eval are kept in --work, and made only if they are not there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import Times, cpu_ratio, interleaved, ratio, row
from diffusion_policy.common.statistics import mean_interval
from diffusion_policy.dataset.identity import dataset_identity
from diffusion_policy.storage.atomic import write_text
from idp_workspace.suite import statistics

ROOT = pathlib.Path(__file__).resolve().parents[1]
BIN = pathlib.Path(sys.executable).parent
BATCH, HORIZON, WIDTHS, ACTION_DIM = 64, 16, {"observation.state": 2, "observation.environment_state": 16}, 2
START = 100_000  # the seed of the first episode; held out under this project's protocol
IMAGE, IMAGE_BATCH = (3, 96, 96), 16
#: The sizes that are compared: about as many parameters in LeRobot's policy and in ours.
UNET = {"down_dims": (128, 256)}
ACT = {"dim_model": 256, "n_heads": 4, "dim_feedforward": 1024, "n_encoder_layers": 4, "n_decoder_layers": 1}
TRANSFORMER = {"n_emb": 256, "n_layer": 6, "n_head": 4}
MLP = {"n_emb": 128, "n_layer": 3}
#: A ResNet-18 that is trained from scratch.
RESNET = {"camera": True, "pretrained_backbone_weights": None}
TRAINING = ("--policy.type=idp", "--policy.backbone=mlp", "--policy.n_emb=128", "--policy.n_layer=3",
            "--policy.n_action_steps=10")  # fmt: skip
PACKAGES = ("lerobot", "torch", "numpy", "gymnasium", "gym-pusht", "pymunk", "datasets")


# ---------------------------------------------------------------------- speed
class Step:
    """A training step as lerobot-train makes it, on a batch that is there already."""

    def __init__(self, policy: Any, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        self.policy, self.optimizer, self.batch = policy.train(), optimizer, batch
        self.parameters = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)

    def loss(self) -> Tensor:
        return self.policy.forward(self.batch)[0]

    def __call__(self) -> None:
        loss = self.loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 10.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()


class OurStep(Step):
    def loss(self) -> Tensor:
        return self.policy.compute_loss(self.batch)


def features(camera: bool) -> dict[str, Any]:
    from lerobot.configs import FeatureType, PolicyFeature

    kinds = {"observation.state": FeatureType.STATE, "observation.environment_state": FeatureType.ENV}
    inputs = {key: PolicyFeature(kinds[key], (width,)) for key, width in WIDTHS.items()}
    if camera:
        inputs["observation.image"] = PolicyFeature(FeatureType.VISUAL, IMAGE)
    return {"input_features": inputs, "output_features": {"action": PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))}}


def lerobot_step(kind: str, camera: bool = False, **settings: Any) -> Step:
    """A step of one of LeRobot's policies on a random normalised batch, with its own preset of the optimiser."""
    import lerobot_policy_idp  # noqa: F401  registers the type
    from lerobot.policies import get_policy_class, make_policy_config

    cfg = make_policy_config(kind, device="cpu", push_to_hub=False, **features(camera), **settings)
    torch.manual_seed(0)
    policy = get_policy_class(kind)(cfg)
    single = cfg.observation_delta_indices is None
    size, steps = IMAGE_BATCH if camera else BATCH, () if single else (len(cfg.observation_delta_indices),)
    batch = {key: torch.rand(size, *steps, width) * 2 - 1 for key, width in WIDTHS.items()}
    if camera:
        batch["observation.image"] = torch.rand(size, *steps, *IMAGE)
    chunk = len(cfg.action_delta_indices)
    batch["action"] = torch.rand(size, chunk, ACTION_DIM) * 2 - 1
    batch["action_is_pad"] = torch.arange(chunk) >= torch.randint(chunk // 2, 8 * chunk, (size, 1))  # as in PushT
    return Step(policy, cfg.get_optimizer_preset().build(policy.get_optim_params()), batch)


def idp(**settings: Any) -> Step:
    return lerobot_step("idp", optimizer_type="adamw", **settings)


def ours(**settings: Any) -> Step:
    """The same step with this project's policy, normalisation included."""
    from omegaconf import OmegaConf

    from diffusion_policy.model.common.normalizer import LinearNormalizer
    from diffusion_policy.policy.represented import build_policy
    from idp_workspace import lerobot

    step = idp(**settings)
    torch.manual_seed(0)
    policy = build_policy(OmegaConf.create({"policy": lerobot.policy_section(step.policy.config.settings)}))
    ends, normalizer = torch.tensor([[-1.0], [1.0]]), LinearNormalizer()
    normalizer.fit({"obs": ends.expand(2, sum(WIDTHS.values())), "action": ends.expand(2, ACTION_DIM)})
    policy.set_normalizer(normalizer)
    batch = {"obs": torch.cat([step.batch[key] for key in WIDTHS], dim=-1), "action": step.batch["action"]}
    preset = step.policy.config.get_optimizer_preset()
    return OurStep(policy, preset.build([p for p in policy.parameters() if p.requires_grad]), batch)


def cases() -> Iterator[tuple[str, Callable[[], Step], Callable[[], Step], float | None]]:
    """Yield what is compared, the step, the step that it is compared with, and the goal."""
    unet, mlp = {"backbone": "unet", "n_emb": 80, **UNET}, {"backbone": "mlp", **MLP}
    transformer = {"backbone": "transformer", **TRANSFORMER}
    diffusion = partial(lerobot_step, "diffusion", **UNET, horizon=HORIZON, n_action_steps=8)
    act = partial(lerobot_step, "act", **ACT, chunk_size=HORIZON, n_action_steps=8)
    yield "IDP / LeRobot's Diffusion, UNet", partial(idp, **unet), diffusion, 1.1
    yield "IDP / LeRobot's ACT, transformer", partial(idp, **transformer), act, 1.1
    with_camera = partial(idp, **unet, camera=True), partial(diffusion, **RESNET, use_group_norm=True)
    yield "IDP / LeRobot's Diffusion, UNet, with a camera", *with_camera, 1.1
    with_camera = partial(idp, **transformer, camera=True, n_obs_steps=1), partial(act, **RESNET)
    yield "IDP / LeRobot's ACT, transformer, with a camera", *with_camera, 1.1
    for settings in (unet, transformer, mlp):
        name = f"IDP in LeRobot / in this project, {settings['backbone']}"
        yield name, partial(idp, **settings), partial(ours, **settings), 1.3
    for settings in (unet, transformer, mlp):
        name = f"IDP with Muon / with AdamW, {settings['backbone']}"
        yield name, partial(lerobot_step, "idp", **settings), partial(idp, **settings), None


def compared(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for name, own, base, bound in cases():
        steps = {"own": own(), "base": base()}
        times = interleaved(name, steps, rounds, warmup=3)
        ms = " and ".join(f"{1e3 * float(np.median(times[key].cpu)):.1f}" for key in steps)
        size = " and ".join(f"{step.parameters / 1e6:.2f} M" for step in steps.values())
        wall = ratio(times["own"], times["base"])
        detail = f"{ms} ms of processor time, {size} parameters; wall time {wall:.2f} x"
        goal = None if bound is None else f"<= {bound}"
        rows.append(row(f"step of {name}", cpu_ratio(times["own"], times["base"]), "x", goal, detail))
        print(f"{name}: {rows[-1]['value']:.2f} x; {detail}", flush=True)
    return rows


def loading(dataset: pathlib.Path, rounds: int = 8) -> tuple[dict[str, float], str | None]:
    """Processor seconds to load a batch, by LeRobot and by this project, and the checksum of the data."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    from diffusion_policy.dataset.recorded_dataset import RecordedDataset

    deltas = {key: [-0.1, 0.0] for key in WIDTHS} | {"action": [step / 10 for step in range(-1, HORIZON - 1)]}
    theirs = LeRobotDataset("local/pusht", root=dataset, delta_timestamps=deltas)
    own = RecordedDataset(dataset, list(WIDTHS), "action", horizon=HORIZON, pad_before=1, pad_after=7, n_obs_steps=2)
    draws = torch.Generator().manual_seed(0)

    def drawn(size: int) -> list[int]:
        return torch.randint(size, (BATCH,), generator=draws).tolist()

    times: dict[str, Times] = interleaved(
        "loading",
        {
            "lerobot": lambda: torch.utils.data.default_collate([theirs[i] for i in drawn(len(theirs))]),
            "ours": lambda: own.get_batch(torch.tensor(drawn(len(own)))),
        },
        rounds,
    )
    seconds = {key: float(np.median(value.cpu)) for key, value in times.items()}
    return seconds, dataset_identity(own, {})["sha256"]


# ---------------------------------------------------------------------- scores
def call(*command: object) -> str:
    """Run a command of LeRobot; return it as text."""
    words = [str(word) for word in command]
    text = shlex.join([pathlib.Path(words[0]).name, *words[1:]])
    print(text, flush=True)
    subprocess.run(words, check=True, env=environment())
    return text


def environment() -> dict[str, str]:
    return os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def scored(work: pathlib.Path, dataset: pathlib.Path, seed: int, steps: int, episodes: int) -> dict[str, Any]:
    """Train with lerobot-train, evaluate with lerobot-eval."""
    run, out = work / f"run_{seed}_{steps}", work / f"eval_{seed}_{steps}"
    checkpoint = run / "checkpoints/last/pretrained_model"
    train = [BIN / "lerobot-train", *TRAINING, "--policy.device=cpu", "--policy.push_to_hub=false",
             "--dataset.repo_id=local/pusht", f"--dataset.root={dataset}", f"--batch_size={BATCH}", f"--steps={steps}",
             "--num_workers=0", "--save_freq=1000", f"--seed={seed}", f"--output_dir={run}"]  # fmt: skip
    evaluate = [BIN / "lerobot-eval", f"--policy.path={checkpoint}", "--policy.device=cpu", "--env.type=pusht",
                "--env.obs_type=environment_state_agent_pos", f"--eval.n_episodes={episodes}", "--eval.batch_size=10",
                "--eval.use_async_envs=false", f"--seed={START}", f"--output_dir={out}"]  # fmt: skip
    if not (run / f"checkpoints/{steps:06d}").is_dir():
        call(*train)
    if not (out / "eval_info.json").is_file():
        call(*evaluate)
    info = json.loads((out / "eval_info.json").read_text())
    rewards = np.array(info["per_task"][0]["metrics"]["max_rewards"])
    trained = json.loads((checkpoint / "train_config.json").read_text())
    return {
        "seed": seed,
        "steps": steps,
        "score": float(rewards.mean()),
        "interval_95": mean_interval(rewards),
        "success": float(np.mean(info["per_task"][0]["metrics"]["successes"])),
        "scores": rewards.round(4).tolist(),
        "commands": [shlex.join([pathlib.Path(c[0]).name, *map(str, c[1:])]) for c in (train, evaluate)],
        "settings": {
            name: trained[name] for name in ("policy", "optimizer", "scheduler", "batch_size", "steps", "seed")
        },
    }


def make_dataset(work: pathlib.Path, data: str) -> tuple[pathlib.Path, str]:
    folder = work / "pusht"
    command = ["examples/pusht_for_lerobot.py", folder, "--data", data, "--mirror"]
    if not (folder / "meta/info.json").is_file():
        subprocess.run([sys.executable, *map(str, command)], check=True, cwd=ROOT, env=environment())
    return folder, shlex.join(["python", *map(str, command)])


# ---------------------------------------------------------------------- the page
def page(result: dict[str, Any]) -> str:
    lines = [
        "# IDP inside LeRobot",
        "",
        f"Made with `{result['command']}` (`make bench-lerobot`); commands, settings, versions and the score of every",
        "episode are in results.json.",
        "",
        "## A training step",
        "",
        f"Batch {BATCH} ({IMAGE_BATCH} with images of 96 x 96), PushT's sizes, one thread of a CPU. Ratios of",
        "processor time within one run, of interleaved steps. LeRobot's policies make one network call; a step of IDP",
        "has the proposal for the whole batch and the probe for a quarter of it. Without a camera, ACT's encoder sees",
        "three tokens, while every layer of IDP's transformer sees the chunk. AdamW or Adam, but where Muon is named.",
        "",
        "| claim | ratio | goal | detail |",
        "|---|---|---|---|",
    ]
    for x in result["rows"]:
        goal = {True: f"{x['target']}, met", False: f"{x['target']}, missed", None: "-"}[x["met"]]
        lines.append(f"| {x['name']} | {x['value']:.2f} | {goal} | {x['detail']} |")
    seconds = result["loading"]
    lines += [
        "",
        f"Loading a batch of {BATCH} takes LeRobot {1e3 * seconds['lerobot']:.0f} ms of processor time, and this",
        f"project {1e3 * seconds['ours']:.1f} ms; neither is in the steps above.",
    ]
    if result["runs"]:
        data = result["dataset"]
        lines += [
            "",
            "## PushT through lerobot-train and lerobot-eval",
            "",
            f"{data['episodes']} episodes, {data['steps']} steps (`{data['command']}`); residual MLP, the default",
            f"recipe, batch {BATCH}. Mean of the best overlap in an episode, as gym-pusht rewards it; starts from seed",
            f"{START}.",
            "",
            "| seed | steps | score | 95 % interval | success |",
            "|---|---|---|---|---|",
        ]
        for run in result["runs"]:
            low, high = run["interval_95"]
            numbers = f"{run['score']:.3f} | {low:.3f} to {high:.3f} | {run['success']:.2f}"
            lines.append(f"| {run['seed']} | {run['steps']} | {numbers} |")
        for claim in result["claims"]:
            low, high = claim["interval_95"]
            lines += ["", f"Together {claim['number']:.3f} (95 % interval {low:.3f} to {high:.3f})."]
        lines += [
            "",
            "The small preset of this project scores 0.91 (0.88 to 0.94) after 5,000 steps of 128 windows on its own",
            "starts ([pusht_methods](../pusht_methods/README.md)). It sees more windows, features of the pose, and",
            "acts with averaged weights; here the policy sees eight corners of the block, acts with the last weights,",
            "and gym-pusht draws the starts.",
        ]
    return "\n".join([*lines, ""])


def claims(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The mean score, with an interval over training seeds and starts."""
    if not runs:
        return []
    scores = np.array([run["scores"] for run in runs])
    found = {"number": float(scores.mean()), "interval_95": list(statistics.interval(scores)), "runs": len(runs)}
    return [{"claim": "IDP through lerobot-train and lerobot-eval: score", **found}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("results/lerobot"))
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("data/outputs/lerobot"))
    parser.add_argument("--data", default="auto", help="PushT's demonstrations (default: as task=pusht_state)")
    parser.add_argument("--seeds", default="0", help="of training, separated by commas")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--speed-only", action="store_true", help="train nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dataset, made = make_dataset(options.work, options.data)
    info = json.loads((dataset / "meta/info.json").read_text())
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.lerobot_plugin", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
        "dataset": {"episodes": info["total_episodes"], "steps": info["total_frames"], "command": made},
    }
    result["loading"], result["dataset"]["sha256"] = loading(dataset)
    seeds = [] if options.speed_only else [int(seed) for seed in options.seeds.split(",")]
    result["runs"] = [scored(options.work, dataset, seed, options.steps, options.episodes) for seed in seeds]
    result |= {"claims": claims(result["runs"]), "rows": compared(options.rounds)}
    options.output.mkdir(parents=True, exist_ok=True)
    write_text(options.output / "results.json", json.dumps(result, indent=1) + "\n")
    write_text(options.output / "README.md", page(result))
    print(f"written {options.output}")


if __name__ == "__main__":
    main()
