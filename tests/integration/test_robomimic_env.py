"""robomimic's tasks: environments compared with robomimic's, starts, experts, absolute actions, runners, errors."""

import copy
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import types

import h5py
import imageio.v3 as iio
import numpy as np
import pytest
import torch

pytest.importorskip("robosuite")

from diffusion_policy.common.arm_actions import encode_rotations
from diffusion_policy.common.errors import ConfigError, DataError
from diffusion_policy.env.robomimic.experts.square import EASY
from diffusion_policy.env.robomimic.robomimic_image_wrapper import RobomimicImageWrapper
from diffusion_policy.env.robomimic.robomimic_lowdim_wrapper import RobomimicLowdimWrapper
from diffusion_policy.env.robomimic.robosuite_task import SCENE_SEED, RobosuiteTask, seeded
from diffusion_policy.env.robomimic.scripted_experts import TASKS, env_args, make_expert
from diffusion_policy.env.robomimic.starts import COUNT, FIRST_SEED, recorded_start
from diffusion_policy.env_runner.robomimic_image_runner import RobomimicImageRunner
from diffusion_policy.env_runner.robomimic_lowdim_runner import RobomimicLowdimRunner
from diffusion_policy.gym_util.multistep_wrapper import MultiStepWrapper
from diffusion_policy.model.common.rotation_transformer import RotationTransformer
from diffusion_policy.scripts import eval as eval_script
from diffusion_policy.scripts import robomimic_abs_actions
from diffusion_policy.scripts.generate_robomimic_demos import CAMERAS, generate
from diffusion_policy.storage.hdf5_reader import read_demos
from tests.util import ROOT, train_here

OBS_KEYS = ["object", "robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos"]
# obs dim of MIP's protocol, numbers of an action
SIZES = {"lift": (19, 7), "can": (23, 7), "square": (23, 7), "tool_hang": (53, 7), "transport": (59, 14)}
SHAPE_META = {
    "obs": {
        "agentview_image": {"shape": [3, 84, 84], "type": "rgb"},
        "robot0_eye_in_hand_image": {"shape": [3, 84, 84], "type": "rgb"},
        "robot0_eef_pos": {"shape": [3]},
        "robot0_eef_quat": {"shape": [4]},
        "robot0_gripper_qpos": {"shape": [2]},
    }
}
needs_renderer = pytest.mark.usefixtures("renderer")
DRAW = (
    "from diffusion_policy.env.robomimic.robosuite_task import RobosuiteTask\n"
    "from diffusion_policy.env.robomimic.scripted_experts import env_args\n"
    "RobosuiteTask(env_args('lift'), render_offscreen=True).render()"
)


def draw(**changes):
    """Draw a image in another process, in which OpenGL has not been used yet."""
    environment = (
        {key: value for key, value in os.environ.items() if key != "DISPLAY"} | {"PYTHONPATH": str(ROOT)} | changes
    )
    return subprocess.run([sys.executable, "-c", DRAW], capture_output=True, text=True, env=environment, timeout=120)


@pytest.fixture(scope="session")
def renderer():
    if (done := draw()).returncode != 0:
        pytest.skip(f"this machine cannot render: {done.stderr[-300:]}")


@pytest.fixture(scope="module")
def lift():
    return RobosuiteTask(env_args("lift"))


@pytest.fixture(scope="module")
def lift_images(renderer):
    return RobosuiteTask(env_args("lift"), render_offscreen=True)


@pytest.fixture(scope="module")
def robomimic_env(monkeypatch_module):
    """robomimic's own environment. Its imports of packages that nothing here uses are met by empty ones."""
    pytest.importorskip("robomimic")
    mujoco_py = types.ModuleType("mujoco_py")
    mujoco_py.builder = types.SimpleNamespace(MujocoException=RuntimeError)
    egl_probe = types.ModuleType("egl_probe")
    egl_probe.get_available_devices = list
    monkeypatch_module.setitem(sys.modules, "mujoco_py", mujoco_py)
    monkeypatch_module.setitem(sys.modules, "egl_probe", egl_probe)
    import robomimic.utils.obs_utils as obs_utils
    from robomimic.envs.env_robosuite import EnvRobosuite

    obs_utils.initialize_obs_utils_with_obs_specs(
        {"obs": {"low_dim": OBS_KEYS, "rgb": [f"{camera}_image" for camera in CAMERAS]}}
    )

    kept = []  # one that is forgotten frees what it drew with in whichever context of OpenGL is current then

    def make(task, abs_action=False, **kwargs):
        args = env_args(task)
        env_kwargs = copy.deepcopy(args["env_kwargs"])
        if abs_action:
            env_kwargs["controller_configs"]["body_parts"]["right"]["input_type"] = "absolute"
        with seeded(SCENE_SEED):
            # Without loading the scene again at every reset, which would draw another size for the cube.
            env = EnvRobosuite(args["env_name"], hard_reset=False, **env_kwargs, **kwargs)
        if kwargs:
            kept.append(env)
        return env

    return make


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def assert_same(ours: dict, theirs: dict):
    for key in ours:
        np.testing.assert_allclose(ours[key], theirs[key], atol=1e-10, err_msg=key)


