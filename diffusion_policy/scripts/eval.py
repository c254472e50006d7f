"""Evaluate a checkpoint, or compare two evaluations: the code behind eval.py.

Writes eval_log.json (upstream's keys and further ones) and videos of the first episodes into an output folder. `--help`
and mistakes in the options need no torch, so they are answered fast.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import shutil
from typing import TYPE_CHECKING, Any

from diffusion_policy.common.command_line import Parser, fail, reporting, shell_command
from diffusion_policy.common.errors import ConfigError, EvaluationError

if TYPE_CHECKING:
    from omegaconf import DictConfig

#: First seed of each named set; None is the training seed. The starts of `mip` can be those of public demonstrations.
SEED_SETS: dict[str, int | None] = {"mip": None, "heldout": 100000}


def seeds(text: str) -> str:
    """Check the value of --seeds: the name of a set, or the first seed."""
    if text not in SEED_SETS and not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is neither {' nor '.join(sorted(SEED_SETS))} nor a whole number")
    return text


def network_calls(text: str) -> list[int]:
    """Read the value of --nfe: 3, or several, 9,3,1."""
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1, or several: 9,3,1")
    return list(dict.fromkeys(map(int, text.split(","))))


def standard_deviation(text: str) -> float:
    """Read the value of --act-noise."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def episodes(text: str) -> int:
    """Read the value of --n_episodes."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def delay(text: str) -> int | str:
    """Read the value of --latency: control steps, or measured."""
    if text != "measured" and not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number of control steps nor measured")
    return text if text == "measured" else int(text)


def part(text: str) -> tuple[int, int]:
    """Read the value of --shard: 2/8."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not i/n with whole numbers 1 <= i <= n, such as 2/8")
    return int(match[1]), int(match[2])


def parser() -> argparse.ArgumentParser:
    out = Parser(prog="eval.py", description="Evaluate a checkpoint in its task's environment.")
    what = out.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "-c",
        "--checkpoint",
        help="a .ckpt file of a run, its run folder, a folder of exported weights, or an exported graph (.onnx)",
    )
    what.add_argument(
        "--merge",
        metavar="DIR",
        type=pathlib.Path,
        help="write the evaluation whose shards are in this folder, as one in a single piece would be",
    )
    what.add_argument(
        "--compare",
        metavar=("A", "B"),
        nargs=2,
        type=pathlib.Path,
        help="compare two evaluations (eval_log.json, or their folders) start by start, with a paired test",
    )
    out.add_argument(
        "--best", action="store_true", help="of a run folder: the checkpoint with the best score, not the latest"
    )
    out.add_argument(
        "-o",
        "--output_dir",
        help="folder for eval_log.json and videos (default: eval_<checkpoint>_<options> in the run folder or export)",
    )
    out.add_argument("-d", "--device", default="auto", help="auto (default), cpu, cuda, cuda:1, mps")
    out.add_argument("-n", "--n_episodes", type=episodes, help="number of test episodes (default: the task's n_test)")
    out.add_argument(
        "--seeds",
        type=seeds,
        help="starts: mip (from the training seed on, as MIP's protocol), heldout (from 100000), or the first seed "
        "(default: the task's test_start_seed)",
    )
    out.add_argument(
        "--nfe",
        type=network_calls,
        help="network calls per action chunk, for policies that can trade calls for quality; several at once: 9,3,1",
    )
    out.add_argument(
        "--open-loop",
        action="store_true",
        help="without a simulator: compare predicted with recorded actions in the episodes that the training held out",
    )
    out.add_argument(
        "--latency",
        type=delay,
        help="control steps between an observation and its first action, or measured: this machine's latency at the "
        "environment's rate (default: the task's n_latency_steps)",
    )
    out.add_argument(
        "--act-noise",
        type=standard_deviation,
        default=0.0,
        help="standard deviation of noise on the executed chunks, in action units, which moves a policy that stands "
        "still (default 0, deterministic)",
    )
    out.add_argument(
        "--shard",
        metavar="I/N",
        type=part,
        help="play part I of N of the episodes, into the folder shard_I_of_N of the output folder; --merge joins them",
    )
    out.add_argument(
        "--overwrite", action="store_true", help="replace an output folder that already holds an evaluation"
    )
    out.add_argument(
        "--trust-checkpoint",
        action="store_true",
        help="open a pickled (upstream) checkpoint, or one that names "
        "classes of other packages; both run code from the file",
    )
    return out


