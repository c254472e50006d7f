"""Pick Peach: the scene, the expert, what counts as success and as which failure, demonstrations, the runner."""

import importlib.util
import json

import h5py
import numpy as np
import pytest
import torch

if importlib.util.find_spec("mujoco") is None:
    pytest.skip("mujoco is not installed", allow_module_level=True)

from diffusion_policy.common.errors import ConfigError, DataError, DataNotFoundError
from diffusion_policy.dataset.recorded_dataset import RecordedDataset, RecordedImageDataset
from diffusion_policy.dataset.recordings import open_recordings
from diffusion_policy.env.pick_peach import expert, pick_peach_env
from diffusion_policy.env.pick_peach.expert import SIDES, ArmKinematics, demonstrate, placement_of, plan
from diffusion_policy.env.pick_peach.pick_peach_env import FAILURES, PickPeachEnv
from diffusion_policy.env_runner.pick_peach_runner import PickPeachRunner
from diffusion_policy.scripts import generate_demos, inspect_data


@pytest.fixture(scope="module")
def env():
    return PickPeachEnv(terminate_on_success=False)


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    """Four demonstrations without images."""
    path = tmp_path_factory.mktemp("demos") / "pick_peach"
    assert generate_demos.generate_pick_peach(4, path) == 1.0
    return path


def play(env, actions):
    for action in actions:
        env.step(action)
    return env.outcome()


def until_lifted(env, seed):
    """Play the expert's actions until the peach is lifted; return the joints it holds then."""
    for action in demonstrate(env, seed):
        env.step(action)
        if env.progress.lifted and env.peach_position[2] > 0.1:
            return action[:6]
    raise AssertionError("the expert does not lift the peach")


def hold(joints, gripper, steps=100):
    return np.tile([*joints, gripper], (steps, 1))


# ---------------------------------------------------------------------- scene
def test_a_seed_decides_the_start_and_everything_after_it(env):
    other = PickPeachEnv()
    for seed in (0, 1):
        assert np.array_equal(env.reset(seed=seed)[0], other.reset(seed=seed)[0])
        assert np.array_equal(env.peach_position, other.peach_position)
        assert env.start == SIDES[seed] == ("left" if env.peach_position[1] > 0 else "right")
        action = np.array([*env.joint_positions()[:6] + 0.1, 0.4])
        for _ in range(20):
            assert np.array_equal(env.step(action)[0], other.step(action)[0])
    places = np.array([[env.reset(seed=seed) and env.peach_position[:2]] for seed in range(0, 40, 2)])[:, 0]
    around = np.abs(places - pick_peach_env.STARTS["left"])
    assert 0.01 < around.max() <= pick_peach_env.START_RANGE + 1e-3 and len(np.unique(places, axis=0)) == 20


def test_joint_positions_tell_the_peach_s_side_but_not_where_it_is(env):
    waist = [env.reset(seed=seed)[0][0] for seed in range(20)]
    assert min(waist[::2]) > 0.4 and max(waist[1::2]) < -0.4
    first = env.reset(seed=0)[0]
    env.data.qpos[env._peach] += 0.02  # the observation does not change
    assert np.array_equal(env._observation(), first)


def test_the_arm_follows_its_targets_and_the_gripper_is_a_share(env):
    env.reset(seed=0)
    target = np.array([0.2, -0.4, 0.5, 0.1, 0.9, -0.2, 0.5])
    for _ in range(100):
        obs = env.step(target)[0]
    assert np.abs(obs - target).max() < 0.01 and np.abs(env.joint_velocities()).max() < 0.01
    assert env.data.joint("left_finger").qpos[0] == pytest.approx(env.data.joint("right_finger").qpos[0], abs=1e-3)
    far = env.step(np.array([9.0, -9, 9, 9, 9, 9, 9]))[0]  # beyond every limit
    assert np.isfinite(far).all()


def test_inverse_kinematics_reach_a_pose():
    solver = ArmKinematics(np.array([0.4, -0.6, 0.75, 0, 0.85, 0]))
    pose = np.array([0.45, 0.1, 0.1, 1.0, 0.1, -0.05])
    for _ in range(100):
        solver.follow(pose)
    assert np.allclose(solver.pose(), pose, atol=2e-3)


@pytest.mark.parametrize("action", [np.zeros(6), np.zeros((1, 7)), np.full(7, np.nan)])
def test_an_action_of_another_size_is_refused(env, action):
    env.reset(seed=0)
    with pytest.raises(ConfigError, match="takes actions of 7 finite numbers"):
        env.step(action)