# ---------------------------------------------------------------------- against robomimic's own environment
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("abs_action", [False, True], ids=["delta", "absolute"])
def test_observations_actions_and_success_equal_robomimic_s(task, abs_action, robomimic_env):
    ours, theirs = RobosuiteTask(env_args(task), abs_action), robomimic_env(task, abs_action)
    assert ours.action_dimension == theirs.action_dimension == SIZES[task][1]
    for mine, its in zip(ours.env.action_spec, theirs.env.action_spec, strict=False):
        np.testing.assert_array_equal(mine, its)
    with seeded(5):
        theirs.reset()
    ours.reset(seed=5)
    states, rng = [theirs.get_state()["states"]], np.random.default_rng(0)
    np.testing.assert_allclose(ours.get_state()["states"], states[0], atol=1e-10)
    for _ in range(8):
        action = rng.uniform(-1, 1, size=ours.action_dimension)
        for arm in range(len(ours.controllers()) if abs_action else 0):
            action[7 * arm : 7 * arm + 3] = ours.controllers()[arm].ref_pos + 0.02 * action[7 * arm : 7 * arm + 3]
            action[7 * arm + 3 : 7 * arm + 6] = [3.1, 0.1, 0.0]
        (observation, reward, _, _), (_, its_reward, _, _) = ours.step(action), theirs.step(action)
        states.append(theirs.get_state()["states"])
        np.testing.assert_allclose(ours.get_state()["states"], states[-1], atol=1e-9)
        assert reward == its_reward and ours.is_success() == theirs.is_success()
        # What its step returns is some milliseconds old; nothing of the robots depends on earlier observations.
        assert_same({key: value for key, value in observation.items() if key != "object"}, theirs.get_observation())
    (
        ours.reset_to({"states": states[0]}),
        theirs.reset_to({"states": states[0]}),
    )  # so that both have measured the same before
    for state in states:
        observation, other = ours.reset_to({"states": state}), theirs.reset_to({"states": state})
        assert set(observation) == set(other)
        assert_same(observation, other)


def test_success_equals_robomimic_s_along_a_demonstration(scripted_lift, lift, robomimic_env):
    theirs = robomimic_env("lift")
    demos = read_demos(scripted_lift / "low_dim.hdf5", ["states", "rewards"])
    theirs.reset()
    found = set()
    for state, _reward in zip(demos.arrays["states"], demos.arrays["rewards"], strict=False):
        lift.reset_to({"states": state}), theirs.reset_to({"states": state})
        assert lift.is_success() == theirs.is_success()
        found.add(lift.is_success()["task"])
    assert found == {True, False}


@needs_renderer
def test_images_equal_robomimic_s(lift_images, robomimic_env):
    theirs = robomimic_env(
        "lift",
        use_image_obs=True,
        camera_names=list(CAMERAS),
        camera_heights=84,
        camera_widths=84,
        postprocess_visual_obs=False,
    )
    with seeded(5):
        theirs.reset()
    state = theirs.get_state()
    lift_images.reset()  # hides what robosuite draws at the hand
    lift_images.reset_to(state)
    other = theirs.reset_to({"states": state["states"]})
    for camera in CAMERAS:
        image = lift_images.render(camera_name=camera)
        assert image.dtype == np.uint8 and image.std() > 10
        np.testing.assert_array_equal(image, other[f"{camera}_image"], err_msg=camera)


