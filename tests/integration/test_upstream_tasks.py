"""Upstream's further tasks: kitchen, block pushing and a real robot, on small files in their formats."""

import os
import struct

import hydra
import numpy as np
import pytest
import torch

from diffusion_policy.common.errors import ConfigError, DataError, DataNotFoundError
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.dataset.blockpush_lowdim_dataset import BlockPushLowdimDataset
from diffusion_policy.dataset.kitchen_lowdim_dataset import KitchenLowdimDataset
from diffusion_policy.dataset.kitchen_mjl_lowdim_dataset import NOISE, KitchenMjlLowdimDataset
from diffusion_policy.dataset.real_pusht_image_dataset import RealPushTImageDataset
from diffusion_policy.env_runner.blockpush_lowdim_runner import BlockPushLowdimRunner
from diffusion_policy.real_world.real_env import RealEnv
from diffusion_policy.real_world.video_recorder import VideoRecorder
from tests.util import load_config, train_here

LENGTHS = (20, 30)
META = {
    "obs": {
        "camera_1": {"shape": [3, 24, 32], "type": "rgb"},
        "camera_3": {"shape": [3, 24, 32], "type": "rgb"},
        "robot_eef_pose": {"shape": [2], "type": "low_dim"},
    },
    "action": {"shape": [2]},
}


def write_kitchen(folder):
    rng = np.random.default_rng(0)
    folder.mkdir()
    mask = np.zeros((2, 40))
    for i, length in enumerate(LENGTHS):
        mask[i, :length] = 1
    np.save(folder / "observations_seq.npy", rng.random((2, 40, 60)))
    np.save(folder / "actions_seq.npy", rng.random((2, 40, 9)))
    np.save(folder / "existence_mask.npy", mask)
    start = [0.15, -1.77, 1.84, -2.48, 0.26, 0.71, 1.6, 0.04, 0.04, *np.zeros(14), -0.27, 0.35, 1.62, 1, 0, 0, 0]
    start[22] = -0.75  # the microwave is open
    np.save(folder / "all_init_qpos.npy", np.tile(start, (2, 1)))
    np.save(folder / "all_init_qvel.npy", np.zeros((2, 29)))
    return folder


def write_log(path, steps, seed=0):
    """A log with 40 records per step and one mocap body: qpos 30, qvel 29, ctrl 9."""
    sizes = nq, nv, nu, nmocap, nsensor, nuser, _ = (30, 29, 9, 1, 2, 3, 5)
    records = np.random.default_rng(seed).random((40 * steps - 7, 1 + nq + nv + nu + 7 * nmocap + nsensor + nuser))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<7i", *sizes) + b"robot" + records.astype("<f4").tobytes())
    return records[::40].astype(np.float32)


def write_blockpush(path):
    buffer = ReplayBuffer.create_empty_numpy()
    rng = np.random.default_rng(0)
    for length in LENGTHS:
        obs = rng.random((length, 16)) * np.arange(1, 17)
        buffer.add_episode({"obs": obs.astype(np.float32), "action": rng.random((length, 2)).astype(np.float32)})
    buffer.save_to_path(str(path))
    return path


def write_recording(folder):
    """Two episodes at 10 Hz, filmed at 30 Hz: the shade of a frame is its number."""
    buffer = ReplayBuffer.create_empty_numpy()
    rng = np.random.default_rng(0)
    for episode, length in enumerate(LENGTHS):
        buffer.add_episode(
            {
                "action": rng.random((length, 6)),
                "robot_eef_pose": rng.random((length, 6)),
                "timestamp": 1e9 + 100 * episode + np.arange(length) / 10,
            }
        )
        for camera in (0, 1, 3):
            video = folder / "videos" / str(episode) / f"{camera}.mp4"
            video.parent.mkdir(parents=True, exist_ok=True)
            recorder = VideoRecorder.create_h264(fps=30, crf=1)
            recorder.start(video)
            for number in range(3 * length):
                shade = min(5 * number + 40 + camera, 255)
                recorder.write_frame(np.full((48, 96, 3), shade, np.uint8))
            recorder.stop()
    buffer.save_to_path(str(folder / "replay_buffer.zarr"))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_kitchen(folder / "kitchen")
    for i in range(2):
        write_log(folder / f"kitchen/kitchen_demos_multitask/task{i}/demo.mjl", LENGTHS[i], seed=i)
    write_blockpush(folder / "blockpush.zarr")
    write_recording(folder / "real")
    return folder


