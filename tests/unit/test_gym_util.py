import types

import dill
import gymnasium as gym
import imageio.v3 as iio
import numpy as np
import pytest
from gymnasium import spaces

from diffusion_policy.env.pusht.pusht_image_env import PushTImageEnv
from diffusion_policy.gym_util.multistep_wrapper import (
    MultiStepWrapper,
    aggregate,
    dict_take_last_n,
    repeated_space,
    stack_last_n_obs,
)
from diffusion_policy.gym_util.rollout_video import RolloutVideo, write_grid
from diffusion_policy.gym_util.video_recording_wrapper import VideoRecorder, VideoRecordingWrapper
from tests import golden


class CountingEnv(gym.Env):
    """obs = (t, last action), reward = sin(t), info t; over at t = done_at."""

    observation_space = spaces.Box(-np.inf, np.inf, shape=(2,), dtype=np.float32)
    action_space = spaces.Box(-np.inf, np.inf, shape=(1,), dtype=np.float32)
    render_mode = "rgb_array"

    def __init__(self, done_at=10**9):
        self.done_at = done_at

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(2, dtype=np.float32), {}

    def step(self, action):
        self.t += 1
        obs = np.array([self.t, action[0]], dtype=np.float32)
        return obs, float(np.sin(self.t)), self.t >= self.done_at, False, {"t": self.t}

    def render(self):
        return np.full((32, 48, 3), (self.t * 20) % 256, dtype=np.uint8)


def test_traces_equal_upstream():
    cases = golden.read("multistep_wrapper")["cases"]
    assert cases
    for case in cases:
        base = CountingEnv(case["env_done_at_t"])
        env = MultiStepWrapper(
            base,
            **{key: case[key] for key in ("n_obs_steps", "n_action_steps", "max_episode_steps", "reward_agg_method")},
        )
        first, *rest = case["trace"]
        np.testing.assert_array_equal(env.reset()[0], first["reset_obs"])
        for expected in rest:
            obs, reward, terminated, truncated, info = env.step(np.array(expected["action"], np.float32))
            np.testing.assert_array_equal(obs, np.array(expected["obs"], np.float32))
            assert reward == pytest.approx(expected["reward"], abs=1e-12)
            assert (terminated or truncated) == expected["done"]
            assert info["t"].tolist() == expected["info_t"]
            assert base.t == expected["env_t"] and len(env.get_rewards()) == expected["n_rewards"]


def test_reward_is_the_running_maximum_and_the_end_latches():
    base = CountingEnv(done_at=5)
    env = MultiStepWrapper(base, n_obs_steps=2, n_action_steps=3)
    env.reset()
    best = max(np.sin(np.arange(1, 4)))
    assert env.step(np.zeros((3, 1)))[1] == pytest.approx(best)
    _, reward, terminated, truncated, _ = env.step(np.zeros((3, 1)))
    assert base.t == 5 and terminated and not truncated
    assert reward == pytest.approx(best), "later, smaller rewards must not replace the best one"
    after = env.step(np.ones((3, 1)))
    assert base.t == 5 and after[2] and after[1] == pytest.approx(best)
    env.reset()
    assert env.get_rewards() == [] and not env.step(np.zeros((1, 1)))[2]


def test_running_out_of_steps_is_truncation():
    env = MultiStepWrapper(CountingEnv(), n_obs_steps=1, n_action_steps=4, max_episode_steps=6)
    env.reset()
    assert env.step(np.zeros((4, 1)))[2:4] == (False, False)
    assert env.step(np.zeros((4, 1)))[2:4] == (False, True)
    assert env.unwrapped.t == 6


def test_dict_observations_and_spaces():
    env = MultiStepWrapper(PushTImageEnv(), n_obs_steps=3, n_action_steps=2)
    obs, _ = env.reset(seed=0)
    assert env.observation_space.contains(obs) and obs["image"].shape == (3, 3, 96, 96)
    obs, *_ = env.step(np.full((2, 2), 200.0))
    assert obs["agent_pos"].shape == (3, 2) and len(np.unique(obs["agent_pos"][:, 0])) == 3
    assert env.action_space.shape == (2, 2)


def test_extras():
    env = MultiStepWrapper(CountingEnv(), n_obs_steps=2, n_action_steps=2)
    env.reset()
    env.step(np.zeros((2, 1)))
    assert env.get_attr("t") == 2 and env.get_attr("reward") == env.get_rewards()
    assert env.run_dill_function(dill.dumps(lambda e: e.n_obs_steps + 40)) == 42
    assert env.get_infos() == {"t": [1, 2]}