# ---------------------------------------------------------------------- starts
@pytest.mark.parametrize("task", TASKS)
def test_recorded_starts_are_those_of_their_seeds(task):
    env = RobosuiteTask(env_args(task))
    for seed in (FIRST_SEED, FIRST_SEED + COUNT - 1):
        env.reset(seed)
        np.testing.assert_allclose(recorded_start(env.name, seed), env.get_state()["states"], atol=1e-8)
    assert recorded_start(env.name, FIRST_SEED - 1) is None and recorded_start(env.name, FIRST_SEED + COUNT) is None
    states = np.stack([recorded_start(env.name, FIRST_SEED + i) for i in range(COUNT)])
    assert len(np.unique(states, axis=0)) == COUNT


@pytest.mark.parametrize("task", TASKS)
def test_the_observation_after_a_reset_is_complete_and_as_wide_as_the_protocol_says(task):
    keys = OBS_KEYS + [key.replace("robot0", "robot1") for key in OBS_KEYS[1:] if task == "transport"]
    env = RobomimicLowdimWrapper(RobosuiteTask(env_args(task)), keys)
    first, _ = env.reset(seed=3)
    assert first.shape == env.observation_space.shape == (SIZES[task][0],) and first.dtype == np.float32
    np.testing.assert_array_equal(first, env.get_observation())  # robosuite leaves zeros in some at first
    again, _ = env.reset(seed=3)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, env.reset(seed=4)[0])


def test_an_episode_that_starts_at_a_state_is_the_one_that_began_there(scripted_lift, lift):
    """Also what the state does not hold: replaying the actions leads through the recorded states."""
    demos = read_demos(scripted_lift / "low_dim.hdf5", ["states", "actions"])
    last = slice(int(demos.episode_ends[-2]), None)
    lift.reset(seed=99)
    for _ in range(3):
        lift.step(np.full(7, 0.7))
    lift.start_at({"states": demos.arrays["states"][last][0]})
    for state, action in zip(demos.arrays["states"][last], demos.arrays["actions"][last], strict=False):
        np.testing.assert_allclose(
            lift.get_state()["states"][1:], state[1:], atol=1e-4
        )  # the first number is the clock
        lift.step(action)


def test_numpy_s_own_random_numbers_are_left_alone(lift):
    np.random.seed(1)
    expected = np.random.rand()
    np.random.seed(1)
    lift.reset(seed=7)
    assert np.random.rand() == expected


# ---------------------------------------------------------------------- experts, demonstrations, absolute actions
def play(env, expert, observation, limit):
    """Act until the task is solved; the steps for which the hand stood still longest."""
    still, longest, before = 0, 0, observation
    for _ in range(limit):
        before, (observation, _, _, _) = observation, env.step(expert.act(observation))
        moved = np.linalg.norm(observation["robot0_eef_pos"] - before["robot0_eef_pos"])
        turned = 1 - abs(observation["robot0_eef_quat"] @ before["robot0_eef_quat"])
        still = still + 1 if moved < 5e-4 and turned < 1e-6 else 0
        longest = max(longest, still)
        if env.is_success()["task"]:
            break
    return longest


@pytest.mark.parametrize(
    "task, seeds, limit",
    [
        ("lift", range(500, 504), 400),
        ("can", range(500, 502), 400),
        ("square", [500, 501], 400),
        ("tool_hang", [22], 700),
    ],
)
def test_experts_succeed(task, seeds, limit):
    env = RobosuiteTask(env_args(task))
    for seed in seeds:
        longest = play(env, make_expert(task, np.random.default_rng(seed)), env.reset(seed), limit)
        assert env.is_success()["task"], seed
        assert longest < 60, f"seed {seed} stands still for {longest} steps"


def test_an_expert_that_loses_the_nut_takes_it_again():
    env = RobosuiteTask(env_args("square"))
    observation, expert = env.reset(500), make_expert("square", np.random.default_rng(500))
    for _ in range(400):
        if expert.stages[expert.stage] == "over":
            break
        observation, _, _, _ = env.step(expert.act(observation))
    held = observation["object"][9]
    for _ in range(12):
        observation, _, _, _ = env.step(np.array([0, 0, 0, 0, 0, 0, -1.0]))
    for _ in range(12):
        observation, _, _, _ = env.step(np.array([0, 0, 0, 0, 0, 0, 1.0]))
    assert observation["object"][9] < held - 0.1  # it lies on the table
    play(env, expert, observation, 400)
    assert env.is_success()["task"]


