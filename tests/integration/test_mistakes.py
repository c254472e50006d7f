"""What a newcomer does wrong, and the answer: one clear line, exit code 2, no traceback, nothing trained."""

import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import hydra
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from benchmarks.mistakes import MISTAKES, Mistake, Places, in_fork, interruptions
from diffusion_policy.common.command_line import override, reporting, shell_command
from diffusion_policy.common.errors import ConfigError
from diffusion_policy.storage import checkpoint_io
from diffusion_policy.workspace import outlook
from diffusion_policy.workspace.changes import check_changes
from diffusion_policy.workspace.outlook import Outlook, duration
from diffusion_policy.workspace.preflight import check_batch
from diffusion_policy.workspace.settings import check_numbers, check_sections
from diffusion_policy.workspace.sweep import Member, Sweep
from tests.util import ROOT, load_config

#: Checks of a single number need no command.
NUMBERS = [
    name for name, mistake in MISTAKES.items() if re.match(r"at least|whole number|must be a number", mistake.says)
]
NUMBERS = [name for name in NUMBERS if not name.startswith("training.")]  # those are checked by the workspace


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return Places(tmp_path_factory.mktemp("mistakes"))


@pytest.mark.parametrize(
    "name", [name for name, mistake in MISTAKES.items() if name not in NUMBERS and mistake.code == 2]
)
def test_a_mistake_is_answered_with_one_line(name, places):
    words, answer = places.answer(MISTAKES[name])
    assert answer.problem(MISTAKES[name]) is None, f"{words}\n{answer.out}\n{answer.err}"
    for word in words:  # nothing was trained
        assert not os.path.exists(word.removeprefix("hydra.run.dir=") + "/checkpoints") or "finished" in word


@pytest.mark.parametrize("text", NUMBERS)
def test_text_and_zero_counts_are_refused_where_a_number_belongs(text):
    with hydra.initialize_config_dir(str(ROOT / "config"), version_base=None):
        cfg = hydra.compose("train_idp_mlp_lowdim", overrides=["preset=debug", text])
    with pytest.raises(ConfigError, match=MISTAKES[text].says) as error:
        check_numbers(cfg)
    assert text.partition("=")[0] in str(error.value)


def test_every_config_of_the_grid_passes_the_checks_of_numbers():
    for name in ("train_idp_mlp_lowdim", "train_flow_unet_image", "train_idp_transformer_pointcloud", "train_dp3"):
        check_numbers(load_config(name))


# ---------------------------------------------------------------------- Ctrl-C
def test_ctrl_c_is_answered_and_ends_with_130(places):
    answers = interruptions(places)
    for name, answer in answers.items():
        assert answer.problem() is None and answer.seconds is not None, f"{name}\n{answer.out}\n{answer.err}"
    once, twice, evaluation = answers.values()
    assert "stopping after this step" in once.out and "continue with" in once.out
    assert "stopping after this step" in twice.out and "stopping at once" in twice.out and "continue" not in twice.out
    assert "no eval_log.json was written" in evaluation.err
    assert (places.folder / "stopped/checkpoints/latest.ckpt").exists()
    assert not (places.folder / "stopped_twice/checkpoints").exists()


# ---------------------------------------------------------------------- sweeps
def test_a_failing_member_does_not_stop_the_sweep(places, tmp_path):
    mistake = MISTAKES["a sweep with a member that fails"]
    words = [word.replace("{data}", str(places.data)).replace("{run}", str(tmp_path)) for word in mistake.arguments]
    answer = in_fork(mistake.script, words)
    assert answer.code == 1 and "Traceback" not in answer.out + answer.err
    table = answer.out[answer.out.index("2 runs, 1 failed") :].splitlines()
    assert re.match(r"  policy.tau=-1 +failed: policy cannot be built: tau=-1 must be above 0", table[1])
    assert re.match(r"  policy.tau=1 +done, no score", table[2])
    assert (tmp_path / "1/checkpoints/latest.ckpt").exists() and not (tmp_path / "0/checkpoints").exists()


def test_the_table_of_a_sweep_shows_what_differs():
    sweep = Sweep()
    sweep.members += [
        Member(("preset=cpu", "training.seed=0"), "out/0", "score 0.500 (best 0.600)", failed=False),
        Member(("preset=cpu", "training.seed=1"), "out/1", "failed: no", failed=True),
    ]
    lines = sweep.table().splitlines()
    assert lines[0] == "2 runs, 1 failed" and sweep.failures == 1
    assert lines[1].split("  ")[1:] == ["training.seed=0", "score 0.500 (best 0.600)", "out/0"]


