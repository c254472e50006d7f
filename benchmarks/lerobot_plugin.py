"""IDP inside LeRobot: the cost of a training step, and PushT through LeRobot's own commands. Writes results/lerobot.

    make bench-lerobot                  # in LeRobot's environment; ARGS="--speed-only", ARGS="--seeds 0,1,2"

Times are ratios within one run, of interleaved steps on one thread; loading data is apart. Runs of lerobot-train and
lerobot-eval are kept in --work, and made only if they are not there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import pathlib
import platform
import shlex
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import Times, cpu_ratio, interleaved, ratio
from diffusion_policy.common.statistics import mean_interval
from diffusion_policy.storage.atomic import write_text

ROOT = pathlib.Path(__file__).resolve().parents[1]
BIN = pathlib.Path(sys.executable).parent
BATCH, HORIZON, WIDTHS, ACTION_DIM = 64, 16, {"observation.state": 2, "observation.environment_state": 16}, 2
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


def compared(rounds: int) -> list[dict[str, Any]]:
    pairs = [
        ("LeRobot's Diffusion, UNet", lambda: lerobot_step("diffusion", **UNET, horizon=HORIZON, n_action_steps=8),
         lambda: idp(backbone="unet", n_emb=80, **UNET), 1.1),
        ("LeRobot's ACT, transformer", lambda: lerobot_step("act", **ACT, chunk_size=HORIZON, n_action_steps=8),
         lambda: idp(backbone="transformer", **TRANSFORMER), 1.1),
        ("LeRobot's Diffusion, UNet, with a camera",
         lambda: lerobot_step("diffusion", **UNET, **RESNET, use_group_norm=True, horizon=HORIZON, n_action_steps=8),
         lambda: idp(backbone="unet", n_emb=80, camera=True, **UNET), 1.1),
        ("LeRobot's ACT, transformer, with a camera",
         lambda: lerobot_step("act", **ACT, **RESNET, chunk_size=HORIZON, n_action_steps=8),
         lambda: idp(backbone="transformer", camera=True, n_obs_steps=1, **TRANSFORMER), 1.1),
        ("this project's IDP, UNet", lambda: ours(backbone="unet", n_emb=80, **UNET),
         lambda: idp(backbone="unet", n_emb=80, **UNET), 1.3),
        ("this project's IDP, transformer", lambda: ours(backbone="transformer", **TRANSFORMER),
         lambda: idp(backbone="transformer", **TRANSFORMER), 1.3),
        ("this project's IDP, MLP", lambda: ours(backbone="mlp", **MLP), lambda: idp(backbone="mlp", **MLP), 1.3),
        ("IDP with AdamW, MLP, against Muon", lambda: idp(backbone="mlp", **MLP),
         lambda: lerobot_step("idp", backbone="mlp", **MLP), None),
        ("IDP with AdamW, transformer, against Muon", lambda: idp(backbone="transformer", **TRANSFORMER),
         lambda: lerobot_step("idp", backbone="transformer", **TRANSFORMER), None),
    ]  # fmt: skip
    rows = []
    for name, base, own, bound in pairs:
        steps = {"base": base(), "own": own()}
        times = interleaved(name, steps, rounds, warmup=3)
        row = {"name": name, "ratio": cpu_ratio(times["own"], times["base"]), "target": bound}
        row["wall_ratio"] = ratio(times["own"], times["base"])
        row["milliseconds"] = {key: 1e3 * float(np.median(times[key].cpu)) for key in steps}
        row["parameters"] = {key: steps[key].parameters for key in steps}
        rows.append(row)
        print(f"{name}: {row['ratio']:.2f} x", flush=True)
    return rows


def loading(dataset: pathlib.Path, rounds: int = 8) -> dict[str, float]:
    """Processor seconds to load a batch: by LeRobot, and by this project."""
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
    return {key: float(np.median(value.cpu)) for key, value in times.items()}


# ---------------------------------------------------------------------- scores
def call(*command: object) -> str:
    """Run a command of LeRobot; return it as text."""
    words = [str(word) for word in command]
    text = shlex.join([pathlib.Path(words[0]).name, *words[1:]])
    print(text, flush=True)
    subprocess.run(words, check=True, env=environment())
    return text


def environment() -> dict[str, str]:
    import os

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
                "--eval.use_async_envs=false", "--seed=100000", f"--output_dir={out}"]  # fmt: skip
    if not (run / f"checkpoints/{steps:06d}").is_dir():
        call(*train)
    if not (out / "eval_info.json").is_file():
        call(*evaluate)
    info = json.loads((out / "eval_info.json").read_text())
    rewards = np.array(info["per_task"][0]["metrics"]["max_rewards"])
    return {
        "seed": seed,
        "steps": steps,
        "score": float(rewards.mean()),
        "interval": mean_interval(rewards),
        "success": float(np.mean(info["per_task"][0]["metrics"]["successes"])),
        "scores": rewards.round(4).tolist(),
        "commands": [shlex.join([pathlib.Path(c[0]).name, *map(str, c[1:])]) for c in (train, evaluate)],
        "trained": json.loads((checkpoint / "train_config.json").read_text()),
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
        "Made with `python -m benchmarks.lerobot_plugin` (`make bench-lerobot`); commands, settings, versions and the",
        "score of every episode are in results.json.",
        "",
        "## A training step",
        "",
        f"Batch {BATCH} ({IMAGE_BATCH} with images of 96 x 96), PushT's sizes, one thread of a CPU. Ratios of",
        "processor time within one run, of interleaved steps. LeRobot's policies make one network call; a step of IDP",
        "has the proposal for the whole batch and the probe for a quarter of it. Without a camera, ACT's encoder sees",
        "three tokens, while every layer of IDP's transformer sees the chunk. AdamW or Adam, but where Muon is named.",
        "",
        "| IDP in LeRobot against | ratio | goal | ms | parameters |",
        "|---|---|---|---|---|",
    ]
    for row in result["speed"]:
        ms, size = (" / ".join(form(row[key][name]) for name in ("own", "base")) for key, form in (
            ("milliseconds", lambda x: f"{x:.1f}"), ("parameters", lambda x: f"{x / 1e6:.2f} M")))  # fmt: skip
        goal = "-" if row["target"] is None else f"{row['target']}"
        lines.append(f"| {row['name']} | {row['ratio']:.2f} | {goal} | {ms} | {size} |")
    if result.get("loading"):
        seconds = result["loading"]
        lines += [
            "",
            f"Loading such a batch takes LeRobot {1e3 * seconds['lerobot']:.0f} ms of processor time and this project "
            f"{1e3 * seconds['ours']:.1f} ms; neither is in the steps above.",
        ]
    if result["runs"]:
        lines += [
            "",
            "## PushT through lerobot-train and lerobot-eval",
            "",
            f"Human demonstrations with their mirror images ({result['dataset']}); residual MLP, the default recipe,",
            f"batch {BATCH}. Mean of the best overlap in an episode, as gym-pusht rewards it; starts from seed 100000.",
            "",
            "| seed | steps | score | 95 % interval | success |",
            "|---|---|---|---|---|",
        ]
        for run in result["runs"]:
            low, high = run["interval"]
            numbers = f"{run['score']:.3f} | {low:.3f} to {high:.3f} | {run['success']:.2f}"
            lines.append(f"| {run['seed']} | {run['steps']} | {numbers} |")
        lines += [
            "",
            "The small preset of this project scores 0.91 (0.88 to 0.94) after 5,000 steps of 128 windows on its own",
            "starts ([pusht_methods](../pusht_methods/README.md)). It sees features of the pose and acts with",
            "averaged weights; here the policy sees eight corners of the block, acts with the last weights, and",
            "gym-pusht draws the starts.",
        ]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "results/lerobot")
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "data/outputs/lerobot")
    parser.add_argument("--data", default="auto", help="PushT's demonstrations (default: as task=pusht_state)")
    parser.add_argument("--seeds", default="0", help="of training, separated by commas")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--speed-only", action="store_true", help="train nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.lerobot_plugin", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
        "runs": [],
    }
    dataset, made = make_dataset(options.work, options.data)
    result |= {"speed": compared(options.rounds), "loading": loading(dataset)}
    if not options.speed_only:
        seeds = [int(seed) for seed in options.seeds.split(",")]
        result["runs"] = [scored(options.work, dataset, seed, options.steps, options.episodes) for seed in seeds]
        info = json.loads((dataset / "meta/info.json").read_text())
        result["dataset"] = f"{info['total_episodes']} episodes, {info['total_frames']} steps"
        result["dataset_command"] = made
    options.output.mkdir(parents=True, exist_ok=True)
    write_text(options.output / "results.json", json.dumps(result, indent=1) + "\n")
    write_text(options.output / "README.md", page(result))
    print(f"written {options.output}")


if __name__ == "__main__":
    main()