def test_square_s_hand_stays_in_easy_directions_whatever_the_nut_s():
    for angle in np.linspace(-np.pi, np.pi, 73):
        ways = set()
        for seed in range(8):
            expert = make_expert("square", np.random.default_rng(seed))
            yaw = expert.choose(angle)
            turn = expert.side - angle
            assert EASY[0] - 0.02 <= min(yaw, yaw + turn)
            assert max(yaw, yaw + turn) <= EASY[1] + 0.02
            assert np.sin(yaw - angle) == pytest.approx(0.0, abs=1e-9)  # across the handle
            assert np.cos(expert.side) < 0.1  # the handle does not point away from the robot
            ways.add(round(yaw, 6))
        assert len(ways) in (1, 2)


@pytest.mark.parametrize("task", ["square", "tool_hang"])
def test_two_demonstrations_from_one_start_differ(task):
    env = RobosuiteTask(env_args(task))
    paths = []
    for seed in (0, 1):
        observation, expert = env.reset(3), make_expert(task, np.random.default_rng(seed))
        for _ in range(20):
            observation, _, _, _ = env.step(expert.act(observation))
        paths.append(observation["robot0_eef_pos"])
    assert np.linalg.norm(paths[0] - paths[1]) > 0.005


def test_demonstrations_have_robomimic_s_layout_and_say_that_they_are_scripted(scripted_lift):
    with h5py.File(scripted_lift / "low_dim.hdf5") as file, h5py.File(scripted_lift / "low_dim_abs.hdf5") as absolute:
        assert sorted(file["data"]) == ["demo_0", "demo_1", "demo_2"]
        assert json.loads(file["data"].attrs["env_args"]) == env_args("lift")
        assert (
            "scripted"
            in json.loads(file["data"].attrs["expert"])["source"]
            == json.loads(absolute["data"].attrs["expert"])["source"]
        )
        assert file["data"].attrs["total"] == sum(demo.attrs["num_samples"] for demo in file["data"].values())
        assert json.loads(absolute["data"].attrs["abs_replay"])["share"] == 1.0
        for name, demo in file["data"].items():
            steps = demo.attrs["num_samples"]
            assert {key: demo[f"obs/{key}"].shape for key in OBS_KEYS} == {
                "object": (steps, 10),
                "robot0_eef_pos": (steps, 3),
                "robot0_eef_quat": (steps, 4),
                "robot0_gripper_qpos": (steps, 2),
            }
            assert (
                demo["actions"].shape == absolute[f"data/{name}/actions"].shape == (steps, 7)
                and demo["states"].shape[0] == steps
            )
            assert np.abs(demo["actions"]).max() <= 1 and demo["rewards"][-1] == 1 and demo["dones"][-1] == 1
            assert demo.attrs["model_file"].startswith("<mujoco")
            np.testing.assert_array_equal(demo["actions"][:, 6], absolute[f"data/{name}/actions"][:, 6])


def test_absolute_actions_are_the_controller_s_goals(scripted_lift, lift):
    """The goal that the controller had while the demonstration was recorded; here found by playing it again."""
    delta, absolute = (
        read_demos(scripted_lift / name, ["states", "actions"]) for name in ("low_dim.hdf5", "low_dim_abs.hdf5")
    )
    lift.start_at({"states": delta.arrays["states"][0]})
    rotations = RotationTransformer("axis_angle", "matrix")
    for action, goal in zip(
        delta.arrays["actions"][: int(delta.episode_ends[0])], absolute.arrays["actions"], strict=False
    ):
        lift.step(action)
        controller = lift.controllers()[0]
        np.testing.assert_allclose(controller.goal_pos, goal[:3], atol=1e-4)
        np.testing.assert_allclose(controller.goal_ori, rotations.forward(goal[3:6]), atol=1e-3)


def test_a_conversion_that_does_not_replay_is_refused(scripted_lift, tmp_path, monkeypatch):
    source = shutil.copy(scripted_lift / "low_dim.hdf5", tmp_path / "low_dim.hdf5")
    monkeypatch.setattr(robomimic_abs_actions.Replay, "share", 0.5)
    with pytest.raises(DataError, match="at least 95%"):
        robomimic_abs_actions.convert(source, verify=1)
    assert os.listdir(tmp_path) == ["low_dim.hdf5"]