# ---------------------------------------------------------------------- printed commands
@pytest.mark.parametrize(
    "folder",
    ["plain/run-1", "a b", "läufe (neu)", "it's", 'say "x"', "a,b=c", "[x]{y}", "back\\slash", "end\\", "$HOME"],
)
def test_printed_commands_survive_the_shell_and_hydra(folder):
    command = shell_command("python", "train.py", override("hydra.run.dir", folder))
    words = shlex.split(command)
    assert (
        subprocess.run(
            ["bash", "-c", command.replace("python train.py", f"{sys.executable} -c 'import sys; print(sys.argv[1])'")],
            capture_output=True,
            text=True,
        ).stdout.rstrip("\n")
        == words[-1]
    )
    assert str(OverridesParser.create().parse_override(words[-1]).value()) == folder


def test_a_run_in_an_odd_folder_prints_commands_that_work(places, tmp_path):
    run = tmp_path / "läufe (neu) it's"
    words = ["--config-name=train_idp_mlp_lowdim", "preset=debug", f"task.dataset.zarr_path={places.data}"]
    done = in_fork("train.py", [*words, override("hydra.run.dir", run), "task.env_runner.n_test_vis=0"])
    assert done.code == 0, done.err
    command = shlex.split(done.out.split("next            ")[1])
    assert command[:2] == ["python", "eval.py"] and in_fork("eval.py", [*command[2:], "-n", "1"]).code == 0


# ---------------------------------------------------------------------- eval.py
def test_eval_takes_a_run_folder_and_names_its_output_after_the_options(places):
    run = places.finished
    for options in (
        ["-n", "1"],
        ["-n", "1", "--best"],
        ["-n", "2", "--seeds", "mip"],
        ["-n", "1", "--seeds", "200000"],
    ):
        done = in_fork("eval.py", ["-c", str(run), *options])
        assert done.code == 0, done.err
    seeds = {
        name: [episode["seed"] for episode in json.loads((run / name / "eval_log.json").read_text())["episodes"]]
        for name in ("eval_latest_n1", "eval_latest_n2_mip", "eval_latest_n1_seed200000")
    }
    assert seeds["eval_latest_n2_mip"] == [42, 43]  # from the training seed of the checkpoint
    assert seeds["eval_latest_n1_seed200000"] == [200000]
    assert (run / "eval_latest_n2_mip/media").is_dir()
    (best,) = run.glob("eval_epoch=*_n1")
    log = json.loads((best / "eval_log.json").read_text())
    assert "epoch=" in log["checkpoint"] and log["dataset"]["name"] and "sha256" in log["dataset"]
    again = in_fork("eval.py", ["-c", str(run), "-n", "1"])
    assert again.code == 2 and "already holds an evaluation" in again.err


def test_several_numbers_of_network_calls_in_one_evaluation(places, tmp_path):
    done = in_fork("eval.py", ["-c", str(places.finished), "-n", "2", "--nfe", "2,1", "-o", str(tmp_path)])
    assert done.code == 0 and done.out.count("mean score") == 2, done.err
    log = json.loads((tmp_path / "eval_log.json").read_text())
    assert {key: each["nfe"] for key, each in log["by_nfe"].items()} == {"2": 2, "1": 1}
    assert log["nfe"] == 2 and log["test/mean_score"] == log["by_nfe"]["2"]["test/mean_score"]
    assert all((tmp_path / f"nfe{nfe}/media").is_dir() for nfe in (1, 2))  # videos do not share a folder
    single = in_fork("eval.py", ["-c", str(places.finished), "-n", "2", "--nfe", "1", "-o", str(tmp_path / "one")])
    alone = json.loads((tmp_path / "one/eval_log.json").read_text())
    assert single.code == 0 and alone["test/mean_score"] == log["by_nfe"]["1"]["test/mean_score"]


def without_times_and_paths(log):
    """What must be the same in an evaluation in one piece and in shards."""
    out = {key: value for key, value in log.items() if "sim_video" not in key and key != "latency_ms"}
    out["episodes"] = [dict(episode, video=bool(episode["video"])) for episode in log["episodes"]]
    return out | {"by_nfe": {key: without_times_and_paths(each) for key, each in log.get("by_nfe", {}).items()}}


@pytest.mark.parametrize("count, options", [(2, ["-n", "5"]), (3, ["-n", "4", "--nfe", "2,1", "--act-noise", "3"])])
def test_shards_merge_into_the_evaluation_in_one_piece(places, tmp_path, count, options):
    def logged(folder, *arguments):
        done = in_fork("eval.py", [*arguments, "-o", str(folder)])
        assert done.code == 0, done.err
        return json.loads((folder / "eval_log.json").read_text())

    checkpoint = ["-c", str(places.finished), *options]
    whole = logged(tmp_path / "whole", *checkpoint)
    for index in range(1, count + 1):
        done = in_fork("eval.py", [*checkpoint, "-o", str(tmp_path / "parts"), "--shard", f"{index}/{count}"])
        assert done.code == 0 and f"--merge {tmp_path / 'parts'}" in done.out, done.err
    merged = logged(tmp_path / "merged", "--merge", str(tmp_path / "parts"))
    assert without_times_and_paths(merged) == without_times_and_paths(whole)
    assert merged.keys() == whole.keys()
    videos = [episode["video"] for episode in merged["episodes"] if episode["video"]]
    assert videos and all(pathlib.Path(video).is_file() for video in videos)