def main(arguments: list[str] | None = None) -> None:
    with reporting(stopped="stopped by Ctrl-C; no eval_log.json was written"):
        options = parser().parse_args(arguments)
        try:
            (compare if options.compare else evaluate if options.merge is None else merge)(options)
        except ValueError as error:  # of a policy that does not fit the observations
            if isinstance(error, ConfigError):
                raise
            fail(str(error))


def default_folder(checkpoint: pathlib.Path, options: argparse.Namespace) -> pathlib.Path:
    """Return the output folder of a checkpoint and these options, in its run folder or export."""
    run = checkpoint if checkpoint.is_dir() else checkpoint.parent
    name = f"eval_{checkpoint.stem}{'_onnx' * (checkpoint.suffix == '.onnx')}"
    if options.open_loop:
        name += "_open_loop"
    if options.n_episodes is not None:
        name += f"_n{options.n_episodes}"
    if options.seeds is not None:
        name += f"_{options.seeds}" if options.seeds in SEED_SETS else f"_seed{options.seeds}"
    if options.nfe is not None:
        name += f"_nfe{'-'.join(map(str, options.nfe))}"
    if options.latency is not None:
        name += f"_latency{options.latency}"
    if options.act_noise:
        name += f"_noise{options.act_noise:g}"
    return (run.parent if run.name == "checkpoints" else run) / name


def check_output(output: pathlib.Path, overwrite: bool) -> None:
    """Raise ConfigError if the output folder is a file, or holds an evaluation that is to be kept."""
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output} is a file, not a folder")
    if (output / "eval_log.json").exists() and not overwrite:
        raise ConfigError(f"{output} already holds an evaluation: choose another --output_dir, or pass --overwrite")


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Evaluate the checkpoint that the options name; returns what eval_log.json holds."""
    from omegaconf import OmegaConf

    from diffusion_policy.common.config_util import resolve_device
    from diffusion_policy.policy.loading import find_checkpoint, policy_of
    from diffusion_policy.storage import checkpoint_io
    from diffusion_policy.workspace import shards
    from diffusion_policy.workspace.measurement import set_nfe
    from diffusion_policy.workspace.run_folder import locked

    device = resolve_device(options.device)
    checkpoint = find_checkpoint(options.checkpoint, options.best)
    output = pathlib.Path(options.output_dir) if options.output_dir else default_folder(checkpoint, options)
    if options.shard is not None:
        if options.open_loop:
            raise ConfigError("--shard divides the episodes of a simulator; --open-loop replays recordings, without it")
        output /= shards.folder_name(*options.shard)
    check_output(output, options.overwrite)
    if options.open_loop and (checkpoint.is_dir() or checkpoint.suffix == ".onnx"):
        raise ConfigError(f"{checkpoint} is an export and does not name its dataset: --open-loop needs the checkpoint")
    needed = "task.dataset" if options.open_loop else "task.env_runner"
    payload = checkpoint_io.load(checkpoint, trust=options.trust_checkpoint, sections=("policy", needed))
    cfg = OmegaConf.create(payload["cfg"])
    policy = policy_of(payload, device)
    if not options.open_loop and OmegaConf.select(cfg, "task.env_runner") is None:
        raise ConfigError(
            "this policy was trained without a simulator (task.env_runner=null): --open-loop compares it with the "
            "episodes that its training held out"
        )
    for nfe in options.nfe or ():
        set_nfe(policy, nfe)
    # Nothing is written before this line: a checkpoint that does not load leaves the folder unchanged.
    with locked(output, "evaluating"):
        check_output(output, options.overwrite)
        if options.overwrite and (output / "eval_log.json").exists():
            for media in (output / "media", *output.glob("nfe*/media")):
                shutil.rmtree(media, ignore_errors=True)
        log = replay(cfg, policy, options, output) if options.open_loop else play(cfg, policy, options, output)
        log |= {"checkpoint": str(checkpoint), "name": cfg.get("name"), "versions": checkpoint_io.versions()}
        attributes = payload.get("attributes", {})
        log |= {name: attributes.get(name) for name in ("global_step", "dataset")}
        if options.shard is not None:
            log["shard"] = shards.description(options, checkpoint, cfg.task.env_runner._target_)
        (write_open_loop if options.open_loop else write)(log, output)
    if options.shard is not None:
        print(f"next       {shell_command('python', 'eval.py', '--merge', output.parent)}, when all shards are there")
    return log


def merge(options: argparse.Namespace) -> dict[str, Any]:
    """Join the shards of an evaluation; returns what eval_log.json holds."""
    from diffusion_policy.workspace import shards
    from diffusion_policy.workspace.run_folder import locked

    of_shards = ("best", "n_episodes", "seeds", "nfe", "open_loop", "latency", "act_noise", "shard")
    if any(getattr(options, name) for name in of_shards):
        raise ConfigError("--merge takes --output_dir and --overwrite only; the other options belong to the shards")
    output = options.merge if options.output_dir is None else pathlib.Path(options.output_dir)
    check_output(output, options.overwrite)
    log, different = shards.merge(options.merge)
    with locked(output, "evaluating"):
        check_output(output, options.overwrite)
        for name in different:
            print(f"note       the shards differ in {name}; eval_log.json has that of shard 1")
        write(log, output)
    return log


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Compare two evaluations on the starts that both played, and print the result; the difference is A - B."""
    import numpy as np

    from diffusion_policy.common import statistics

    given = (options.best, options.n_episodes, options.seeds, options.nfe, options.open_loop, options.latency)
    if any((*given, options.act_noise, options.shard, options.output_dir, options.overwrite)):
        raise ConfigError("--compare takes two eval_log.json and no other option")
    first, second = (read_scores(path) for path in options.compare)
    common = sorted(first.keys() & second.keys())
    if not common:
        raise ConfigError(
            f"{options.compare[0]} and {options.compare[1]} have no start in common: choose the same --seeds"
        )
    a, b = (np.array([scores[start] for start in common]) for scores in (first, second))
    found = statistics.compare(a, b)
    only = len(first) + len(second) - 2 * len(common)
    print(
        f"starts     {len(common)} in common" + (f"; {only} that only one of the two has are left out" if only else "")
    )
    for name, path, scores in (("A", options.compare[0], a), ("B", options.compare[1], b)):
        low, high = statistics.mean_interval(scores)
        print(f"{name}          {scores.mean():.3f} (95 % interval {low:.3f} to {high:.3f})  {path}")
    low, high = found["interval_95"]
    print(
        f"A - B      {found['difference']:+.3f} (95 % interval {low:+.3f} to {high:+.3f}; starts drawn again)\n"
        f"test       p = {found['p']:.3g} ({found['test']}, two-sided, paired by start)\n"
        f"starts     A is better on {found['wins']}, worse on {found['losses']}, equal on {found['ties']}"
    )
    return found


