"""Pick Peach from the command that makes demonstrations to the evaluation of a policy, with and without images."""

import importlib.util
import json
import subprocess
import sys

import h5py
import numpy as np
import pytest

if importlib.util.find_spec("mujoco") is None:
    pytest.skip("mujoco is not installed", allow_module_level=True)

from diffusion_policy import load_policy
from diffusion_policy.env.pick_peach.pick_peach_env import FAILURES, PickPeachEnv
from diffusion_policy.scripts import generate_demos
from tests.util import ROOT, load_config

SIZE = 32


def renders():
    code = "from diffusion_policy.env.pick_peach.pick_peach_env import PickPeachEnv as E; E(('front',)).reset(seed=0)"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=120).returncode == 0


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Two demonstrations with images."""
    if not renders():
        pytest.skip("this machine cannot render")
    path = tmp_path_factory.mktemp("demos") / "images"
    generate_demos.main(["pick_peach", "--episodes", "2", "--images", "--image_size", str(SIZE), "-o", str(path)])
    return path


def command(*arguments):
    """A script in a process of its own: Mesa's threads, which draw here, do not survive the fork of `util.command`."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


def test_without_demonstrations_the_command_that_makes_them_is_told(tmp_path):
    for task, words in (("qpos", "--episodes 100 -o"), ("image", "--episodes 100 --images -o")):
        modality = {"qpos": "lowdim", "image": "image"}[task]
        done = command(
            "train.py", f"modality={modality}", f"task=pick_peach_{task}", f"task.path={tmp_path / 'none'}",
            "preset=debug", f"hydra.run.dir={tmp_path / 'run'}",
        )  # fmt: skip
        assert done.returncode == 2 and f"generate_demos pick_peach {words} {tmp_path / 'none'}" in done.stderr


def test_images_show_the_peach_and_the_episode_has_them(images):
    with h5py.File(images / "episode_0.hdf5") as file:
        frames = {camera: file[f"observations/images/{camera}"][:] for camera in ("front", "head")}
        assert len(frames["front"]) == len(file["action"])
        qpos = file["observations/qpos"][0]
    env = PickPeachEnv(("front", "head"), SIZE)
    obs, _ = env.reset(seed=0)
    assert np.array_equal(obs["qpos"], qpos)  # what is stored is what a policy sees
    for camera, stored in frames.items():
        assert stored.shape[1:] == (SIZE, SIZE, 3) and stored.dtype == np.uint8
        assert np.array_equal(obs[camera], stored[0]) and stored[0].std() > 10
        assert not np.array_equal(stored[0], stored[-1])
        red, green = stored[0][..., 0].astype(int), stored[0][..., 1]
        peach = np.argwhere(red - green > 80)  # (row, column)
        left = peach[:, 1].mean() < SIZE / 2
        assert len(peach) > 2 and left == (camera == "head")  # the front camera looks at the robot
    env.observing = False  # images that nobody sees are not drawn
    assert env.step(np.zeros(7))[0]["front"] is obs["front"]


@pytest.mark.parametrize("task", ["qpos", "image"])
def test_from_demonstrations_to_an_evaluation(task, images, tmp_path):
    modality, extra = (
        ("lowdim", []) if task == "qpos" else ("image", [f"task.image_size={SIZE}", "task.crop_shape=[28,28]"])
    )
    run = tmp_path / "run"
    done = command(
        "train.py", f"modality={modality}", "backbone=mlp", f"task=pick_peach_{task}", f"task.path={images}",
        "preset=debug", f"hydra.run.dir={run}", "training.num_epochs=1", "training.steps_per_epoch=2",
        "task.env_runner.n_test_vis=0", *extra,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    done = command(
        "eval.py", "--checkpoint", run, "--n_episodes", "2", "--latency", "measured", "-o", tmp_path / "eval"
    )
    assert done.returncode == 0 and "\nfailure    " in done.stdout, done.stdout + done.stderr
    log = json.loads((tmp_path / "eval/eval_log.json").read_text())
    assert sum(log[f"test/failure/{name}"] for name in FAILURES) == 1 and log["n_latency_steps"] >= 0
    assert {episode["start"] for episode in log["episodes"]} == {"left", "right"}
    assert load_policy(run).n_action_steps == 16


def test_every_backbone_and_preset_composes():
    for backbone in ("mlp", "transformer", "unet"):
        for preset in ("paper", "cpu", "debug"):
            cfg = load_config(f"train_idp_{backbone}_lowdim", "task=pick_peach_qpos", f"preset={preset}")
            assert cfg.horizon == cfg.policy.horizon == cfg.task.horizon > cfg.n_action_steps
    assert load_config("train_idp_unet_lowdim", "task=lift_mh_lowdim").horizon == 16  # as before
