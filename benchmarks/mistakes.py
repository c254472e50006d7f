"""Make common mistakes of new users and check the error messages.

    python -m benchmarks.mistakes [--output results/reliability/mistakes.json]

Each mistake is a command line. A good answer is one line on stderr that names the problem, exit code 2, no traceback,
and nothing trained. The commands run in forks of this process, which has imported torch already.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from typing import Any

import torch
import torch._dynamo  # the optimiser imports it; once here instead of in every fork
from tqdm import tqdm

from benchmarks.data import write_pusht
from idp_workspace.policy import RegressionPolicy

ROOT = pathlib.Path(__file__).resolve().parents[1]


# ---------------------------------------------------------------------- objectives with mistakes
class VectorLossPolicy(RegressionPolicy):
    """Forgets the mean."""

    def loss(self, cond: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return super().loss(cond, actions).expand(len(actions))


class NumberLossPolicy(RegressionPolicy):
    """Returns a Python number."""

    def loss(self, cond: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return super().loss(cond, actions).item()  # type: ignore[return-value]


class DetachedLossPolicy(RegressionPolicy):
    """Detaches the loss."""

    def loss(self, cond: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return super().loss(cond, actions).detach()


class SlowPolicy(RegressionPolicy):
    """Computes for many seconds inside torch."""

    def loss(self, cond: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        large = torch.randn(7000, 7000)
        return super().loss(cond, actions) + 0 * (large @ large).sum()


class WrongShapePolicy(RegressionPolicy):
    """Predicts one step instead of a chunk."""

    def sample(self, cond: torch.Tensor, batch: int) -> torch.Tensor:
        return super().sample(cond, batch)[:, 0]


# ---------------------------------------------------------------------- the table
@dataclasses.dataclass(frozen=True)
class Mistake:
    """A command line, words of the answer, and the exit code. Places such as {run} are filled in."""

    arguments: tuple[str, ...]
    says: str
    script: str = "train.py"
    code: int = 2


BASE = ("--config-name=train_idp_mlp_lowdim", "preset=debug", "task.dataset.zarr_path={data}", "hydra.run.dir={run}")
GRID = ("preset=debug", "hydra.run.dir={run}")
AGAIN = tuple(word.replace("{run}", "{finished}") for word in BASE)


def own(policy: str, run: str = "{run}") -> tuple[str, ...]:
    """A training with one of the objectives above."""
    words = ("--config-name=train_regression_mlp_lowdim", *BASE[1:3], f"hydra.run.dir={run}")
    return (*words, f"policy._target_=benchmarks.mistakes.{policy}")


def overrides(*table: tuple[str, str]) -> dict[str, Mistake]:
    """Mistakes in one setting: (override, words)."""
    return {text: Mistake((*BASE, text), says) for text, says in table}


def evaluation(*table: tuple[str, str]) -> dict[str, Mistake]:
    """Mistakes in the options of eval.py."""
    return {f"eval.py {text}": Mistake(tuple(text.split()), says, "eval.py") for text, says in table}


MISTAKES: dict[str, Mistake] = {
    # a task of another kind
    "an image task for a low-dimensional config": Mistake((*BASE[:2], "task=pusht_image"), "has a shape_meta"),
    "a state task for an image config": Mistake(
        ("--config-name=train_idp_mlp_image", *GRID, "task=pusht_state"), "has observation vectors"
    ),
    "an image task for upstream's low-dimensional config": Mistake(
        ("--config-name=train_diffusion_unet_lowdim_workspace", *GRID, "task=pusht_image"), "has a shape_meta"
    ),
    "a keypoint task for upstream's image config": Mistake(
        ("--config-name=train_diffusion_unet_hybrid_workspace", *GRID, "task=pusht_lowdim"), "has observation vectors"
    ),
    "a point-cloud task for an image config": Mistake(
        ("--config-name=train_idp_mlp_image", *GRID, "task=metaworld"), "does the task fit the config?"
    ),
    "an image task for a point-cloud config": Mistake(
        ("--config-name=train_idp_mlp_pointcloud", *GRID, "task=pusht_image"), "shape_meta has image"
    ),
    # sizes, numbers, names
    **overrides(
        ("task.obs_dim=7", "task.obs_dim=7 does not fit the data, whose observations have 5"),
        ("task.action_dim=3", "task.action_dim=3 does not fit the data, whose actions have 2"),
        ("task.env_runner.n_obs_steps=1", "does not fit the observations of task.env_runner"),
        ("task.env_runner.n_action_steps=20", "IDPPolicy returns 8 actions"),
        (
            "task.env_runner._target_=diffusion_policy.env_runner.pusht_keypoints_runner.PushTKeypointsRunner",
            "does not fit the observations of task.env_runner",
        ),
        ("horizon=0", "horizon=0 must be a whole number, at least 1"),
        ("horizon=long", "horizon='long' must be a whole number"),
        ("n_obs_steps=two", "n_obs_steps='two' must be a whole number"),
        ("n_obs_steps=0", "at least 1"),
        ("n_action_steps=-8", "at least 1"),
        ("n_action_steps=17", "horizon"),
        ("training.num_epochs=many", "whole number"),
        ("training.num_epochs=-1", "at least 0"),
        ("training.seed=abc", "whole number"),
        ("training.tqdm_interval_sec=often", "must be a number"),
        ("dataloader.batch_size=0", "at least 1"),
        ("dataloader.batch_size=big", "whole number"),
        ("dataloader.num_workers=-1", "at least 0"),
        ("val_dataloader.batch_size=-4", "at least 1"),
        ("optimizer.lr=fast", "optimizer.lr='fast' must be a number"),
        ("optimizer.lr=-1", "at least 0"),
        ("ema.rate=slow", "must be a number"),
        ("ema.rate=2", "must be in [0, 1)"),
        ("size.mlp.n_emb=0", "at least 1"),
        ("size.mlp.n_layer=deep", "must be a number"),
        ("task.env_runner.n_test=-5", "at least 0"),
        ("task.env_runner.n_test=0", "there is no episode to run"),
        ("task.env_runner.max_steps=0", "at least 1"),
        ("task.env_runner.fps=0", "at least 1"),
        ("task.dataset.val_ratio=half", "must be a number"),
        ("task.dataset.max_train_episodes=0", "at least 1"),
        ("checkpoint.topk.k=few", "whole number"),
        ("checkpoint.topk.mode=maximum", "'min' or 'max'"),
        ("checkpoint.topk.monitor_key=test_mean_scor", "nearest: test_mean_score"),
        ('checkpoint.topk.format_str="x{test_mean_scor}.ckpt"', "nearest: test_mean_score"),
        ("training.device=gpu", "use auto, cpu, cuda"),
        ("training.device=meta", "cannot be used on this machine"),
        ("policy.tau=-1", "must be above 0"),
        ("policy.tua=1", "nearest: policy.tau"),
        ("policy.nfe=3", "IDP acts with 1 network call"),
        ("policy._target_=idp_workspace.policy.IDPolicy", "IDPolicy"),
        ("policy=null", "policy must be a section"),
        ("logging.mode=onlin", "is not one of disabled"),
        ("task.dataset.zarr_path=/nowhere.zarr", "download pusht"),
        ("task.dataset.zarr_path=README.md", "not a zarr group"),
        ("preset=laptop", "preset 'laptop' does not exist"),
        ("task=null", "task 'null' does not exist"),
        ("training", "is not key=value"),
        ("hydra.run.dir=/proc/nothing/run", "cannot be written"),
        ("hydra.run.dir={file}", "cannot be written"),
        ("hydra.run.dir={file}/run", "cannot be written"),
        ("hydra.run.dir=läufe (neu)", "'hydra.run.dir=\"läufe (neu)\"'"),
        ("--epochs=5", "--epochs is not an option"),
        ("--multirn", "did you mean --multirun?"),
        ("policy._target_=idp_workspace.policy.RegressionPolicy", "has no argument 't_star'"),
    ),
    "upstream's policy, a wrong obs_dim": Mistake(
        ("--config-name=train_diffusion_unet_lowdim_workspace", *GRID, "task.obs_dim=7"), "observations have 20"
    ),
    "a misspelt config": Mistake(("--config-name=train_idp_mlp_lowdm", *GRID), "nearest: train_idp_mlp_lowdim"),
    "a config without --config-name": Mistake(("train_idp_mlp_lowdim",), "--config-name=train_idp_mlp_lowdim?"),
    "a misspelt objective": Mistake(("objective=ipd", *GRID), "nearest: mip, idp"),
    "a misspelt objective in a sweep": Mistake(("objective=idp,flwo", "--multirun", *GRID), "nearest: flow"),
    "a misspelt group": Mistake(("objectiv=idp", *GRID), "nearest: objective"),
    "a folder of configs that is missing": Mistake(("--config-dir=/nowhere", *BASE), "is not a folder"),
    "a teacher that is missing": Mistake(
        ("--config-name=train_consistency_mlp_lowdim", *BASE[1:], "policy.teacher_checkpoint=/nowhere.ckpt"),
        "there is no checkpoint at policy.teacher_checkpoint",
    ),
    # a user's own objective
    "a loss that is not a scalar": Mistake(
        own("VectorLossPolicy"),
        "returns a tensor of shape (16,); it must return one number",
    ),
    "a loss that is a Python number": Mistake(
        own("NumberLossPolicy"),
        "returns float; it must return one number",
    ),
    "a loss without a gradient": Mistake(
        own("DetachedLossPolicy"),
        "does not depend on the weights",
    ),
    "actions of a wrong shape": Mistake(
        own("WrongShapePolicy"),
        "WrongShapePolicy.sample must return a tensor of shape (2, 16, 2), got (2, 2)",
    ),
    # a run folder that is taken
    "another method in a finished run folder": Mistake(
        ("--config-name=train_mip_mlp_lowdim", *AGAIN[1:]), "holds a finished run with other settings: policy._target_"
    ),
    "another seed in a finished run folder": Mistake((*AGAIN, "training.seed=8"), "training.seed 42 -> 8"),
    "another option in a finished run folder": Mistake((*AGAIN, "policy.tau=0.5"), "policy.tau 1.0 -> 0.5"),
    "a shorter run in a finished run folder": Mistake((*AGAIN, "training.num_epochs=1"), "training.num_epochs 2 -> 1"),
    "another method in an unfinished run folder": Mistake(
        ("--config-name=train_mip_mlp_lowdim", *AGAIN[1:], "training.num_epochs=9"), "policy._target_"
    ),
    "a taken run folder without resume": Mistake((*AGAIN, "training.resume=false"), "already holds a run"),
    # a sweep: one line per member, and a table
    "a sweep with a member that fails": Mistake(
        (*BASE[:3], "hydra.sweep.dir={run}", "--multirun", "policy.tau=-1,1", "task.env_runner=null"), "", code=1
    ),
    # eval.py
    **evaluation(
        ("-c {finished} --nfe 3 -o {run}", "IDP acts with 1 network call"),
        ("-c {finished} --nfe 0", "is not a whole number of at least 1"),
        ("-c {finished} --nfe 2,x", "is not a whole number of at least 1"),
        ("-c {finished} -n 0", "is not a whole number of at least 1"),
        ("-c {finished} -n many", "is not a whole number of at least 1"),
        ("-c {finished} --seeds test", "neither heldout nor mip nor a whole number"),
        ("-c {finished} --seeds -5", "neither heldout nor mip nor a whole number"),
        ("-c {finished} -d gpu", "use auto, cpu, cuda"),
        ("-c {finished} -o /proc/nothing/x", "cannot be written"),
        ("-c {finished} -o {file}", "is a file"),
        ("-c {finished} --episodes 5", "unrecognized arguments: --episodes 5"),
        ("-c {run}", "there is no checkpoint"),
        ("-c config", "neither a run folder"),
        ("-c README.md", "is not a checkpoint"),
        ("-c {finished}/config.yaml", "is not a checkpoint"),
        ("-c {finished}/checkpoints/latest.ckpt --best", "is not a run folder"),
        ("{finished}", "one of the arguments -c/--checkpoint --merge --compare is required"),
        ("-c {finished} --shard 3/2", "is not i/n with whole numbers"),
        ("-c {finished} --shard half", "is not i/n with whole numbers"),
        ("-c {finished} -n 1 --shard 1/2", "1 episodes cannot be divided into 2 shards"),
        ("-c {finished} --open-loop --shard 1/2", "--shard divides the episodes of a simulator"),
        ("--merge {finished}", "has no shard_i_of_n/eval_log.json"),
        ("--merge {finished} -n 3", "--merge takes --output_dir and --overwrite only"),
        ("-c", "expected one argument"),
    ),
    "old Python, train.py": Mistake(("PYTHON=3.10",), "Python 3.11 or newer is needed"),
    "old Python, eval.py": Mistake(("PYTHON=3.10",), "Python 3.11 or newer is needed", "eval.py"),
}


# ---------------------------------------------------------------------- making them
@dataclasses.dataclass(frozen=True)
class Answer:
    """What a command printed, and how it ended."""

    code: int
    out: str
    err: str

    def problem(self, mistake: Mistake) -> str | None:
        """Return what is wrong with the answer, None if it is good."""
        if "Traceback" in self.out + self.err:
            return "a traceback"
        if self.code != mistake.code:
            return f"exit code {self.code}"
        if mistake.code == 2 and (len(self.err.splitlines()) != 1 or not self.err.startswith("error: ")):
            return "not one line"
        return None if mistake.says in self.err else f"no {mistake.says!r}"


def in_fork(script: str, arguments: Iterable[str], cwd: pathlib.Path = ROOT) -> Answer:
    """Run train.py, eval.py or a module in a fork of this process."""
    words = list(arguments)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - until the fork ends
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            _run(script, words, cwd)
        _, status = os.waitpid(pid, 0)
        texts = [(file.seek(0), file.read().decode())[1] for file in (out, err)]
    return Answer(os.waitstatus_to_exitcode(status), *texts)


def _run(script: str, words: list[str], cwd: pathlib.Path) -> None:
    """In the fork: what Python does with a script, or a module."""
    code = 1
    try:
        os.chdir(cwd)
        torch.set_num_threads(1)
        if words == ["PYTHON=3.10"]:
            sys.version_info = (3, 10, 0, "final", 0)  # type: ignore[assignment]
        sys.argv = [script, *words]
        if script.endswith(".py"):
            runpy.run_path(str(ROOT / script), run_name="__main__")
        else:
            sys.modules.pop(script, None)
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Places:
    """Files that the mistakes refer to: data, a file, a finished run, and a new folder for every command."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.data = write_pusht(folder / "pusht.zarr")
        (folder / "file").write_text("")
        self.finished = folder / "finished"
        done = in_fork("train.py", [word.format(data=self.data, run=self.finished) for word in BASE])
        assert done.code == 0, done.out + done.err

    def answer(self, mistake: Mistake) -> tuple[list[str], Answer]:
        """Return the command that makes the mistake, and the answer."""
        run = pathlib.Path(tempfile.mkdtemp(dir=self.folder)) / "run"
        values = {"data": self.data, "run": run, "finished": self.finished, "file": self.folder / "file"}
        words = []
        for word in mistake.arguments:
            for name, value in values.items():
                word = word.replace(f"{{{name}}}", str(value))
            words.append(word)
        return words, in_fork(mistake.script, words)