def test_a_camera_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="no camera 'wrist'; there are: front, head"):
        PickPeachEnv(("wrist",))


# ---------------------------------------------------------------------- expert
@pytest.mark.parametrize("seed", range(8))
def test_the_expert_succeeds_from_both_places_on_both_sides(env, seed):
    actions = demonstrate(env, seed)
    assert play(env, actions) == {
        "start": SIDES[seed % 2],
        "placement": placement_of(seed),
        "failure": None,
        "grasp_offset": env.progress.grasp_offset,
        "lifted": True,
    }
    assert abs(env.progress.grasp_offset) < 0.015 and 200 < len(actions) < 500
    assert np.abs(np.diff(actions[:, :6], axis=0)).max() < 0.08  # no jumps: below 4 radians per second


def test_four_seeds_in_a_row_have_every_combination():
    for first in (0, 8):
        assert {(seed % 2, placement_of(seed)) for seed in range(first, first + 4)} == {
            (start, side) for start in (0, 1) for side in SIDES
        }
        assert [placement_of(first), placement_of(first + 1)] == list(SIDES)


def test_the_side_shows_only_above_the_plate(env):
    """Until then, both sides have the same actions, exactly; afterwards they are a hand's width apart."""
    parted = []
    for seed in range(6):
        env.reset(seed=seed)
        left, right = (
            plan(env.joint_positions()[:6], env.peach_start, side, np.random.default_rng(seed)) for side in SIDES
        )
        first = int(np.flatnonzero((left != right).any(axis=1))[0])
        parted.append(first / len(left))
        for action in left[: first - 1]:
            env.step(action)
        assert np.linalg.norm(env.peach_position[:2] - pick_peach_env.PLATE) < 0.03 and env.peach_position[2] > 0.08
    assert min(parted) > 0.5


