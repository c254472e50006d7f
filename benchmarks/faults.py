"""Inject faults into training runs, continue them, and compare with undisturbed runs.

    python -m benchmarks.faults [--kills 100] [--commands 20] [--scenarios NAME ...]

Runs are killed with SIGKILL at chosen points (inside a file, before it is flushed, between the two renames that replace
a checkpoint, while the log is written, in a step, in an evaluation) and, as real `train.py` commands, at random times;
their disk fills up; their newest checkpoint is damaged. After each fault the run is continued with training.resume=true
until it ends. Nothing is lost if weights, EMA, optimiser, schedules, random states, counters, scores, the list and the
files of the best checkpoints and the log of every epoch are then bitwise equal to those of the undisturbed run.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import errno
import functools
import json
import logging
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from benchmarks.data import write_pusht
from diffusion_policy.common.config_util import config_dir, register_configs, register_resolvers
from diffusion_policy.common.errors import StorageError
from diffusion_policy.common.json_logger import JsonLogger, read_json_log
from diffusion_policy.storage import atomic, checkpoint_io
from diffusion_policy.workspace import evaluation
from diffusion_policy.workspace.base_workspace import PREVIOUS

ROOT = pathlib.Path(__file__).resolve().parents[1]
#: Small networks and few steps, but every kind of state that must survive.
COMMON = (
    "preset=debug",
    "training.gradient_accumulate_every=2",
    "training.steps_per_epoch=6",
    "training.num_epochs=5",
    "training.log_every=4",
    "training.lr_warmup_steps=5",
    "task.env_runner.max_steps=8",
    "task.env_runner.n_test_vis=0",
    "checkpoint.topk.k=2",
)
SCENARIOS = {
    "accumulation, dropout, EMA, cosine, ramp": ("train_idp_mlp_lowdim", "size.mlp.p_drop=0.1", "lambda_schedule=ramp"),
    "worker processes": ("train_idp_mlp_lowdim", "size.mlp.p_drop=0.1", "dataloader.num_workers=2"),
    "moving reference, transformer": (
        "train_idp_transformer_lowdim",
        "size.transformer.p_drop_attn=0.1",
        "policy.reference=ema",
    ),
    "random crops of images": ("train_idp_mlp_image",),
    "teacher, then student": ("train_consistency_mlp_lowdim", "training.num_epochs=2"),
}
STATES = ("model", "ema_model", "optimizer", "lr_scheduler", "ema", "random_state", "topk")


# ---------------------------------------------------------------------- runs
def compose(name: str, data: pathlib.Path) -> tuple[DictConfig, list[str]]:
    """The config of a scenario, and the equivalent arguments of train.py."""
    config, *own = SCENARIOS[name]
    overrides = [*COMMON, *own, f"task.dataset.zarr_path={data}"]
    register_resolvers()
    register_configs()
    with hydra.initialize_config_dir(str(config_dir()), version_base=None):
        cfg = hydra.compose(config, overrides)
    OmegaConf.resolve(cfg)
    return cfg, [f"--config-name={config}", *overrides]


def train(cfg: DictConfig, folder: pathlib.Path) -> None:
    hydra.utils.get_class(cfg._target_)(copy.deepcopy(cfg), output_dir=str(folder)).run()


def in_child(action: Callable[[], Any], log: pathlib.Path, seconds: float = 300) -> int:
    """Run `action` in a child process; return 0, 1 after an exception, or minus the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        with open(log, "ab", 0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = 1
        try:
            action()
            code = 0
        except BaseException:  # the child must end here
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise RuntimeError(f"a run hangs after {seconds:.0f} s; see {log}")


# ---------------------------------------------------------------------- faults
class _CountingFile:
    """A file that counts the bytes written and calls `hit` at a given one."""

    def __init__(self, file: Any, size: int, hit: Callable[[], None]):
        self.file, self.left, self.hit = file, size, hit

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        if self.left < len(data):
            self.file.write(data[: self.left])
            self.file.flush()
            self.hit()
        self.left -= len(data)
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


#: Points at which a fault can happen, and the function called there.
POINTS = {
    "in a checkpoint file": (torch, "save"),
    "before a flush": (os, "fsync"),
    "between two renames": (os, "link"),
    "before a rename": (os, "replace"),
    "before an old best one is removed": (os, "remove"),
    "while logging": (JsonLogger, "log"),
    "in a step": (torch.optim.AdamW, "step"),
    "in an evaluation": (evaluation, "action_error"),
}


@contextlib.contextmanager
def hit_at(point: str, number: int, hit: Callable[[], None], rng: random.Random) -> Iterator[collections.Counter]:
    """Call `hit` at the `number`-th call (from 0) at `point`; yield the number of calls at every point."""
    counts: collections.Counter = collections.Counter()
    originals = {name: getattr(owner, attribute) for name, (owner, attribute) in POINTS.items()}

    def patched(name: str) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            if name == point and counts[name] - 1 == number:
                if name == "in a checkpoint file":
                    args = (args[0], _CountingFile(args[1], rng.randrange(20_000), hit), *args[2:])
                else:
                    hit()
            return originals[name](*args, **kwargs)

        return call

    for name, (owner, attribute) in POINTS.items():
        setattr(owner, attribute, patched(name))
    try:
        yield counts
    finally:
        for name, (owner, attribute) in POINTS.items():
            setattr(owner, attribute, originals[name])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def damage(path: pathlib.Path, rng: random.Random) -> str:
    """Flip a bit, truncate, empty or partly overwrite the file; return which."""
    content = bytearray(path.read_bytes())
    how = rng.choice(["a flipped bit", "cut short", "emptied", "overwritten"])
    place = rng.randrange(len(content) // 8, len(content) * 7 // 8)  # in the records, not in the directory at the end
    if how == "a flipped bit":
        content[place] ^= 1 << rng.randrange(8)
    elif how == "cut short":
        del content[place:]
    elif how == "emptied":
        content.clear()
    else:
        content[place : place + 512] = rng.randbytes(512)
    path.write_bytes(content)
    return how


# ---------------------------------------------------------------------- comparing
def equal(a: Any, b: Any) -> bool:
    """Whether nested dicts, lists and tensors are bitwise equal."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def differences(run: pathlib.Path, reference: pathlib.Path) -> list[str]:
    """Describe the differences between a continued and the undisturbed run; empty if there are none."""
    out = []
    checkpoints = [{path.name for path in (folder / "checkpoints").glob("epoch=*.ckpt")} for folder in (run, reference)]
    if checkpoints[0] != checkpoints[1]:
        out.append(f"best checkpoints {sorted(checkpoints[0])} instead of {sorted(checkpoints[1])}")
    for name in ("latest.ckpt", *sorted(checkpoints[0] & checkpoints[1])):
        one, other = (checkpoint_io.load(folder / "checkpoints" / name) for folder in (run, reference))
        for payload in (one, other):  # which files are still to be removed: none if that was done before the fault
            payload["state_dicts"]["topk"].pop("displaced", None)
        out += [
            f"{name}: {state}" for state in STATES if not equal(one["state_dicts"][state], other["state_dicts"][state])
        ]
        if one["attributes"] != other["attributes"]:
            out.append(f"{name}: attributes {one['attributes']} instead of {other['attributes']}")
    # Losses between records depend on where a run was interrupted; those at the end of an epoch do not.
    logs = [read_json_log(folder / "logs.json.txt", ["train_action_mse_error"]) for folder in (run, reference)]
    if logs[0] != logs[1]:
        out.append("the log of epochs")
    leftovers = [path.name for path in run.rglob(".*.tmp")]
    if leftovers:
        out.append(f"files left behind: {leftovers}")
    if (reference / "teacher").is_dir():
        out += [f"teacher: {text}" for text in differences(run / "teacher", reference / "teacher")]
    return out


# ---------------------------------------------------------------------- trials
class Trials:
    """Disturbed runs of one scenario."""

    def __init__(self, scenario: str, folder: pathlib.Path, seed: int):
        self.rng = random.Random(f"{scenario}/{seed}")
        self.folder = folder
        self.cfg, self.arguments = compose(scenario, write_pusht(folder / "pusht.zarr"))
        self.reference = folder / "undisturbed"
        self.log = folder / "log.txt"
        self.counts: collections.Counter = collections.Counter()  # calls at each point in an undisturbed run
        self.faults: collections.Counter = collections.Counter()  # number of faults by kind
        self.lost: list[str] = []
        self.runs = 0

        # In this process, so that its children have everything imported.
        with (
            open(self.log, "a") as log,
            contextlib.redirect_stdout(log),
            hit_at("nowhere", -1, die, self.rng) as counts,
        ):
            train(self.cfg, self.reference)
        self.counts.update(counts)

    def _must_end_well(self, code: int) -> None:
        if code != 0:
            raise RuntimeError(f"a run that was not disturbed ended with {code}; see {self.log}")

    def new_run(self) -> pathlib.Path:
        self.runs += 1
        return self.folder / f"run_{self.runs}"

    def check(self, run: pathlib.Path, what: str) -> None:
        """Finish the run undisturbed and compare it."""
        self._must_end_well(in_child(lambda: train(self.cfg, run), self.log))
        wrong = differences(run, self.reference)
        self.lost += [f"{run.name} ({what}): {text}" for text in wrong]
        if not wrong:
            shutil.rmtree(run)

    def kill_at_points(self, number: int, bar: tqdm | None = None) -> None:
        """Send `number` SIGKILLs at alternating points, several per run; damage a checkpoint in every other run."""
        points = [point for point in POINTS if self.counts[point]]
        done = 0
        while done < number:
            run, history = self.new_run(), []
            for _ in range(min(self.rng.randrange(1, 5), number - done)):
                point = points[(done + self.runs) % len(points)]
                # Early calls, too: the rest of a run gets shorter with each kill.
                where = self.rng.randrange(max(1, self.counts[point] // self.rng.choice((1, 1, 2, 4))))

                def killed(run: pathlib.Path = run, point: str = point, where: int = where) -> None:
                    with hit_at(point, where, die, self.rng):
                        train(self.cfg, run)

                if in_child(killed, self.log) == -signal.SIGKILL:
                    self.faults[f"killed {point}"] += 1
                    history.append(point)
                    done += 1
                    if bar is not None:
                        bar.update()
                latest = run / "checkpoints/latest.ckpt"
                if (
                    self.runs % 2
                    and latest.is_file()
                    and (run / "checkpoints/previous.ckpt").is_file()
                    and "damaged" not in history
                ):
                    self.faults[f"newest checkpoint {damage(latest, self.rng)}"] += 1
                    history.append("damaged")
                    if self.runs % 4 == 1 and any(latest.parent.glob("epoch=*.ckpt")):
                        self.faults[f"and the one before it {damage(latest.with_name(PREVIOUS), self.rng)}"] += 1
            self.check(run, ", ".join(history))

    def fill_disk_at_points(self, number: int) -> None:
        """Let `number` runs find no disk space at some write; each must report it, stop, and continue later."""
        for i in range(number):
            run = self.new_run()
            point = ("in a checkpoint file", "before a flush", "while logging")[i % 3]
            where = self.rng.randrange(self.counts[point])

            def full(run: pathlib.Path = run, point: str = point, where: int = where) -> None:
                with hit_at(point, where, no_space, self.rng):
                    try:
                        train(self.cfg, run)
                    except StorageError as error:
                        assert "training.resume=true" in str(error) or not (run / "checkpoints").exists(), error
                        os._exit(7)

            code = in_child(full, self.log)
            if code != 7:
                self.lost.append(
                    f"{run.name}: without space {point} the run ended with {code}, not with a StorageError"
                )
            self.faults[f"no space {point}"] += 1
            self.check(run, f"no space {point}")

    def fill_small_disk(self) -> None:
        """Run on a real file system that is too small and is enlarged after each failure."""
        run = self.new_run()
        run.mkdir()
        need = sum(path.stat().st_size for path in self.reference.rglob("*") if path.is_file())
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={need // 3}", "tmpfs", str(run)], check=True)
        try:
            for share in (0.5, 0.7, 0.9, 4):
                code = in_child(lambda: train(self.cfg, run), self.log)
                if code == 0:
                    break
                self.faults["a full file system"] += 1
                subprocess.run(["mount", "-o", f"remount,size={int(need * share)}", str(run)], check=True)
            self._must_end_well(in_child(lambda: train(self.cfg, run), self.log))
            self.lost += [f"{run.name} (small disk): {text}" for text in differences(run, self.reference)]
        finally:
            # A worker process of the last run may still be ending there.
            subprocess.run(["umount", "--lazy", str(run)], check=True)

    def kill_commands(self, number: int, bar: tqdm | None = None) -> None:
        """Signal `number` real train.py processes at random times: SIGKILL, or SIGTERM, which writes a checkpoint."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done, run = 0, self.new_run()
        # Longer than the other runs, so that there is time for a signal.
        arguments = [*self.arguments, "training.num_epochs=40"]
        cfg = copy.deepcopy(self.cfg)
        cfg.training.num_epochs = 40
        reference = self.folder / "undisturbed_command"
        self._must_end_well(in_child(lambda: train(cfg, reference), self.log))
        while done < number:
            with open(self.log, "a") as log:
                process = subprocess.Popen(
                    [sys.executable, str(ROOT / "train.py"), *arguments, f"hydra.run.dir={run}"],
                    cwd=ROOT,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
                how = signal.SIGTERM if done % 5 == 4 else signal.SIGKILL
                before = _size(run / "logs.json.txt")
                while process.poll() is None and _size(run / "logs.json.txt") == before:
                    time.sleep(0.002)
                time.sleep(self.rng.uniform(0, 1.5))
                if process.poll() is None:
                    process.send_signal(how)
                    self.faults[f"train.py got {how.name} at a random moment"] += 1
                    done += 1
                    if bar is not None:
                        bar.update()
                process.wait(120)
            if (run / "summary.json").is_file() or done == number:
                self._must_end_well(in_child(functools.partial(train, cfg, run), self.log))
                self.lost += [f"{run.name} (commands): {text}" for text in differences(run, reference)]
                run = self.new_run()


def _size(path: pathlib.Path) -> int:
    return path.stat().st_size if path.is_file() else 0


# ---------------------------------------------------------------------- the command
def table(faults: dict[str, int]) -> str:
    return "\n".join(
        ["| fault | times |", "|---|---|", *(f"| {what} | {count} |" for what, count in sorted(faults.items()))]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Disturb training runs, continue them, and compare with undisturbed ones."
    )
    parser.add_argument(
        "--kills", type=int, default=100, help="SIGKILLs at chosen points, over all scenarios (default 100)"
    )
    parser.add_argument(
        "--commands", type=int, default=20, help="signals to real train.py processes at random moments (default 20)"
    )
    parser.add_argument("--scenarios", nargs="*", default=list(SCENARIOS), help="which of the scenarios (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "results/reliability/faults.json")
    options = parser.parse_args()
    unknown = set(options.scenarios) - set(SCENARIOS)
    if unknown:
        parser.error(f"unknown scenario {', '.join(unknown)}; choose from: {', '.join(SCENARIOS)}")
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    faults, lost, runs = {}, [], 0
    total = options.kills + options.commands
    with tempfile.TemporaryDirectory() as folder, tqdm(total=total, unit="kill", disable=None) as bar:
        for number, scenario in enumerate(options.scenarios):
            bar.set_description(scenario)
            place = pathlib.Path(folder) / f"scenario_{number}"
            place.mkdir()
            trials = Trials(scenario, place, options.seed)
            kills, rest = divmod(options.kills, len(options.scenarios))
            trials.kill_at_points(kills + (number < rest), bar)
            trials.fill_disk_at_points(3)
            if os.geteuid() == 0 and shutil.which("mount") and "teacher" not in scenario:
                trials.fill_small_disk()
            if number == 0:
                trials.kill_commands(options.commands, bar)
            faults[scenario] = dict(sorted(trials.faults.items()))
            lost += [f"{scenario}: {text}" for text in trials.lost]
            runs += trials.runs
        if lost:
            shutil.copytree(folder, kept := pathlib.Path(tempfile.mkdtemp(prefix="faults_")) / "runs")
            print(f"the runs are kept in {kept}")
    sums: collections.Counter = collections.Counter()
    for counts in faults.values():
        sums.update(counts)
    result = {
        "command": f"python -m benchmarks.faults --kills {options.kills} --commands {options.commands} "
        f"--seed {options.seed}",
        "kills": sum(count for what, count in sums.items() if "killed" in what or "SIGKILL" in what),
        "faults": sum(sums.values()),
        "runs": runs,
        "lost": lost,
        "by_scenario": faults,
        "versions": checkpoint_io.versions(),
    }
    atomic.write_atomically(options.output, lambda file: file.write((json.dumps(result, indent=2) + "\n").encode()))
    print(table(sums))
    print(f"{result['faults']} faults, {result['kills']} of them SIGKILL, in {runs} runs; lost: {len(lost)}")
    sys.exit("\n".join(lost) if lost else 0)


if __name__ == "__main__":
    main()