def test_shards_that_do_not_belong_together_are_refused(places, tmp_path):
    def shard(part, *options):
        done = in_fork("eval.py", ["-c", str(places.finished), "-o", str(tmp_path), "--shard", part, *options])
        assert done.code == 0, done.err

    def refused(text, folder=tmp_path):
        done = in_fork("eval.py", ["--merge", str(folder)])
        assert done.code == 2 and text in done.err and done.err.count("\n") == 1, done.err
        assert not (folder / "eval_log.json").exists()

    shard("1/3", "-n", "3")
    refused("shard 2/3, 3/3 is missing")
    shard("3/3", "-n", "3")
    refused("shard 2/3 is missing; run eval.py with the same options and --shard 2/3")
    shard("2/3", "-n", "3", "--seeds", "200000")
    refused("shards 1 and 2 differ in seeds (None and 200000)")
    log = json.loads((tmp_path / "shard_1_of_3/eval_log.json").read_text())
    log["shard"]["index"] = 2
    shutil.copytree(tmp_path, tmp_path / "other")
    other = tmp_path / "other/shard_2_of_3/eval_log.json"
    log["shard"]["checkpoint_sha256"] = "of another checkpoint"
    other.write_text(json.dumps(log))
    refused("shards 1 and 2 differ in checkpoint_sha256", tmp_path / "other")
    other.write_text("{")
    refused("is not the log of a shard", tmp_path / "other")
    shard("1/2", "-n", "3")
    refused("has shards of 2 and of 3")


def test_two_evaluations_at_once_do_not_share_a_folder(places, tmp_path):
    from diffusion_policy.workspace.run_folder import locked

    with locked(tmp_path / "out", "evaluating"):
        done = in_fork("eval.py", ["-c", str(places.finished), "-n", "1", "-o", str(tmp_path / "out")])
    assert done.code == 2 and "another process is evaluating in" in done.err
    assert not (tmp_path / "out/eval_log.json").exists()


def test_help_imports_no_torch():
    for script in ("train.py", "eval.py"):
        run = f"sys.argv = [{script!r}, '--help']\ntry: runpy.run_path({script!r}, run_name='__main__')"
        code = f"import sys, runpy\n{run}\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and "usage" in done.stdout, done.stderr


# ---------------------------------------------------------------------- resuming
def test_what_a_resumed_run_may_change(tmp_path, caplog):
    cfg = {"policy": {"_target_": "A", "tau": 1.0}, "training": {"num_epochs": 2, "device": "cpu"}}
    other = {"policy": {"_target_": "A", "tau": 0.5}, "training": {"num_epochs": 2, "device": "cuda"}}
    with pytest.raises(ConfigError, match=r"finished run with other settings: policy.tau 1.0 -> 0.5; choose another"):
        check_changes(cfg, other, True, tmp_path)
    check_changes(cfg, other, False, tmp_path)
    assert "resuming with changed settings" in caplog.text
    check_changes(cfg, {**cfg, "training": {"num_epochs": 2, "device": "cuda"}}, True, tmp_path)
    with pytest.raises(ConfigError, match="policy._target_ A -> B"):
        check_changes(cfg, {**cfg, "policy": {"_target_": "B", "tau": 1.0}}, False, tmp_path)
    data = [{"task": {"dataset": {"zarr_path": path}}} for path in ("/work/data/a.zarr", "data/a.zarr", "data/b.zarr")]
    check_changes(data[0], data[1], True, tmp_path)  # started from another folder
    with pytest.raises(ConfigError, match="zarr_path"):
        check_changes(data[0], data[2], True, tmp_path)


# ---------------------------------------------------------------------- a task without a simulator
@pytest.mark.parametrize("preset", ["paper", "cpu", "debug"])
def test_a_task_file_without_a_runner_survives_every_preset(preset, places, tmp_path):
    (tmp_path / "task").mkdir()
    text = (ROOT / "config/task/pusht_state.yaml").read_text()
    (tmp_path / "task/own.yaml").write_text(re.sub(r"env_runner:.*\n  _target_: .*\n", "env_runner: null\n", text))
    done = in_fork(
        "train.py",
        [
            f"--config-dir={tmp_path}",
            "--config-name=train_idp_mlp_lowdim",
            "task=own",
            f"preset={preset}",
            "training.num_epochs=0",
            "size.mlp.n_emb=16",
            "dataloader.batch_size=16",
            f"task.dataset.zarr_path={places.data}",
            f"hydra.run.dir={tmp_path / 'run'}",
        ],
    )
    assert done.code == 0, done.err
    cfg = checkpoint_io.load(tmp_path / "run/checkpoints/latest.ckpt")["cfg"]
    assert cfg["task"]["env_runner"] is None
    if preset == "paper" and not torch.cuda.is_available():
        assert "preset=paper is made for a GPU" in done.out and "preset=cpu" in done.out.split("use\n")[1]


