"""LeRobot's own commands with IDP: training, continuing, evaluation, control of a robot, the asynchronous server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from concurrent import futures
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, SIZES
from lerobot.scripts import lerobot_eval, lerobot_rollout, lerobot_train

from diffusion_policy import load_policy
from diffusion_policy.dataset.conversion import to_lerobot
from diffusion_policy.dataset.conversion.common import keep_whole
from diffusion_policy.dataset.recordings import open_recordings

G1 = next((x for x in (ROOT / "data/g1_pick_bottle", ROOT.parent / "shared/data/g1_pick_bottle") if x.is_dir()), None)
SMALL = [f"--policy.{name}={json.dumps(list(x) if isinstance(x, tuple) else x)}" for name, x in SIZES.items()]
CPU = ["--policy.device=cpu", "--policy.push_to_hub=false", "--num_workers=0"]


def run(command, *arguments: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command of LeRobot, in this process: importing it takes half a minute."""
    monkeypatch.setattr(sys, "argv", [command.__name__, *map(str, arguments)])
    command.main()


def train(folder: Path, data: Path, *arguments: object, monkeypatch: pytest.MonkeyPatch) -> Path:
    run(
        lerobot_train, "--policy.type=idp", *SMALL, *CPU, "--dataset.repo_id=local/test", f"--dataset.root={data}",
        f"--output_dir={folder}", "--batch_size=16", "--seed=1", *arguments, monkeypatch=monkeypatch,
    )  # fmt: skip
    return folder / "checkpoints/last/pretrained_model"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_policy(folder, device="cpu").state_dict()


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_training_and_continuing(pusht, tmp_path, monkeypatch, optimizer):
    """A continued run ends with the weights of one that never stopped.

    Without the probe: the loader of a continued run draws a random number, so the probe's noise is another one.
    """
    extra = ["--policy.backbone=mlp", f"--policy.optimizer_type={optimizer}", "--policy.lambda_prox=0"]
    extra += ["--steps=8", "--save_freq=4"]
    whole = train(tmp_path / "run", pusht, *extra, monkeypatch=monkeypatch)
    expected = weights(whole)
    first = tmp_path / "run/checkpoints/000004/pretrained_model"
    assert any(not torch.equal(value, expected[key]) for key, value in weights(first).items())
    arguments = [f"--config_path={first}/train_config.json", "--resume=true", f"--output_dir={tmp_path / 'run'}"]
    (tmp_path / "run/checkpoints/last").unlink()
    run(lerobot_train, *arguments, monkeypatch=monkeypatch)
    for key, value in weights(whole).items():
        torch.testing.assert_close(value, expected[key], msg=lambda text, key=key: f"{key}: {text}")