# ---------------------------------------------------------------------- datasets
def test_kitchen_arrays(data):
    dataset = KitchenLowdimDataset(data / "kitchen", horizon=8, pad_before=1, pad_after=3)
    assert dataset.replay_buffer.episode_lengths.tolist() == list(LENGTHS)
    assert len(dataset) == sum(length - 8 + 1 + 1 + 3 for length in LENGTHS)
    observations = np.load(data / "kitchen/observations_seq.npy")
    assert dataset[1]["obs"].shape == (8, 60) and dataset[1]["action"].shape == (8, 9)
    np.testing.assert_allclose(dataset[1]["obs"], observations[0, :8], rtol=1e-6)
    # A column that moves by less than 0.05 is not scaled, as in upstream.
    dataset.steps["obs"][:, 0] = torch.linspace(0, 0.04, sum(LENGTHS))
    assert dataset.get_normalizer()["obs"].params_dict["scale"][0] == 1


def test_kitchen_logs(data, tmp_path):
    records = write_log(tmp_path / "task/demo.mjl", steps=12)
    dataset = KitchenMjlLowdimDataset(tmp_path, horizon=4)
    assert dataset.replay_buffer.n_steps == len(records) == 12
    obs, action = dataset.replay_buffer["obs"], dataset.replay_buffer["action"]
    np.testing.assert_array_equal(obs[:, :30], records[:, 1:31])
    assert not obs[:, 30:].any()
    np.testing.assert_array_equal(action, records[:, 60:69])
    noisy = KitchenMjlLowdimDataset(tmp_path, horizon=4, robot_noise_ratio=0.5).replay_buffer["obs"]
    difference = np.abs(noisy - obs)[:, :30]
    assert NOISE.shape == (30,) and (difference <= 0.5 * NOISE + 1e-6).all() and difference[:, 0].max() > 0.01
    with pytest.raises(ConfigError, match="abs_action must be true"):
        KitchenMjlLowdimDataset(tmp_path, abs_action=False)
    file = tmp_path / "task/demo.mjl"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(DataError, match="damaged"):
        KitchenMjlLowdimDataset(tmp_path)
    file.write_bytes(b"not a log")
    with pytest.raises(DataError, match="not a log"):
        KitchenMjlLowdimDataset(tmp_path)


def test_block_pushing(data):
    dataset = BlockPushLowdimDataset(data / "blockpush.zarr", horizon=4)
    stored = dataset.replay_buffer["obs"]
    np.testing.assert_array_equal(dataset[0]["obs"], stored[:4])
    hidden = BlockPushLowdimDataset(data / "blockpush.zarr", horizon=4, obs_eef_target=False)[0]["obs"]
    assert not hidden[:, 8:10].any() and np.array_equal(hidden[:, 10:], stored[:4, 10:])
    manual = BlockPushLowdimDataset(data / "blockpush.zarr", use_manual_normalizer=True).get_normalizer()
    scaled = manual["obs"].normalize(torch.from_numpy(stored)).detach()
    for columns in ([0, 3, 6, 8, 10, 13], [1, 4, 7, 9, 11, 14], [2, 5, 12, 15]):
        assert scaled[:, columns].min() == pytest.approx(-1, abs=1e-5)
        assert scaled[:, columns].max() == pytest.approx(1, abs=1e-5)