def read_scores(path: pathlib.Path) -> dict[str, float]:
    """Score by start, of the test episodes in an eval_log.json or the one in a folder."""
    path = path / "eval_log.json" if path.is_dir() else path
    try:
        log = json.loads(path.read_text())
        scores = {key: float(value) for key, value in log.items() if key.startswith("test/sim_max_reward_")}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not an eval_log.json: {error}") from error
    if not scores:
        raise ConfigError(f"{path} has no scores of test episodes")
    return scores


def play(cfg: DictConfig, policy: Any, options: argparse.Namespace, output: pathlib.Path) -> dict[str, Any]:
    """Play the episodes, once for each number of network calls; the log is that of the first number."""
    import torch
    from omegaconf import OmegaConf

    from diffusion_policy.common.random_state import seed_everything
    from diffusion_policy.gym_util.rollout_video import write_grid
    from diffusion_policy.workspace import shards
    from diffusion_policy.workspace.measurement import counting, report, set_nfe

    runner = make_runner(cfg, options, output)
    if options.shard is not None:
        shards.keep_part(runner, *options.shard)
    logs: dict[int | None, dict[str, Any]] = {}
    for nfe in options.nfe or [None]:
        if nfe is not None:
            set_nfe(policy, nfe)
        if len(options.nfe or ()) > 1:
            runner.output_dir = str(output / f"nfe{nfe}")  # of the videos
        seed_everything(OmegaConf.select(cfg, "training.seed", default=0))
        with counting(policy) as counter:
            scores = runner.run(policy)
        write_grid(runner, runner.output_dir)
        logs[nfe] = dict(scores) | report(runner, policy, counter, policy.device)
        logs[nfe]["n_latency_steps"] = getattr(runner, "n_latency_steps", 0)
    log = dict(next(iter(logs.values())))
    if len(logs) > 1:
        log["by_nfe"] = {str(nfe): each for nfe, each in logs.items()}
    return log | {
        "seeds": options.seeds or "task",
        "act_noise": options.act_noise,
        "torch_threads": torch.get_num_threads(),
    }