# ---------------------------------------------------------------------- images
@needs_renderer
def test_images_are_observed_and_skipped_where_nobody_looks(lift_images):
    env = RobomimicImageWrapper(lift_images, SHAPE_META)
    renders = []
    original, lift_images.render = (
        lift_images.render,
        lambda **kwargs: renders.append(kwargs["camera_name"]) or original(**kwargs),
    )
    try:
        multi = MultiStepWrapper(env, n_obs_steps=2, n_action_steps=8, max_episode_steps=8)
        first, _ = multi.reset(seed=3)
        assert first["agentview_image"].shape == (2, 3, 84, 84) and first["agentview_image"].dtype == np.uint8
        assert multi.observation_space.contains(first) and len(renders) == 2
        obs, _, _, truncated, _ = multi.step(np.tile([0, 0, -1, 0, 0, 0, -1], (8, 1)))
        assert len(renders) == 2 + 2 * 2 and truncated
        assert not np.array_equal(obs["agentview_image"][0], obs["agentview_image"][1])
        np.testing.assert_array_equal(env.render(), obs["agentview_image"][-1].transpose(1, 2, 0))
        assert len(renders) == 6
        # The frame of the last but one step is what an environment that renders every step shows.
        np.testing.assert_array_equal(obs["agentview_image"][1], env.get_observation()["agentview_image"])
        env.observing = False
        env.step(np.array([0, 0, 1, 0, 0, 0, -1.0]))
        count = len(renders)
        env.render()
        assert len(renders) == count + 1  # a video shows every step
    finally:
        lift_images.render = original