def test_a_recording_of_a_robot(data):
    options = dict(shape_meta=META, dataset_path=data / "real", horizon=4, n_obs_steps=2)
    dataset = RealPushTImageDataset(**options)
    sample = dataset[1]
    assert {key: tuple(value.shape) for key, value in sample["obs"].items()} == {
        "camera_1": (2, 3, 24, 32),
        "camera_3": (2, 3, 24, 32),
        "robot_eef_pose": (2, 2),
    }
    # Steps 1 and 2 of the first episode are frames 3 and 6 of its videos, with shades 5 * frame + 40 + camera.
    for camera, shades in ((1, (56, 71)), (3, (58, 73))):
        means = 255 * sample["obs"][f"camera_{camera}"].mean(dim=(1, 2, 3))
        assert means.tolist() == pytest.approx(shades, abs=2.4)  # compression; another frame differs by 5
    action = dataset.replay_buffer["action"][:, :2].astype(np.float32)
    np.testing.assert_array_equal(sample["action"], action[1:5])
    # Actions of two steps later; differences that do not cross the end of an episode.
    late = RealPushTImageDataset(**options, n_latency_steps=2)[1]
    np.testing.assert_array_equal(late["action"], action[3:7])
    assert torch.equal(late["obs"]["camera_1"], sample["obs"]["camera_1"])
    delta = RealPushTImageDataset(**options, delta_action=True).get_all_actions().numpy()
    assert not delta[[0, LENGTHS[0]]].any()
    np.testing.assert_allclose(delta[LENGTHS[0] + 1], action[LENGTHS[0] + 1] - action[LENGTHS[0]], atol=1e-6)


def test_missing_and_short_videos_are_named(data, tmp_path):
    write_recording(tmp_path / "real")
    first = tmp_path / "real/videos/0/1.mp4"
    (tmp_path / "real/videos/1/3.mp4").unlink()
    with pytest.raises(DataNotFoundError, match=r"videos/1/3.mp4 \(1 of"):
        RealPushTImageDataset(META, tmp_path / "real")
    os.replace(first, tmp_path / "real/videos/1/3.mp4")  # 20 steps instead of 30
    os.link(tmp_path / "real/videos/0/3.mp4", first)
    with pytest.raises(DataError, match="shorter than its episode of 30 steps"):
        RealPushTImageDataset(META, tmp_path / "real")
    first.write_bytes(b"no video")
    with pytest.raises(DataError, match="0/1.mp4 cannot be read as a video"):
        RealPushTImageDataset(META, tmp_path / "real")


@pytest.mark.parametrize(
    "build",
    [
        lambda path: KitchenLowdimDataset(path),
        lambda path: KitchenMjlLowdimDataset(path),
        lambda path: BlockPushLowdimDataset(path),
        lambda path: RealPushTImageDataset(META, path),
    ],
)
def test_missing_data_is_one_line(build, tmp_path):
    with pytest.raises(DataNotFoundError, match="There (is|are) no") as error:
        build(tmp_path / "nowhere")
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------------- training
@pytest.mark.parametrize("target", [None, "IDPPolicy"])
@pytest.mark.parametrize(
    "config, overrides",
    [
        ("transformer_lowdim", ["task.dataset.zarr_path={data}/blockpush.zarr"]),
        ("unet_lowdim", ["task=blockpush_lowdim_seed_abs", "task.dataset.zarr_path={data}/blockpush.zarr"]),
        ("transformer_lowdim_kitchen", ["task.dataset_dir={data}/kitchen"]),
        ("unet_lowdim", ["task=kitchen_lowdim", "task.dataset_dir={data}/kitchen"]),
    ],
)
def test_trains_without_a_simulator(config, overrides, target, data, tmp_path):
    workspace, summary = train_here(
        tmp_path / "run",
        f"train_diffusion_{config}_workspace",
        *(override.format(data=data) for override in overrides),
        "preset=debug",
        "task.env_runner=null",
        *([f"policy._target_=idp_workspace.policy.{target}"] if target else []),
    )
    assert summary["steps"] == 8 and (target is None or type(workspace.model).__name__ == target)


@pytest.mark.parametrize("config", ["unet_real_hybrid", "transformer_real_hybrid", "unet_real_image"])
def test_a_real_robot_s_configs_train_and_keep_the_lowest_loss(config, data, tmp_path):
    crop = "policy.crop_shape=[20,28]" if "hybrid" in config else "policy.obs_encoder.crop_shape=[20,28]"
    _, summary = train_here(
        tmp_path / "run",
        f"train_diffusion_{config}_workspace",
        "preset=debug",
        f"task.dataset_path={data}/real",
        "task.image_shape=[3,24,32]",
        crop,
        *(["policy.obs_encoder.resize_shape=[24,32]"] if "image" in config else []),
        "policy._target_=idp_workspace.policy.IDPPolicy",
        "training.steps_per_epoch=1",
    )
    assert summary["steps"] == 2 and summary["score"] is None
    assert list((tmp_path / "run/checkpoints").glob("epoch=*-train_loss=*.ckpt"))