def replay(cfg: DictConfig, policy: Any, options: argparse.Namespace, output: pathlib.Path) -> dict[str, Any]:
    """Replay the held-out episodes, once for each number of network calls; the log is that of the first number."""
    from diffusion_policy.workspace.measurement import set_nfe
    from diffusion_policy.workspace.open_loop_report import held_out_episodes, report

    if options.seeds is not None:
        raise ConfigError("--seeds are starts in a simulator; --open-loop replays the episodes that were held out")
    dataset = held_out_episodes(cfg)
    logs: dict[int | None, dict[str, Any]] = {}
    for nfe in options.nfe or [None]:
        if nfe is not None:
            set_nfe(policy, nfe)
        folder = output / f"nfe{nfe}" if len(options.nfe or ()) > 1 else output
        logs[nfe] = report(cfg, policy, dataset, options.n_episodes, folder / "media")
    log = dict(next(iter(logs.values())))
    return log | ({"by_nfe": {str(nfe): each for nfe, each in logs.items()}} if len(logs) > 1 else {})


def write_open_loop(log: dict[str, Any], output: pathlib.Path) -> None:
    """Write eval_log.json and print the numbers of an open-loop evaluation."""
    from diffusion_policy.storage import atomic
    from diffusion_policy.workspace.open_loop_report import table

    atomic.write_text(output / "eval_log.json", json.dumps(log, indent=2, sort_keys=True))
    print(table(log))
    print(f"figures in {output / 'media'}\nwritten to {output / 'eval_log.json'}")


def make_runner(cfg: DictConfig, options: argparse.Namespace, output: pathlib.Path) -> Any:
    """Return the task's runner on test episodes only."""
    from omegaconf import OmegaConf

    from diffusion_policy.common.config_util import build

    changes: dict[str, Any] = {"n_train": 0, "n_train_vis": 0}
    if "n_heldout" in cfg.task.env_runner:
        changes["n_heldout"] = 0
    if options.act_noise:
        changes["act_noise"] = options.act_noise
    if options.n_episodes is not None:
        changes["n_test"] = options.n_episodes
    if options.latency is not None:
        changes["n_latency_steps"] = options.latency
    if options.seeds is not None:
        first = SEED_SETS.get(options.seeds, options.seeds)
        changes["test_start_seed"] = OmegaConf.select(cfg, "training.seed", default=0) if first is None else int(first)
    return build(cfg, "task.env_runner", output_dir=str(output), **changes)


def write(log: dict[str, Any], output: pathlib.Path) -> None:
    """Write eval_log.json and print the result; EvaluationError if episodes could not be run."""
    from diffusion_policy.storage import atomic

    atomic.write_text(output / "eval_log.json", json.dumps(log, indent=2, sort_keys=True))
    logs = list(log.get("by_nfe", {"": log}).values())
    for each in logs:
        if each["lost"]:
            raise EvaluationError(
                f"{len(each['lost'])} of {len(each['lost']) + each['n_episodes']} episodes could not be run (seeds "
                f"{', '.join(str(episode['seed']) for episode in each['lost'])}), so there is no mean score; "
                f"{output / 'eval_log.json'} has the reasons and the episodes that were played"
            )
    for each in logs:
        low, high = each["interval_95"]
        latency = each["latency_ms"]
        print(
            f"mean score {each['test/mean_score']:.3f}  (95 % interval {low:.3f} to {high:.3f}, "
            f"{each['n_episodes']} episodes, best {each['best_score']:.3f})"
        )
        if "test/ends_still" in each:
            print(f"motion     {each['test/ends_still']:.0%} of the episodes fail and end standing still")
        for kind in ("placement", "failure"):  # of tasks that tell these apart
            prefix = f"test/{kind}/"
            shares = [
                f"{key.removeprefix(prefix)} {each[key]:.0%}" for key in each if key.startswith(prefix) and each[key]
            ]
            if shares:
                print(f"{kind:<10} {', '.join(shares)}")
        print(
            f"inference  p50 {latency['p50']:.2f} ms, p90 {latency['p90']:.2f} ms, p99 {latency['p99']:.2f} ms at "
            f"batch 1; {each['nfe']:g} network call(s)"
        )
    if (log["dataset"] or {}).get("warning"):
        print(f"note       {log['dataset']['warning']}")
    print(f"written to {output / 'eval_log.json'}")


if __name__ == "__main__":
    main()