@dataclasses.dataclass(frozen=True)
class Interruption(Answer):
    """The answer to Ctrl-C, and how many seconds the first line took."""

    seconds: float | None

    def problem(self, mistake: Mistake | None = None) -> str | None:
        """Return what is wrong with the answer, None if it is good."""
        if "Traceback" in self.out + self.err:
            return "a traceback"
        return None if self.code == 130 else f"exit code {self.code}"


def interrupted(script: str, arguments: Iterable[str], signals: int, ready: pathlib.Path) -> Interruption:
    """Send Ctrl-C to a command `signals` times, shortly after the file `ready` exists."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = pathlib.Path(folder) / "out", pathlib.Path(folder) / "err"
        with open(out, "w") as stdout, open(err, "w") as stderr:
            process = subprocess.Popen(
                [sys.executable, script, *map(str, arguments)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=stdout,
                stderr=stderr,
                # A shell starts background jobs that ignore Ctrl-C.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        deadline = time.monotonic() + 120
        while not ready.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        seconds = None
        for number in range(signals):
            time.sleep(1)
            sent = time.monotonic()
            process.send_signal(signal.SIGINT)
            while number == 0 and seconds is None and time.monotonic() < sent + 60:
                time.sleep(0.01)
                if "stop" in out.read_text() + err.read_text():
                    seconds = round(time.monotonic() - sent, 2)
        process.wait(timeout=120)
        return Interruption(process.returncode, out.read_text(), err.read_text(), seconds)


def interruptions(places: Places) -> dict[str, Interruption]:
    """Ctrl-C in a run, twice inside a long step, and in an evaluation."""
    run, slow, output = (places.folder / name for name in ("stopped", "stopped_twice", "stopped_eval"))
    long = ("training.num_epochs=100000", "training.steps_per_epoch=100000", "task.env_runner=null")
    once = [word.format(data=places.data, run=run) for word in (*BASE, *long)]
    twice = [word.format(data=places.data, run=slow) for word in (*own("SlowPolicy"), *long)]
    evaluation = ["-c", str(places.finished), "-n", "1000", "-o", str(output)]
    return {
        "Ctrl-C in train.py": interrupted("train.py", once, 1, run / "logs.json.txt"),
        "Ctrl-C in train.py, twice in one step": interrupted("train.py", twice, 2, slow / "config.yaml"),
        "Ctrl-C in eval.py": interrupted("eval.py", evaluation, 1, output / ".lock"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=pathlib.Path, help="a JSON file for the result")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        places = Places(pathlib.Path(folder))
        for name, mistake in tqdm(MISTAKES.items(), unit="mistake", disable=None):
            words, answer = places.answer(mistake)
            said = [line for line in (answer.err or answer.out).splitlines() if line.strip()]
            row = {"mistake": name, "command": f"python {mistake.script} {' '.join(words)}", "exit_code": answer.code}
            rows.append(row | {"answer": said[-1] if said else "", "problem": answer.problem(mistake)})
        for name, stopped in interruptions(places).items():
            said = [line for line in (stopped.out + stopped.err).splitlines() if line.strip()]
            row = {"mistake": name, "exit_code": stopped.code, "seconds to the answer": stopped.seconds}
            rows.append(row | {"answer": said[-1] if said else "", "problem": stopped.problem()})
        text = json.dumps(rows, indent=2, ensure_ascii=False).replace(folder, "/tmp/mistakes").replace(str(ROOT), ".")
    bad = [row for row in rows if row["problem"]]
    result = {
        "command": "python -m benchmarks.mistakes",
        "mistakes": len(rows),
        "one clear line and the right exit code": len(rows) - len(bad),
        "rows": json.loads(text),
    }
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    print(f"{len(rows)} mistakes, {len(bad)} with a bad answer")
    for row in bad:
        print(f"  {row['mistake']}: {row['problem']}: {row['answer']}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
