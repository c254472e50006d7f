"""An evaluation in parts, over processes or machines: `eval.py --shard i/n` and `eval.py --merge`.

A part is an evaluation of its own, in the folder shard_<i>_of_<n> of the whole one; its eval_log.json has the entry
`shard`. The log of the whole is computed from the episodes of all parts as that of an evaluation in one piece.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
from typing import Any

from diffusion_policy.common.config_util import get_class
from diffusion_policy.common.errors import ConfigError
from diffusion_policy.env_runner.rollout import RolloutRunner
from diffusion_policy.storage import weights_io
from diffusion_policy.workspace.measurement import statistics

#: Options of eval.py that all parts must share, and entries of their logs.
OPTIONS = ("n_episodes", "seeds", "nfe", "latency", "act_noise")
ENTRIES = ("name", "global_step", "dataset", "n_latency_steps")
#: Entries that may differ: the merged log has those of the first part.
MACHINE = ("device", "torch_threads", "versions")


def folder_name(index: int, count: int) -> str:
    return f"shard_{index}_of_{count}"


def keep_part(runner: Any, index: int, count: int) -> None:
    """Let the runner play only part `index`, from 1, of its episodes."""
    if not isinstance(runner, RolloutRunner):
        raise ConfigError(f"--shard: {type(runner).__name__} is not a RolloutRunner, its episodes cannot be divided")
    runner.keep_part(index, count)


def description(options: argparse.Namespace, checkpoint: pathlib.Path, runner: str) -> dict[str, Any]:
    """Return what a part notes about itself, so that only parts of one evaluation are merged."""
    index, count = options.shard
    file = checkpoint / weights_io.WEIGHTS if checkpoint.is_dir() else checkpoint
    with open(file, "rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    given = {name: getattr(options, name) for name in OPTIONS}
    return {"index": index, "count": count, "checkpoint_sha256": digest, "runner": runner, "options": given}


# ---------------------------------------------------------------------- merging
def merge(folder: pathlib.Path) -> tuple[dict[str, Any], list[str]]:
    """Return the log of the evaluation whose parts are in `folder`, and which entries of MACHINE differ in them."""
    logs = read(folder)
    check_complete(folder, [log["shard"] for log in logs])
    check_same(logs)
    runner = get_class(logs[0]["shard"]["runner"], RolloutRunner)
    merged = combine(logs, runner)
    if "by_nfe" in merged:
        merged["by_nfe"] = {nfe: combine([log["by_nfe"][nfe] for log in logs], runner) for nfe in merged["by_nfe"]}
    return merged, [name for name in MACHINE if any(log.get(name) != logs[0].get(name) for log in logs)]


def read(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Return the logs of the parts in `folder`, in order, with the videos at their place below it."""
    logs = []
    for path in folder.glob("shard_*_of_*/eval_log.json"):
        try:
            log = json.loads(path.read_text())
            place(log, path.parent)
            for each in log.get("by_nfe", {}).values():
                place(each, path.parent)
            log["shard"]["index"], log["shard"]["count"], log["shard"]["options"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not the log of a shard ({error!r}): evaluate that shard again") from error
        logs.append(log)
    if not logs:
        raise ConfigError(f"{folder} has no shard_i_of_n/eval_log.json: run eval.py --shard i/n first")
    return sorted(logs, key=lambda log: log["shard"]["index"])


def place(log: dict[str, Any], folder: pathlib.Path) -> None:
    """Correct the paths of the videos in the log of a part, which may have been copied from another machine."""
    for episode in log["episodes"]:
        if episode["video"] is not None:
            parts = pathlib.PurePath(episode["video"]).parts
            below = parts[parts.index(folder.name) + 1 :] if folder.name in parts else ("media", parts[-1])
            episode["video"] = str(folder.joinpath(*below))


def check_complete(folder: pathlib.Path, shards: list[dict[str, Any]]) -> None:
    counts = sorted({shard["count"] for shard in shards})
    if len(counts) > 1:
        raise ConfigError(
            f"{folder} has shards of {' and of '.join(map(str, counts))}: they are of different evaluations; remove "
            "those of one"
        )
    here = {shard["index"] for shard in shards}
    missing = [f"{index}/{counts[0]}" for index in range(1, counts[0] + 1) if index not in here]
    if missing:
        raise ConfigError(
            f"{folder}: shard {', '.join(missing)} is missing; run eval.py with the same options and --shard "
            f"{missing[0]}"
        )


def check_same(logs: list[dict[str, Any]]) -> None:
    """Raise ConfigError unless all parts are of one checkpoint and one set of options."""
    first, *others = [identity(log) for log in logs]
    for number, other in enumerate(others, 2):
        different = [name for name in first if first[name] != other.get(name)]
        if different:
            name = different[0]
            values = "" if name == "dataset" else f" ({short(first[name])} and {short(other.get(name))})"
            raise ConfigError(f"shards 1 and {number} differ in {name}{values}: they are of different evaluations")


def identity(log: dict[str, Any]) -> dict[str, Any]:
    shard = log["shard"]
    same = {name: shard.get(name) for name in ("checkpoint_sha256", "runner")}
    return same | shard["options"] | {name: log.get(name) for name in ENTRIES}


def short(value: Any) -> str:
    return text if len(text := str(value)) <= 40 else f"{text[:12]}..."


def combine(logs: list[dict[str, Any]], runner: type[RolloutRunner]) -> dict[str, Any]:
    """Return the log of all episodes; times and versions are those of the first part."""
    episodes = [episode for log in logs for episode in log["episodes"]]
    lost = [episode for log in logs for episode in log["lost"]]
    computed = runner.summary(episodes, lost) | statistics(episodes, lost)
    rest = {name: value for name, value in logs[0].items() if not name.startswith("test/")}
    for name in ("shard", "best_score", "interval_95"):  # absent if episodes were lost
        rest.pop(name, None)
    return rest | computed