def test_several_processes_compare_all_samples(pusht, tmp_path):
    """Two processes with 16 samples each: a sample has more neighbours than its own process has."""
    command = [
        Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node=2",
        Path(sys.executable).with_name("lerobot-train"), "--policy.type=idp", *SMALL, *CPU,
        "--dataset.repo_id=local/test", f"--dataset.root={pusht}", f"--output_dir={tmp_path / 'run'}",
        "--batch_size=16", "--steps=2", "--log_freq=1", "--policy.switches={\"tau\": 10.0}",
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [float(number) for number in re.findall(r"effective_neighbors:([\d.]+)", done.stderr + done.stdout)]
    assert found and min(found) > 24


@pytest.mark.parametrize("backbone", ["transformer", "unet", "mlp"])
def test_evaluation_on_gym_pusht(pusht, tmp_path, monkeypatch, backbone):
    checkpoint = train(tmp_path / "run", pusht, f"--policy.backbone={backbone}", "--steps=2", monkeypatch=monkeypatch)
    run(
        lerobot_eval, f"--policy.path={checkpoint}", "--policy.device=cpu", "--env.type=pusht",
        "--env.obs_type=environment_state_agent_pos", "--env.episode_length=12", "--eval.n_episodes=2",
        "--eval.batch_size=2", "--eval.use_async_envs=false", f"--output_dir={tmp_path / 'eval'}",
        monkeypatch=monkeypatch,
    )  # fmt: skip
    scores = json.loads((tmp_path / "eval/eval_info.json").read_text())
    assert 0 <= scores["overall"]["avg_max_reward"] <= 1 and scores["overall"]["n_episodes"] == 2


def test_corners_are_those_of_gym_pusht():
    import gym_pusht  # noqa: F401
    import gymnasium

    from examples.pusht_for_lerobot import block_corners

    env = gymnasium.make("gym_pusht/PushT-v0", obs_type="environment_state_agent_pos")
    env.action_space.seed(0)
    env.reset(seed=3)
    for _ in range(20):
        obs, _, _, _, info = env.step(env.action_space.sample())
        state = np.concatenate([info["pos_agent"], info["block_pose"]])[None]
        np.testing.assert_allclose(block_corners(state)[0], obs["environment_state"], atol=1e-9)


@pytest.mark.skipif(G1 is None, reason="needs the recordings of the G1 robot")
@pytest.mark.parametrize("images", [False, True])
def test_training_on_a_real_robot(tmp_path, monkeypatch, images):
    """A Unitree G1: 26 joints and a camera; the recordings are v2.1, of which inspect_data makes v3."""
    recordings = open_recordings(G1, skip_broken=True)
    if images:
        keep_whole(recordings)
        shorten(recordings)
    to_lerobot(recordings, tmp_path / "g1", images=images, quiet=True)
    camera = ["--policy.resize_shape=[48,64]", "--policy.crop_shape=[42,56]", "--policy.vision_width=16"] * images
    backend = ["--dataset.video_backend=pyav"] * images
    checkpoint = train(
        tmp_path / "run", tmp_path / "g1", "--steps=3", "--policy.backbone=unet", *camera, *backend,
        monkeypatch=monkeypatch,
    )  # fmt: skip
    policy = load_policy(checkpoint, device="cpu")
    assert policy.action_dim == 26 and len(policy.rgb_keys) == images
    obs = {key: torch.rand(1, 2, *shape) for key, shape in policy.obs_shapes().items()}
    assert policy.predict_action(obs)["action_pred"].shape == (1, 16, 26)


def shorten(recordings) -> None:
    """Keep the first episode."""
    for name in ("lengths", "episode_names", "task_of", "places"):
        setattr(recordings, name, getattr(recordings, name)[:1])


# ---------------------------------------------------------------------- robots
@pytest.fixture(scope="module")
def robot_policy(pusht, tmp_path_factory):
    """A policy for the simulated robot, whose whole state is one vector."""
    import pusht_robot  # noqa: F401  registers it

    from diffusion_policy.common.replay_buffer import ReplayBuffer

    folder = tmp_path_factory.mktemp("robot")
    buffer, recordings = ReplayBuffer.create_empty_numpy(), open_recordings(pusht)
    for index in range(len(recordings)):
        episode = recordings.episode(index)
        state = np.concatenate([episode["observation.state"], episode["observation.environment_state"]], axis=1)
        buffer.add_episode({"state": state, "action": episode["action"]})
    buffer.save_to_path(folder / "robot.zarr")
    to_lerobot(open_recordings(folder / "robot.zarr"), folder / "dataset", fps=10, quiet=True)
    with pytest.MonkeyPatch.context() as patch:
        return train(
            folder / "run", folder / "dataset", "--policy.backbone=mlp", "--steps=30", monkeypatch=patch
        )  # fmt: skip


def diary() -> tuple[int, np.ndarray]:
    """How often the robot was looked at, and the actions that it was sent."""
    from pusht_robot import SimulatedPushT

    actions = [value for kind, value in SimulatedPushT.diary if kind == "action"]
    return len(SimulatedPushT.diary) - len(actions), np.array(actions)


@pytest.mark.parametrize("inference", ["sync", "rtc"])
def test_control_of_a_robot(robot_policy, monkeypatch, inference):
    """lerobot-rollout, which took over from lerobot-record what runs a policy."""
    run(
        lerobot_rollout, "--strategy.type=base", f"--policy.path={robot_policy}", "--policy.device=cpu",
        "--robot.type=simulated_pusht", "--fps=20", "--duration=4", f"--inference.type={inference}",
        "--device=cpu", "--task=push", monkeypatch=monkeypatch,
    )  # fmt: skip
    _, actions = diary()
    assert len(actions) > 30 and np.isfinite(actions).all()
    assert len(np.unique(actions.round(3), axis=0)) > 5 and (np.abs(actions - 256) < 512).all()  # pixels


def test_recording_with_a_policy(robot_policy, tmp_path, monkeypatch):
    """lerobot-rollout writes the dataset that lerobot-record wrote with a policy."""
    run(
        lerobot_rollout, "--strategy.type=sentry", "--strategy.upload_every_n_episodes=1000",
        f"--policy.path={robot_policy}", "--policy.device=cpu", "--robot.type=simulated_pusht", "--fps=20",
        "--duration=3", "--device=cpu", "--dataset.repo_id=local/rollout_test", "--dataset.push_to_hub=false",
        f"--dataset.root={tmp_path / 'rollout'}", "--dataset.single_task=push", "--dataset.fps=20",
        monkeypatch=monkeypatch,
    )  # fmt: skip
    recorded = open_recordings(tmp_path / "rollout")
    assert sum(recorded.lengths) > 20
    _, actions = diary()
    steps = np.concatenate([recorded.episode(index)["action"] for index in range(len(recorded))])
    np.testing.assert_allclose(steps[:10], actions[:10], rtol=1e-5)


def test_the_asynchronous_server(robot_policy, tmp_path, monkeypatch):
    """LeRobot's server and robot client, over its own transport."""
    monkeypatch.chdir(tmp_path)  # both write logs/
    grpc = pytest.importorskip("grpc")
    from lerobot.async_inference.configs import PolicyServerConfig, RobotClientConfig
    from lerobot.async_inference.policy_server import PolicyServer
    from lerobot.async_inference.robot_client import RobotClient
    from lerobot.transport import services_pb2_grpc
    from lerobot_policy_idp import policy_server  # noqa: F401  adds the type to those that are served
    from pusht_robot import SimulatedPushTConfig

    served = PolicyServer(PolicyServerConfig(host="127.0.0.1", port=8080, fps=20, inference_latency=0.01))
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    port = server.add_insecure_port("127.0.0.1:0")
    services_pb2_grpc.add_AsyncInferenceServicer_to_server(served, server)
    server.start()
    client = RobotClient(
        RobotClientConfig(
            policy_type="idp",
            pretrained_name_or_path=str(robot_policy),
            robot=SimulatedPushTConfig(),
            actions_per_chunk=15,
            server_address=f"127.0.0.1:{port}",
            fps=20,
        )
    )
    try:
        assert client.start()
        receiver = threading.Thread(target=client.receive_actions, daemon=True)
        receiver.start()
        threading.Timer(5, client.stop).start()
        client.control_loop(task="push")
    finally:
        client.stop()
        served.stop()
        server.stop(0)
    _, actions = diary()
    assert len(actions) > 30 and np.isfinite(actions).all()
    # The first action is that of the policy for the first observation.
    from pusht_robot import SimulatedPushT

    policy = load_policy(robot_policy, device="cpu")
    first = torch.as_tensor(SimulatedPushT.diary[0][1], dtype=torch.float32).expand(1, 2, -1)
    np.testing.assert_allclose(actions[0], policy.predict_action({"obs": first})["action"][0, 0], rtol=1e-3)


def test_the_server_is_a_command(tmp_path):
    """LeRobot's, with its arguments."""
    command = [sys.executable, "-m", "lerobot_policy_idp.policy_server", "--host=127.0.0.1", "--port=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)  # it writes logs/
    assert done.returncode == 1 and "Port must be between 1 and 65535, got 0" in done.stderr