def test_a_runner_without_a_class_is_none():
    cfg = load_config("train_idp_mlp_lowdim", "preset=debug")
    cfg.task.env_runner = {"n_test": 2}
    check_sections(cfg)
    assert cfg.task.env_runner is None


# ---------------------------------------------------------------------- data that does not fit
def image_task(**entries):
    obs = {key: {"shape": shape, "type": kind} for key, (shape, kind) in entries.items()}
    return OmegaConf.create(
        {"dataset": {"_target_": "x"}, "shape_meta": {"obs": obs, "action": {"shape": [2]}}, "obs_dim": None}
    )


def test_float_images_outside_the_unit_range_are_refused_with_the_likely_cause():
    task = image_task(image=((3, 8, 8), "rgb"))
    images = torch.randint(0, 256, (2, 4, 3, 8, 8), dtype=torch.uint8)
    action = torch.zeros(2, 4, 2)
    check_batch(task, {"obs": {"image": images}, "action": action})
    check_batch(task, {"obs": {"image": images / 255}, "action": action})
    with pytest.raises(ConfigError, match="divide them by 255"):
        check_batch(task, {"obs": {"image": images.float()}, "action": action})
    with pytest.raises(ConfigError, match=r"image.shape=\(3, 8, 8\) does not fit the data"):
        check_batch(task, {"obs": {"image": images[..., :4]}, "action": action})
    with pytest.raises(ConfigError, match="task.shape_meta has 'image', the data has picture"):
        check_batch(task, {"obs": {"picture": images}, "action": action})
    with pytest.raises(ConfigError, match="whose actions have 3 numbers"):
        check_batch(task, {"obs": {"image": images}, "action": torch.zeros(2, 4, 3)})
    with pytest.raises(ConfigError, match="'obs' and 'action'"):
        check_batch(task, {"obs": {"image": images}})


# ---------------------------------------------------------------------- how long it takes
def test_the_estimate_is_said_once_after_the_first_steps(monkeypatch):
    clock, said = iter([0.0, 1.0, 6.0, 7.0]), []
    monkeypatch.setattr(outlook.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(outlook, "say", said.append)
    watch = Outlook(10_000)
    assert [watch.step(done) for done in (101, 102, 107, 108)] == [True, False, False, False]
    assert said == ["the remaining 9893 steps take about 2 h 45 min, without evaluations"]


def test_a_preset_for_gpus_is_announced_on_a_cpu(tmp_path):
    words = ["--config-name=train_idp_mlp_lowdim", "preset=paper", "task.dataset.zarr_path=/nowhere.zarr"]
    words.append(override("hydra.run.dir", tmp_path / "a (b)"))
    answer = in_fork("train.py", words)
    line, advised = answer.out.splitlines()[:2]
    assert answer.code == 2 and line == "preset=paper is made for a GPU; on this CPU use"
    assert shlex.split(advised)[2:] == [words[0], *words[2:], "preset=cpu"]
    answer = in_fork("train.py", [words[0], "preset=cpu", *words[2:]])
    assert answer.code == 2 and "GPU" not in answer.out


@pytest.mark.parametrize(
    "seconds, text",
    [(10, "1 min"), (600, "10 min"), (12_000, "3 h 20 min"), (90_000, "1 day 1 h"), (1e6, "11 days 13 h")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_answers_that_are_not_good_are_found():
    from benchmarks.mistakes import Answer

    mistake = Mistake(("x",), "clear")
    assert Answer(2, "", "error: clear").problem(mistake) is None
    assert Answer(1, "", "error: clear").problem(mistake) == "exit code 1"
    assert Answer(2, "", "error: clear\nmore").problem(mistake) == "not one line"
    assert Answer(2, "", "Traceback").problem(mistake) == "a traceback"
    assert Answer(2, "", "error: other").problem(mistake) == "no 'clear'"


def test_ctrl_c_inside_a_callback_is_not_lost(capfd, request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # processes of xdist ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    class Finalised:
        def __del__(self):
            raise KeyboardInterrupt  # Python prints and ignores what a finaliser raises

    with pytest.raises(SystemExit) as stop, reporting():
        Finalised()
        time.sleep(5)
    assert stop.value.code == 130
    assert capfd.readouterr().err == "stopped by Ctrl-C\n"