# ---------------------------------------------------------------------- simulators
def test_what_cannot_run_here_says_so_in_one_line(tmp_path):
    section = load_config("train_diffusion_transformer_lowdim_workspace").task.env_runner
    with pytest.raises(hydra.errors.InstantiationException) as error:
        hydra.utils.instantiate(section, output_dir=str(tmp_path))
    assert isinstance(error.value.__cause__, ConfigError) and "task.env_runner=null" in str(error.value.__cause__)
    for build in (lambda: BlockPushLowdimRunner(str(tmp_path), n_test=1), lambda: RealEnv(output_dir=".", robot_ip="")):
        with pytest.raises(ConfigError) as problem:
            build()
        assert "\n" not in str(problem.value)


def test_the_kitchen_without_its_simulator_is_one_line(monkeypatch, tmp_path):
    from diffusion_policy.env.kitchen import kitchen_lowdim_env
    from diffusion_policy.env_runner.kitchen_lowdim_runner import KitchenLowdimRunner

    monkeypatch.setattr(kitchen_lowdim_env, "PACKAGE", "no-such-package")
    with pytest.raises(ConfigError, match=r"pip install -e .\[kitchen\]; or train without a simulator"):
        KitchenLowdimRunner(str(tmp_path), tmp_path)


class Still:
    """A policy that keeps the joints where they are."""

    device = torch.device("cpu")

    def __init__(self, abs_action):
        self.abs_action = abs_action

    def reset(self):
        pass

    def predict_action(self, obs):
        assert obs["obs"].shape[1:] == (4, 60) and obs["obs"].dtype == torch.float32
        still = obs["obs"][:, -1:, :9] if self.abs_action else torch.zeros(len(obs["obs"]), 1, 9)
        return {"action": still.repeat(1, 8, 1)}


def test_kitchen_episodes(data, tmp_path):
    pytest.importorskip("gymnasium_robotics")
    for task, abs_action in (("kitchen_lowdim_abs", True), ("kitchen_lowdim", False)):
        cfg = load_config(
            "train_diffusion_transformer_lowdim_kitchen_workspace", f"task={task}", f"task.dataset_dir={data}/kitchen"
        )
        sizes = dict(n_train=1, n_train_vis=0, n_test=1, n_test_vis=0, max_steps=16, n_envs=1, vector="sync")
        runner = hydra.utils.instantiate(cfg.task.env_runner, output_dir=str(tmp_path), **sizes)
        log = runner.run(Still(abs_action))
        # The train episode starts with an open microwave, one of seven tasks; the test episode with nothing done.
        assert log["train/mean_score"] == pytest.approx(1 / 7) and log["test/mean_score"] == 0
        assert [log[f"train/p_{n}"] for n in (1, 2, 7)] == [1, 0, 0] and log["test/p_1"] == 0
        assert [episode["steps"] for episode in runner.episodes] == [16, 16]
        runner.close()


def test_the_kitchen_s_observation_is_the_recorded_one():
    pytest.importorskip("gymnasium_robotics")
    from diffusion_policy.env.kitchen.kitchen_lowdim_env import KitchenLowdimEnv

    env = KitchenLowdimEnv(abs_action=True, robot_noise_ratio=0.0)
    obs, _ = env.reset(seed=0)
    np.testing.assert_allclose(obs[:30], env.robot.data.qpos, atol=1e-6)  # qpos of MuJoCo, as a log records it
    assert not obs[30:].any()
    target = obs[:9].astype(np.float64)
    target[0] += 0.3
    for _ in range(40):
        obs, *_ = env.step(target)
    assert abs(obs[0] - target[0]) < 0.01  # an absolute action is a position of the joints
    with pytest.raises(ConfigError, match="9 numbers"):
        env.step(np.zeros(7))
    env.close()