# ---------------------------------------------------------------------- runners
class Replays:
    """A policy that replays demonstrations as absolute poses with rotation_6d, then holds the last pose."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, path, order):
        demos = read_demos(path, ["actions"])
        episodes = np.split(demos.arrays["actions"], demos.episode_ends[:-1])
        rotations = RotationTransformer("axis_angle", "rotation_6d")
        self.episodes = [encode_rotations(actions, rotations) for actions in episodes]
        self.order, self.batch, self.t, self.inputs = order, 0, 0, []

    def reset(self):
        self.t = 0
        self.batch += 1

    def predict_action(self, obs):
        self.inputs.append(obs)
        n = len(next(iter(obs.values())))
        which = self.order[(self.batch - 1) * n : self.batch * n]
        which += [which[-1]] * (n - len(which))
        steps = np.arange(self.t, self.t + 8)
        self.t += 8
        return {
            "action": torch.from_numpy(
                np.stack([self.episodes[i][np.minimum(steps, len(self.episodes[i]) - 1)] for i in which])
            )
        }


def lowdim_runner(folder, output, **kwargs):
    defaults = dict(
        obs_keys=OBS_KEYS,
        n_train=3,
        n_train_vis=0,
        n_test=0,
        n_test_vis=0,
        abs_action=True,
        max_steps=64,
        n_envs=2,
        vector="sync",
    )
    return RobomimicLowdimRunner(str(output), str(folder / "low_dim_abs.hdf5"), **{**defaults, **kwargs})


@pytest.mark.parametrize("vector, n_envs", [("sync", 2), ("async", 1)])
def test_replayed_demonstrations_score_one_from_their_starts(scripted_lift, tmp_path, vector, n_envs):
    runner = lowdim_runner(scripted_lift, tmp_path, vector=vector, n_envs=n_envs)
    policy = Replays(scripted_lift / "low_dim_abs.hdf5", [0, 1, 2])
    log = runner.run(policy)
    runner.close()
    assert log["train/mean_score"] == 1.0 and [e["seed"] for e in runner.episodes] == [0, 1, 2]
    assert all(e["steps"] < 64 for e in runner.episodes)  # they end when the task is solved
    assert policy.inputs[0]["obs"].shape == (n_envs, 2, 19) and policy.inputs[0]["obs"].dtype == torch.float32


def test_without_stopping_the_score_is_the_same(scripted_lift, tmp_path):
    runner = lowdim_runner(scripted_lift, tmp_path, stop_on_success=False, n_train=1, n_envs=1)
    assert runner.run(Replays(scripted_lift / "low_dim_abs.hdf5", [0]))["train/mean_score"] == 1.0
    assert [e["steps"] for e in runner.episodes] == [64]
    runner.close()


def test_test_episodes_start_where_it_is_recorded_and_are_not_solved_by_chance(scripted_lift, tmp_path):
    runner = lowdim_runner(scripted_lift, tmp_path, n_train=0, n_test=2, test_start_seed=FIRST_SEED, max_steps=16)
    policy = Replays(scripted_lift / "low_dim_abs.hdf5", [0, 1])
    assert runner.run(policy)["test/mean_score"] == 0.0
    runner.close()
    env = RobomimicLowdimWrapper(RobosuiteTask(env_args("lift")), OBS_KEYS)
    for i in range(2):
        expected, _ = env.reset(options={"state": recorded_start("Lift", FIRST_SEED + i)})
        np.testing.assert_allclose(policy.inputs[0]["obs"][i, -1], expected, atol=1e-6)


@needs_renderer
def test_videos_of_state_and_image_runners(scripted_lift, tmp_path):
    runner = lowdim_runner(
        scripted_lift, tmp_path, n_train=1, n_train_vis=1, render_hw=(64, 64), n_envs=1, max_steps=16
    )
    video = runner.run(Replays(scripted_lift / "low_dim_abs.hdf5", [0]))["train/sim_video_0"]
    runner.close()
    assert iio.imread(video).shape == (8, 384 + 32, 384, 3)
    images = RobomimicImageRunner(
        str(tmp_path),
        str(scripted_lift / "low_dim_abs.hdf5"),
        SHAPE_META,
        n_train=1,
        n_train_vis=1,
        n_test=0,
        n_test_vis=0,
        abs_action=True,
        max_steps=16,
        n_envs=1,
        vector="sync",
    )
    policy = Replays(scripted_lift / "low_dim_abs.hdf5", [0])
    video = images.run(policy)["train/sim_video_0"]
    images.close()
    assert iio.imread(video).shape[0] == 8
    image = policy.inputs[0]["agentview_image"]
    assert (
        image.shape == (1, 2, 3, 84, 84)
        and image.dtype == torch.float32
        and image.min() >= 0
        and 0.3 < image.max() <= 1
    )


# ---------------------------------------------------------------------- commands
SHORT = (
    "preset=debug",
    "training.num_epochs=1",
    "task.env_runner.n_envs=1",
    "task.env_runner.n_test=1",
    "task.env_runner.max_steps=8",
)


def test_train_and_evaluate_from_state(scripted_lift, tmp_path, capsys):
    data = f"task.dataset_path={scripted_lift / 'low_dim_abs.hdf5'}"
    task = ("task=lift_ph_lowdim", "task.env_runner.n_test_vis=0", data)
    _, summary = train_here(tmp_path / "run", "train_idp_transformer_lowdim", *SHORT, *task)
    eval_script.main(["--checkpoint", summary["checkpoint"], "--output_dir", str(tmp_path / "eval"), "-n", "1"])
    out = capsys.readouterr().out
    assert "mean score" in out and json.loads((tmp_path / "eval/eval_log.json").read_text())["nfe"] == 1


@needs_renderer
def test_train_from_images_made_here(tmp_path):
    generate("lift", 1, tmp_path, "image", seed=10, verify=0)
    with h5py.File(tmp_path / "image_abs.hdf5") as file:
        assert (
            file["data/demo_0/obs/agentview_image"].shape[1:] == (84, 84, 3)
            and file["data/demo_0/obs/agentview_image"].dtype == np.uint8
        )
    task = ("task=lift_ph_image", f"task.dataset_path={tmp_path / 'image_abs.hdf5'}")
    train_here(tmp_path / "run", "train_idp_unet_image", *SHORT, *task)
    assert "test/mean_score" in (tmp_path / "run/logs.json.txt").read_text()


# ---------------------------------------------------------------------- bad input
def with_env_args(source, target, change):
    """A copy of a dataset whose env_args are changed by `change(dict) -> value`."""
    shutil.copy(source, target)
    with h5py.File(target, "r+") as file:
        value = change(json.loads(file["data"].attrs["env_args"]))
        del file["data"].attrs["env_args"]
        if value is not None:
            file["data"].attrs["env_args"] = value if isinstance(value, str) else json.dumps(value)
    return target


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda args: None, "no env_args"),
        (lambda args: "{", "not JSON|env_args"),
        (lambda args: {**args, "env_name": "Levitate"}, "Levitate.*robosuite does not have"),
        (lambda args: {**args, "env_kwargs": {}}, "no robots"),
        (
            lambda args: {**args, "env_kwargs": {**args["env_kwargs"], "controller_configs": None}},
            "no controller_configs",
        ),
        (lambda args: {**args, "env_kwargs": {**args["env_kwargs"], "colour": 1}}, "cannot build Lift.*colour"),
        (
            lambda args: {**args, "env_name": "PickPlaceCan", "env_version": "1.4.1"},
            "recorded with robosuite 1.4.1.*download",
        ),
    ],
    ids=["none", "no JSON", "unknown task", "no robots", "no controller", "unknown argument", "another version"],
)
def test_env_args_that_cannot_be_used(change, message, scripted_lift, tmp_path):
    path = with_env_args(scripted_lift / "low_dim_abs.hdf5", tmp_path / "changed.hdf5", change)
    with pytest.raises((ConfigError, DataError), match=message):
        runner = RobomimicLowdimRunner(
            str(tmp_path),
            str(path),
            OBS_KEYS,
            n_train=1,
            n_train_vis=0,
            n_test=0,
            n_test_vis=0,
            vector="sync",
            n_envs=1,
            abs_action=True,
        )
        runner.run(Replays(scripted_lift / "low_dim_abs.hdf5", [0]))


def test_flat_controllers_of_robosuite_1_4_are_read_in_the_world_s_frame():
    args = env_args("lift")
    arm = args["env_kwargs"]["controller_configs"]["body_parts"]["right"]
    flat = {key: value for key, value in arm.items() if key not in ("input_type", "input_ref_frame", "gripper")} | {
        "control_delta": True
    }
    args = {**args, "env_version": "1.4.1", "env_kwargs": {**args["env_kwargs"], "controller_configs": flat}}
    for abs_action, expected in ((False, "delta"), (True, "absolute")):
        controller = RobosuiteTask(args, abs_action).controllers()[0]
        assert (controller.input_type, controller.input_ref_frame) == (expected, "world")


def test_actions_of_the_wrong_size(scripted_lift, tmp_path):
    runner = lowdim_runner(scripted_lift, tmp_path, abs_action=False)
    with pytest.raises(ConfigError, match="actions have 10 numbers.*takes 7.*abs_action=False"):
        runner.run(Replays(scripted_lift / "low_dim_abs.hdf5", [0, 1, 2]))


def test_observations_that_the_environment_does_not_have(scripted_lift, tmp_path, lift, lift_images):
    with pytest.raises(ConfigError, match="no observation robot7_eef_pos; it has: .*robot0_eef_pos"):
        RobomimicLowdimWrapper(lift, ["object", "robot7_eef_pos"])
    for change, message in (
        ({"moon_image": {"shape": [3, 84, 84], "type": "rgb"}}, "moon_image.*has only the cameras.*agentview"),
        ({"robot0_eef_pos": {"shape": [4]}}, r"robot0_eef_pos the shape \(4,\).*\(3,\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            RobomimicImageWrapper(lift_images, {"obs": {**SHAPE_META["obs"], **change}})
    with pytest.raises(ConfigError, match="3 demonstrations, too few"):
        lowdim_runner(scripted_lift, tmp_path, n_train=4)
    with pytest.raises(DataError, match="a state of Lift has 32 numbers, this one has 5"):
        lift.reset_to({"states": np.zeros(5)})


@pytest.mark.parametrize(
    "version, message",
    [
        (None, "not installed.*pip install -e .\\[robomimic\\]"),
        ("1.4.1", "needs robosuite 1.5, and 1.4.1 is installed"),
        ("2.0.0", "needs robosuite 1.5, and 2.0.0"),
    ],
)
def test_robosuite_missing_or_of_another_version(version, message, scripted_lift, tmp_path, monkeypatch):
    def installed(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    with pytest.raises(ConfigError, match=message):
        lowdim_runner(scripted_lift, tmp_path)


def test_a_renderer_that_cannot_start_names_the_fix():
    done = draw(MUJOCO_GL="glx")
    assert done.returncode != 0 and "ConfigError" in done.stderr
    assert "MUJOCO_GL=glx" in done.stderr and "apt-get install libosmesa6" in done.stderr