def test_demonstrations_vary(env):
    lengths, grips, heights = set(), set(), []
    for seed in range(0, 24, 4):
        actions = demonstrate(env, seed)
        lengths.add(len(actions))
        grips.add(round(actions[:, 6].min(), 3))
        play(env, actions[: len(actions) // 2])
        heights.append(env.tool_position[2])
    assert len(lengths) > 4 and len(grips) == 6 and np.std(heights) > 0.005


# ---------------------------------------------------------------------- success and failures
def test_a_peach_that_is_held_or_only_touched_is_no_success(env):
    actions = demonstrate(env, 0)
    opens = np.flatnonzero(np.diff(actions[:, 6]) > 1e-6)[0]
    rewards = [env.step(action)[1] for action in [*actions[:opens], *[actions[opens - 1]] * 60]]
    assert not any(rewards) and env.outcome()["failure"] == "timeout" and env._on_plate(env.peach_position)


def test_a_peach_that_rolls_onto_the_plate_without_a_grasp_is_no_success(env):
    env.reset(seed=0)
    env.data.qpos[env._peach : env._peach + 3] = [0.5, 0.05, 0.041]
    outcome = play(env, hold(env.joint_positions()[:6], 1.0))
    assert env._on_plate(env.peach_position) and outcome["placement"] is None and outcome["failure"] == "timeout"


def test_a_closed_gripper_without_a_peach_has_missed(env):
    env.reset(seed=0)
    outcome = play(env, hold(env.joint_positions()[:6], 0.0))
    assert outcome["failure"] == "missed" and outcome["grasp_offset"] < -0.05 and not outcome["lifted"]


def test_a_grasp_behind_the_peach(env):
    env.reset(seed=1)
    beyond = env.peach_start * (1 + 0.08 / np.linalg.norm(env.peach_start))
    outcome = play(env, plan(env.joint_positions()[:6], beyond, "left", np.random.default_rng(0)))
    assert outcome["failure"] == "behind" and outcome["grasp_offset"] > 0.02


def test_a_gripper_that_stops_half_way(env):
    env.reset(seed=0)
    actions = demonstrate(env, 0)
    actions[:, 6] = np.where(actions[:, 6] < 1, 0.769, 1.0)
    closing = np.flatnonzero(actions[:, 6] < 1)[0]
    assert play(env, [*actions[: closing + 10], *[actions[closing + 10]] * 60])["failure"] == "frozen"


def test_a_peach_that_slips_is_dropped_and_one_that_is_let_go_elsewhere_is_in_the_wrong_place(env):
    joints = until_lifted(env, 0)
    assert play(env, hold(joints, 0.585))["failure"] == "dropped"
    joints = until_lifted(env, 0)
    assert play(env, hold(joints, 1.0))["failure"] == "wrong_place"
    joints = until_lifted(env, 0)
    assert play(env, hold(joints, 0.3))["failure"] == "timeout"


def test_a_peach_on_the_middle_line_is_on_neither_side(env, monkeypatch):
    monkeypatch.setattr(expert, "SIDE_OFFSET", 0.0)
    outcome = play(env, demonstrate(env, 0))
    assert outcome["placement"] == "middle" and outcome["failure"] is None


# ---------------------------------------------------------------------- demonstrations
def test_demonstrations_are_aloha_episodes_half_of_them_on_each_side(demos):
    files = sorted(demos.glob("*.hdf5"))
    assert [file.name for file in files] == [f"episode_{i}.hdf5" for i in range(4)]
    sides = []
    for number, name in enumerate(files):
        with h5py.File(name) as file:
            length = len(file["action"])
            assert {key: (value.shape, value.dtype) for key, value in file["observations"].items()} == {
                "qpos": ((length, 7), np.float32),
                "qvel": ((length, 7), np.float32),
            }
            assert file["action"].shape == (length, 7) and file.attrs["sim"] and file.attrs["seed"] == number
            sides.append(file.attrs["placement"])
    assert sides == ["left", "right", "right", "left"]
    record = json.loads((demos / "expert.json").read_text())
    assert record["expert"]["placements"] == sides and record["expert"]["attempts"] == 4
    assert record["settings"]["task"] == "pick_peach" and "mujoco" in record["versions"]
    assert not demos.with_name("pick_peach.parts").exists()


def test_stored_actions_played_again_succeed(demos, env):
    for seed, file in enumerate(sorted(demos.glob("*.hdf5"))):
        with h5py.File(file) as episode:
            actions, qpos = episode["action"][:], episode["observations/qpos"][:]
        env.reset(seed=seed)
        for action, seen in zip(actions, qpos, strict=True):
            assert np.array_equal(env.joint_positions().astype(np.float32), seen)
            env.step(action)
        assert env.outcome()["placement"] == placement_of(seed)


def test_the_readers_read_them(demos, capsys, monkeypatch, tmp_path):
    found = open_recordings(demos)
    assert found.kind == "aloha hdf5" and len(found) == 4 and set(found.features) == {"action", "qpos", "qvel"}
    dataset = RecordedDataset(demos, ["qpos"], "action", horizon=8)
    assert dataset[0]["obs"].shape == (8, 7) and dataset[0]["action"].shape == (8, 7)
    monkeypatch.chdir(tmp_path)  # the page is written here
    monkeypatch.setattr("sys.argv", ["inspect_data", str(demos)])
    inspect_data.main()
    assert "episodes   4\n" in capsys.readouterr().out


def test_missing_demonstrations_and_images_are_told_with_the_command_that_makes_them(demos, tmp_path):
    how = "Make demonstrations with: python -m ..."
    with pytest.raises(DataNotFoundError, match=r"nothing at .*none\. Make demonstrations with"):
        RecordedDataset(tmp_path / "none", ["qpos"], "action", how=how)
    meta = {"obs": {"front": {"shape": [3, 16, 16]}, "qpos": {"shape": [7]}}}
    with pytest.raises(DataError, match=r"no camera 'front': it has none\. Make demonstrations with"):
        RecordedImageDataset(demos, meta, ["qpos"], ["front"], "action", how=how)


def test_an_interrupted_generation_goes_on_and_failed_attempts_keep_the_balance(tmp_path, monkeypatch):
    output = tmp_path / "out"
    parts = generate_demos._open_parts(output, {"task": "pick_peach", "images": False, "image_size": None})
    for seed in (*range(5), *range(6, 10)):
        generate_demos.write_episode(
            parts / f"{seed}.hdf5", {"action": np.full((3, 7), seed), "qpos": np.zeros((3, 7))}, {"seed": seed}
        )
    (parts / "5.failed").touch()
    assert generate_demos.generate_pick_peach(8, output) == pytest.approx(9 / 10)  # nothing was left to play
    kept = json.loads((output / "expert.json").read_text())["expert"]
    assert kept["episode_seeds"] == [0, 1, 2, 3, 4, 6, 7, 9] and kept["attempts"] == 10  # 8 has the place of 0 and 4
    assert sorted(kept["placements"]) == ["left"] * 4 + ["right"] * 4


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    def fails(*arguments):
        with pytest.raises(SystemExit):
            generate_demos.main([*arguments])
        return capsys.readouterr().err

    assert "must be even" in fails("pick_peach", "--episodes", "5", "-o", str(tmp_path / "x"))
    assert "multiple of 4" in fails("pick_peach", "--seed", "2", "-o", str(tmp_path / "x"))
    assert "exists already" in fails("pick_peach", "-o", str(tmp_path))
    assert "--task is not for pick_peach" in fails("pick_peach", "--task", "peach")
    assert "at least 16" in fails("pick_peach", "--images", "--image_size", "4")
    assert "choose one with --task" in fails("metaworld")
    assert "--images is for pick_peach" in fails("metaworld", "--task", "reach", "--images")


# ---------------------------------------------------------------------- runner
class Player:
    """A policy that plays the expert's actions of the runner's seeds, in chunks of 16, and predicts `horizon`."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, seeds, gripper=None, horizon=16):
        env = PickPeachEnv()
        self.actions, self.horizon = [demonstrate(env, seed) for seed in seeds], horizon
        for actions in self.actions:
            if gripper is not None:
                actions[:, 6] = gripper

    def reset(self):
        self.step = 0

    def predict_action(self, obs):
        self.seen, rows = obs, []
        for actions in self.actions:
            rows.append(actions[np.minimum(np.arange(self.step - 1, self.step + self.horizon), len(actions) - 1)])
        chunk = torch.as_tensor(np.stack(rows), dtype=torch.float32)
        self.step += 16
        return {"action": chunk[:, 1:17], "action_pred": chunk}


def runner(tmp_path, **changes):
    settings = dict(n_train=0, n_train_vis=0, n_test=4, n_test_vis=0, test_start_seed=100000, n_obs_steps=2)
    return PickPeachRunner(str(tmp_path), **settings | dict(n_action_steps=16) | changes)


def test_the_runner_reports_success_placements_and_starts(tmp_path):
    policy = Player(range(100000, 100004))
    played = runner(tmp_path)
    log = played.run(policy)
    assert policy.seen["obs"].shape == (4, 2, 7) and policy.seen["obs"].dtype == torch.float32
    assert log["test/mean_score"] == 1 and log["test/sim_max_reward_100000"] == 1
    assert log["test/placement/left"] == log["test/placement/right"] == 0.5 and log["test/placement/middle"] == 0
    assert log["test/success/left_start"] == log["test/success/right_start"] == 1
    assert all(log[f"test/failure/{name}"] == 0 for name in FAILURES)
    assert [episode["placement"] for episode in played.episodes] == ["left", "right", "right", "left"]
    assert log["test/ends_still"] == 0 and log["test/path_length"] > 0.5


def test_the_runner_counts_failures(tmp_path):
    log = runner(tmp_path, max_steps=400).run(Player(range(100000, 100004), gripper=0.769))
    assert log["test/mean_score"] == 0 and log["test/failure/frozen"] == 1 and log["test/placement/left"] == 0


def test_latency_executes_late_parts_of_longer_chunks_and_holds_when_there_are_none(tmp_path):
    chunk = np.arange(31.0)[None, :, None]
    late = runner(tmp_path, n_latency_steps=3)
    assert late.executed(chunk[:, :16], chunk)[0, :, 0].tolist() == list(range(3, 19))
    late = runner(tmp_path, n_latency_steps=20)  # the next answer takes 20 steps, so 20 are executed
    assert late.executed(chunk[:, :16], chunk)[0, :, 0].tolist() == [*range(20, 31), *[30.0] * 9]
    late = runner(tmp_path, n_latency_steps=40)
    assert late.executed(chunk[:, :16], chunk)[0, :, 0].tolist() == [30.0] * 40
    at_once = runner(tmp_path)
    assert at_once.executed(chunk[:, :16], chunk)[0, :, 0].tolist() == list(range(16))
    assert late.control_hz == 50
    # a policy that predicts far enough ahead loses nothing but the first steps
    log = runner(tmp_path, n_latency_steps=4).run(Player(range(100000, 100004), horizon=40))
    assert log["test/mean_score"] >= 0.5