def test_helpers():
    np.testing.assert_array_equal(stack_last_n_obs([np.array([1]), np.array([2])], 3), [[1], [1], [2]])
    np.testing.assert_array_equal(stack_last_n_obs([np.array([i]) for i in range(5)], 2), [[3], [4]])
    assert [aggregate([1, 2, 6], m) for m in ("max", "min", "mean", "sum")] == [6, 1, 3, 9]
    with pytest.raises(ValueError, match="median"):
        aggregate([1], "median")
    assert dict_take_last_n({"a": [1, 2, 3]}, 2)["a"].tolist() == [2, 3]
    assert repeated_space(CountingEnv.observation_space, 4).shape == (4, 2)
    with pytest.raises(TypeError, match="Discrete"):
        repeated_space(spaces.Discrete(3), 2)


def test_recorded_video_is_readable_and_complete(tmp_path):
    path = tmp_path / "episode.mp4"
    env = VideoRecordingWrapper(CountingEnv(), VideoRecorder.create_h264(fps=10, crf=10), file_path=str(path))
    env.reset()
    for _ in range(12):
        env.step(np.zeros(1))
    assert env.render() == str(path)
    frames = iio.imread(path)
    assert frames.shape == (12, 32, 48, 3)
    np.testing.assert_allclose(frames.mean(axis=(1, 2, 3)), np.arange(1, 13) * 20, atol=3)
    assert iio.immeta(path)["fps"] == 10 and "h264" in iio.immeta(path)["codec"]


def test_second_episode_has_its_own_file_and_none_records_nothing(tmp_path):
    env = VideoRecordingWrapper(
        CountingEnv(), VideoRecorder.create_h264(fps=10), file_path=str(tmp_path / "a.mp4"), steps_per_render=2
    )
    for name in ("a.mp4", "b.mp4", None):
        env.file_path = None if name is None else str(tmp_path / name)
        env.reset()
        for _ in range(6):
            env.step(np.zeros(1))
    env.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.mp4", "b.mp4"]
    assert all(len(iio.imread(p)) == 3 for p in tmp_path.iterdir())


def test_recorder_keeps_to_the_clock_and_checks_frames(tmp_path):
    recorder = VideoRecorder.create_h264(fps=10, input_pix_fmt="bgr24")
    frame = np.zeros((33, 47, 3), dtype=np.uint8)
    with pytest.raises(RuntimeError, match="start"):
        recorder.write_frame(frame)
    recorder.start(tmp_path / "clock.mp4", start_time=5.0)
    for time in (5.0, 5.1, 5.12, 5.5):  # 5.12 is early and dropped, 5.5 fills the gap
        recorder.write_frame(frame, frame_time=time)
    with pytest.raises(ValueError, match="shape"):
        recorder.write_frame(frame[1:], frame_time=5.6)
    recorder.stop()
    assert not recorder.is_ready()
    assert len(iio.imread(tmp_path / "clock.mp4")) == 6


def test_upstream_import_paths():
    from diffusion_policy.gym_util.async_vector_env import AsyncVectorEnv
    from diffusion_policy.gym_util.sync_vector_env import SyncVectorEnv

    assert AsyncVectorEnv is gym.vector.AsyncVectorEnv and SyncVectorEnv is gym.vector.SyncVectorEnv


def test_a_rollout_video_is_large_and_has_a_caption(tmp_path):
    env = RolloutVideo(CountingEnv(), VideoRecorder.create_h264(fps=10))
    env.file_path = str(tmp_path / "a.mp4")
    env.reset(seed=7)
    for _ in range(4):
        env.step(np.zeros(1))
    env.close()
    frames = iio.imread(tmp_path / "a.mp4")
    assert frames.shape == (4, 384 + 32, 576, 3)
    assert frames[:, :384].std() < frames[:, 384:].std()  # a plain scene above text


def test_videos_of_different_lengths_are_tiled(tmp_path):
    recorder = VideoRecorder.create_h264(fps=10)
    for name, length in (("a", 3), ("b", 6), ("c", 1), ("d", 2)):
        recorder.start(tmp_path / f"{name}.mp4")
        for _ in range(length):
            recorder.write_frame(np.full((40, 60, 3), 90, np.uint8))
        recorder.stop()
    runner = types.SimpleNamespace(episodes=[{"video": str(tmp_path / f"{name}.mp4")} for name in "abcd"])
    frames = iio.imread(write_grid(runner, tmp_path))
    assert frames.shape == (6, 480, 1080, 3)
    assert frames[0, 300, 100].max() < 100 and frames[0, 300, 500].min() > 240  # the fourth tile, and an empty one
    assert write_grid(types.SimpleNamespace(episodes=[{"video": None}]), tmp_path) is None
