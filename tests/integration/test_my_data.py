"""task=my_data: training on a recording, with sizes from the data, and evaluating it open loop."""

import json
import os
import shlex
import subprocess
import sys

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from benchmarks.recordings import CAMERA, write_lerobot_v2, write_npz
from diffusion_policy import load_policy
from diffusion_policy.common.config_util import build
from diffusion_policy.common.errors import ConfigError, DataError
from diffusion_policy.dataset.recordings import open_recordings
from diffusion_policy.scripts import eval as eval_script
from diffusion_policy.scripts import export
from diffusion_policy.scripts.train import with_cameras
from diffusion_policy.workspace.settings import check_task
from tests.util import ROOT, command, equal, load_config, train_here

LENGTHS = (30, 24, 27, 22, 25, 31)


@pytest.fixture(scope="module")
def lerobot(tmp_path_factory):
    return write_lerobot_v2(tmp_path_factory.mktemp("data") / "robot", LENGTHS)


def overrides(path, *more):
    return ["task=my_data", f"task.path={path}", "preset=debug", *more]


def write_pose_arm(folder, lengths=LENGTHS):
    """An arm whose state and action are a position and a quaternion, with a pause in every episode."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number, length in enumerate(lengths):
        pose = np.concatenate([rng.normal(size=(length + 1, 3)).cumsum(0), rng.normal(size=(length + 1, 4))], axis=1)
        pose[:, 3:] /= np.linalg.norm(pose[:, 3:], axis=1, keepdims=True)
        pose[5:11] = pose[5]
        np.savez(folder / f"take_{number}.npz", state=pose[:-1], action=pose[1:], extra=rng.normal(size=(length, 2)))
    return folder


# ---------------------------------------------------------------------- sizes from the data
def test_sizes_rate_and_names_come_from_the_data(lerobot, capsys):
    cfg = load_config("train_idp_mlp_lowdim", *overrides(lerobot))
    assert (cfg.task.obs_dim, cfg.task.action_dim, cfg.policy.obs_dim, cfg.policy.action_dim) == (4, 4, 4, 4)
    assert cfg.task.fps == 20 and list(cfg.task.action_names) == ["x", "y", "z", "grip"]
    assert list(cfg.task.dataset.obs_keys) == ["observation.state"] and cfg.task.dataset.action_key == "action"
    assert cfg.task.dataset.val_ratio == 0.1 and cfg.task.shape_meta is None
    said = capsys.readouterr().out
    assert "6 episodes, 159 steps at 20 Hz; observing observation.state, acting with action (4)" in said


def test_cameras_are_scaled_cropped_and_said(lerobot, capsys):
    for cameras in ("[front]", f"[{CAMERA}]"):
        cfg = load_config(
            "train_idp_mlp_image", *overrides(lerobot, f"task.cameras={cameras}", "task.image_size=[24,36]")
        )
        assert cfg.task.shape_meta.obs.front.shape == [3, 24, 36] and cfg.task.shape_meta.obs.state.shape == [4]
        assert cfg.task.crop_shape == [20, 32] and cfg.task.dataset.max_train_episodes == 8
    assert f"{CAMERA}: frames of 32 x 48 are scaled to 24 x 36 and cut to 20 x 32" in capsys.readouterr().out
    cfg = load_config("train_idp_mlp_image", *overrides(lerobot))  # all cameras
    assert list(cfg.task.cameras) == [CAMERA] and cfg.task.shape_meta.obs.front.shape == [3, 32, 48]


@pytest.mark.parametrize(
    "more, message",
    [
        (["task.obs_keys=[stat]"], "nearest: state; there are: action, observation.state"),
        (["task.action_key=torque"], "the recording has no 'torque'"),
        (["task.cameras=[back]"], "task.cameras: the recording has no 'back'"),
        (["task.cameras=front"], r"must be a list, such as \[front\]"),
        (["task.obs_keys=[]"], "at least one key"),
        (["task.drop_idle=2"], "must be a share"),
    ],
)
def test_mistakes_are_named(lerobot, more, message):
    with pytest.raises(ConfigError, match=message):
        build(load_config("train_idp_mlp_lowdim", *overrides(lerobot, *more)), "task.dataset")


def test_cameras_choose_the_image_variant_of_a_config():
    asked = ["task=my_data", "task.cameras=[front]"]
    assert with_cameras(asked, None) == [*asked, "modality=image"]
    name = "train_idp_mlp_lowdim"
    assert with_cameras([f"--config-name={name}", *asked], name) == ["--config-name=train_idp_mlp_image", *asked]
    assert with_cameras(["--config-name", name, *asked], name) == ["--config-name", "train_idp_mlp_image", *asked]
    for words in (["task.cameras=null"], ["task.cameras=[]"], [*asked, "modality=lowdim"], ["task=my_data"]):
        assert with_cameras(words, None) == words
    assert with_cameras([*asked, "-cn=train_dp3"], "train_dp3") == [*asked, "-cn=train_dp3"]


def test_cameras_in_a_config_for_vectors_are_an_error(lerobot):
    with pytest.raises(ConfigError, match="observation vectors"):
        check_task(load_config("train_idp_mlp_lowdim", *overrides(lerobot, "task.cameras=[front]")))


# ---------------------------------------------------------------------- the dataset
def test_batches_hold_the_recording(lerobot):
    cfg = load_config("train_idp_mlp_lowdim", *overrides(lerobot))
    dataset = build(cfg, "task.dataset")
    recordings = open_recordings(lerobot)
    episodes = [recordings.episode(i) for i in range(len(recordings))]
    assert dataset.val_mask.sum() == 1
    for key, name in (("obs", "observation.state"), ("action", "action")):
        expected = torch.from_numpy(np.concatenate([episode[name] for episode in episodes]))
        assert torch.equal(dataset.steps[key], expected)
    assert dataset.get_batch([0, 1])["obs"].shape == (2, 16, 4)


def test_frames_belong_to_their_steps_and_are_decoded_once(lerobot, tmp_path):
    cfg = load_config("train_idp_mlp_image", *overrides(lerobot, "task.drop_idle=0.1", f"task.cache_dir={tmp_path}"))
    dataset = build(cfg, "task.dataset")
    assert len(dataset.replay_buffer["action"]) < sum(LENGTHS) == len(dataset.frames)
    recordings = open_recordings(lerobot)
    images = np.concatenate([np.stack(list(recordings.frames(i, CAMERA))) for i in range(len(recordings))])
    states = np.concatenate([recordings.episode(i)["observation.state"] for i in range(len(recordings))])
    batch = dataset.get_batch([3, 40])
    for sample in range(2):
        for step in range(2):
            (row,) = np.flatnonzero((states == batch["obs"]["state"][sample, step].numpy()).all(1))
            assert np.array_equal(batch["obs"]["front"][sample, step].permute(1, 2, 0).numpy(), images[row])
    (file,) = tmp_path.glob("robot.frames-*.npy")
    before = file.stat().st_mtime_ns
    build(cfg, "task.dataset")
    assert file.stat().st_mtime_ns == before and len(list(tmp_path.iterdir())) == 1


def test_episodes_without_a_video_are_an_error_or_left_out(tmp_path, capsys):
    folder = write_lerobot_v2(tmp_path / "robot", (20, 20, 20))
    next((folder / "videos").rglob("episode_000001.mp4")).unlink()
    with pytest.raises(DataError, match=r"1 of 3 episodes have no images .*000001.*task.skip_broken=true"):
        build(load_config("train_idp_mlp_image", *overrides(folder)), "task.dataset")
    dataset = build(load_config("train_idp_mlp_image", *overrides(folder, "task.skip_broken=true")), "task.dataset")
    assert dataset.replay_buffer.n_episodes == 2 and "left out: 1 of 3" in capsys.readouterr().out
    assert build(load_config("train_idp_mlp_lowdim", *overrides(folder)), "task.dataset").replay_buffer.n_episodes == 3


def test_idle_steps_are_dropped(tmp_path, capsys):
    folder = write_pose_arm(tmp_path / "arm")
    keys = "task.obs_keys=[state]"
    whole = build(load_config("train_idp_mlp_lowdim", *overrides(folder, keys)), "task.dataset")
    thinned = build(
        load_config("train_idp_mlp_lowdim", *overrides(folder, keys, "task.drop_idle=0.001")), "task.dataset"
    )
    # States 5 to 10 are equal, and so are actions 4 to 9: steps 6 to 9 repeat step 5.
    kept = [step for step in range(LENGTHS[0]) if step not in (6, 7, 8, 9)]
    assert torch.equal(thinned.steps["obs"][: len(kept)], whole.steps["obs"][kept])
    assert f"dropped {4 * len(LENGTHS)} idle steps" in capsys.readouterr().out


# ---------------------------------------------------------------------- training
@pytest.mark.parametrize(
    "name",
    [
        "train_idp_transformer_lowdim",
        "train_flow_unet_lowdim",
        "train_mip_mlp_lowdim",
        "train_diffusion_unet_lowdim_workspace",
        "train_diffusion_transformer_lowdim_workspace",
    ],
)
def test_it_trains_with_every_kind_of_config(lerobot, tmp_path, name):
    workspace, _ = train_here(tmp_path, name, *overrides(lerobot, "training.num_epochs=1"))
    records = [json.loads(line) for line in (tmp_path / "logs.json.txt").read_text().splitlines()]
    assert records[-1]["val/variance_explained"] <= 1 and records[-1]["val/jerk_ratio"] > 0
    policy = load_policy(tmp_path)
    assert policy.predict_action({"obs": torch.zeros(1, policy.n_obs_steps, 4)})["action"].shape == (
        1,
        policy.n_action_steps,
        4,
    )
    assert workspace.cfg.checkpoint.topk.monitor_key == "val_variance_explained"
    assert list((tmp_path / "checkpoints").glob("epoch=0000-val_variance_explained=*.ckpt"))


@pytest.mark.parametrize("name", ["train_idp_unet_image", "train_diffusion_unet_image_workspace"])
def test_it_trains_from_images_and_evaluates_open_loop(lerobot, tmp_path, name):
    more = ["policy.obs_encoder.crop_shape=[24,36]"] if "workspace" in name else []
    train_here(tmp_path, name, *overrides(lerobot, "training.num_epochs=1", *more))
    policy = load_policy(tmp_path)
    obs = {"front": torch.zeros(1, 2, 3, 32, 48, dtype=torch.uint8), "state": torch.zeros(1, 2, 4)}
    if "workspace" in name:
        obs["front"] = obs["front"].float()
    assert policy.predict_action(obs)["action"].shape == (1, policy.n_action_steps, 4)
    if "workspace" not in name:
        eval_script.main(["--checkpoint", str(tmp_path), "--open-loop"])
        assert (tmp_path / "eval_latest_open_loop/eval_log.json").is_file()


@pytest.fixture(scope="module")
def relative_run(tmp_path_factory):
    """A run with rotations and relative actions."""
    folder = write_pose_arm(tmp_path_factory.mktemp("data") / "arm")
    output = tmp_path_factory.mktemp("run")
    poses = "{state:{start:3,from:quaternion},action:{start:3,from:quaternion}}"
    settings = overrides(folder, "task.obs_keys=[state,extra]", f"task.rotations={poses}", "task.relative_actions=true")
    workspace, _ = train_here(output, "train_idp_mlp_lowdim", *settings)
    return workspace, output


def test_rotations_and_relative_actions_are_inside_the_policy(relative_run, tmp_path):
    workspace, output = relative_run
    assert (workspace.cfg.task.obs_dim, workspace.cfg.task.action_dim) == (11, 9)
    dataset = build(workspace.cfg, "task.dataset")
    batch = dataset.get_batch(range(20))
    assert batch["obs"].shape[-1] == 9 and batch["action"].shape[-1] == 7
    seen = workspace.model.representation.encode_action(
        batch["action"], workspace.model._encode(batch["obs"])[1]
    )  # what the network learns
    normalised = dataset.get_normalizer()["action"].normalize(seen)
    assert normalised.min() >= -1.0001 and normalised.max() <= 1.0001
    action = load_policy(output).predict_action({"obs": batch["obs"]})["action"]
    assert action.shape == (20, 8, 7)
    torch.testing.assert_close(action[..., 3:].norm(dim=-1), torch.ones(20, 8))
    from diffusion_policy.scripts.convert_checkpoint import convert

    convert(output / "checkpoints/latest.ckpt", tmp_path / "weights")
    assert torch.equal(load_policy(tmp_path / "weights").predict_action({"obs": batch["obs"]})["action"], action)


def test_a_resumed_run_equals_one_that_was_never_stopped(lerobot, tmp_path):
    settings = overrides(lerobot, "task.relative_actions=true", "training.num_epochs=2")
    whole, _ = train_here(tmp_path / "whole", "train_idp_mlp_lowdim", *settings)
    cfg = load_config("train_idp_mlp_lowdim", *settings)
    from diffusion_policy.common.config_util import get_class
    from diffusion_policy.workspace.base_workspace import BaseWorkspace

    class Stopped(Exception):
        pass

    half = get_class(cfg._target_, BaseWorkspace)(cfg, output_dir=str(tmp_path / "half"))
    save = half.save_checkpoint

    def save_and_stop(path=None, **kwargs):
        save(path, **kwargs)
        if path is None:
            raise Stopped

    half.save_checkpoint = save_and_stop
    with pytest.raises(Stopped):
        half.run()
    again, _ = train_here(tmp_path / "half", "train_idp_mlp_lowdim", *settings)
    assert equal(again.model.state_dict(), whole.model.state_dict())


def test_a_policy_with_relative_actions_is_exported(lerobot, tmp_path, capsys):
    train_here(tmp_path / "run", "train_idp_mlp_lowdim", *overrides(lerobot, "task.relative_actions=true"))
    capsys.readouterr()
    export.main(["-c", str(tmp_path / "run")])
    said = capsys.readouterr().out
    assert "20 Hz" in said and "of the dataset" in said and "eval.py" not in said  # there is no simulator
    graph, policy = (load_policy(tmp_path / "run" / name) for name in ("latest.onnx", "checkpoints/latest.ckpt"))
    obs = {"obs": torch.randn(3, 2, 4)}
    torch.testing.assert_close(
        graph.predict_action(obs)["action"], policy.predict_action(obs)["action"], rtol=0, atol=1e-4
    )
    with pytest.raises(SystemExit):
        eval_script.main(["--checkpoint", str(tmp_path / "run/latest.onnx"), "--open-loop"])
    assert "needs the checkpoint" in capsys.readouterr().err


# ---------------------------------------------------------------------- open loop
def test_open_loop_report_of_a_policy_with_rotations(relative_run, capsys):
    workspace, output = relative_run
    eval_script.main(["--checkpoint", str(output), "--open-loop"])
    log = json.loads((output / "eval_latest_open_loop/eval_log.json").read_text())
    found = log["open_loop"]
    assert len(found["rmse"]) == 7 and len(found["by_chunk_step"]["rmse"]) == 8
    assert log["latency_ms"]["p50"] > 0 and log["nfe"] == 1 and log["evaluated_on"] == log["dataset"]
    assert found["steps"] == workspace.val_stream.source.dataset.replay_buffer.episode_lengths[found["episodes"]].sum()
    said = capsys.readouterr().out
    assert "mean variance explained" in said and "1 held-out episodes" in said
    assert {os.path.basename(path) for path in log["figures"]} == {f"episode_{found['episodes'][0]}.png", "errors.png"}
    assert all(os.path.isfile(path) for path in log["figures"])


def test_open_loop_of_a_task_with_a_simulator(tmp_path, capsys):
    train_here(tmp_path, "train_idp_mlp_lowdim", "preset=debug", "task.dataset.val_ratio=0.02", "task.env_runner=null")
    eval_script.main(["--checkpoint", str(tmp_path), "--open-loop", "--n_episodes", "2"])
    log = json.loads((tmp_path / "eval_latest_open_loop_n2/eval_log.json").read_text())
    assert len(log["open_loop"]["episodes"]) == 2 and len(log["open_loop"]["rmse"]) == 2


def test_open_loop_needs_held_out_episodes(tmp_path, capsys):
    train_here(tmp_path, "train_idp_mlp_lowdim", "preset=debug", "training.num_epochs=0", "task.env_runner=null")
    with pytest.raises(SystemExit):
        eval_script.main(["--checkpoint", str(tmp_path), "--open-loop"])
    assert "held out no episodes" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        eval_script.main(["--checkpoint", str(tmp_path)])
    assert "--open-loop" in capsys.readouterr().err


# ---------------------------------------------------------------------- commands
def test_two_commands_from_a_folder_to_a_training_run(lerobot, tmp_path):
    """The command that inspect_data prints trains on the data as they are."""
    inspect = command("diffusion_policy.scripts.inspect_data", lerobot, cwd=tmp_path)
    assert inspect.returncode == 0, inspect.stderr
    printed = [line.strip() for line in inspect.stdout.splitlines() if line.strip().startswith("python train.py")]
    assert len(printed) == 2 and "task.cameras" in printed[1]
    words = [word for word in shlex.split(printed[1])[2:] if not word.startswith("preset=")]
    small = ["preset=debug", f"hydra.run.dir={tmp_path / 'run'}", f"task.cache_dir={tmp_path}"]
    done = command("train.py", *words, *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "val/variance_explained" in done.stdout
    cfg = OmegaConf.load(tmp_path / "run/config.yaml")
    assert cfg.task.action_dim == 4 and cfg.policy.shape_meta.obs.front.shape == [3, 32, 48]
    assert load_policy(tmp_path / "run").obs_dim is None


def test_a_clone_trains_without_a_file_written_by_hand(lerobot, tmp_path):
    """Two commands behind `git clone`: `make setup`, which installs the readers, and train.py."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a checkout")
    installed = {line.split("==")[0] for line in (ROOT / "requirements.txt").read_text().splitlines()}
    assert {"pyarrow", "av"} <= installed
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", clone], check=True)
    environment = {**os.environ, "PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1"}
    train = [sys.executable, "train.py", "--config-name=train_idp_mlp_lowdim", "task=my_data", f"task.path={lerobot}"]
    done = subprocess.run([*train, "preset=debug"], cwd=clone, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "next            python eval.py" in done.stdout, done.stderr
    (run,) = (clone / "data/outputs").glob("*/*")
    assert load_policy(run).action_dim == 4
    status = subprocess.run(["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True, check=True)
    assert status.stdout == ""


def test_other_formats_and_a_missing_path(tmp_path):
    cfg = load_config("train_idp_mlp_lowdim", *overrides(write_npz(tmp_path / "takes", (30, 30))))
    assert cfg.task.obs_dim == 4 and cfg.task.fps == 20
    done = command("train.py", "task=my_data", "preset=debug", cwd=tmp_path)
    assert done.returncode == 2 and "task.path" in done.stderr and len(done.stderr.splitlines()) == 1
