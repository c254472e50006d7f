"""MetaWorld and Adroit through point clouds: views, starts, success, experts, demonstrations, rollouts, errors."""

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

for package in ("metaworld", "gymnasium_robotics", "fpsample"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)

from diffusion_policy.common.errors import ConfigError, DataError, DataNotFoundError
from diffusion_policy.common.point_cloud import back_project
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.env.adroit import adroit
from diffusion_policy.env.adroit.adroit import AdroitEnv, DAPGExpert
from diffusion_policy.env.metaworld import metaworld_wrapper as metaworld
from diffusion_policy.env.metaworld.metaworld_wrapper import MetaWorldEnv, expert_policy
from diffusion_policy.env_runner.adroit_runner import AdroitRunner
from diffusion_policy.env_runner.metaworld_runner import MetaworldRunner
from diffusion_policy.gym_util.multistep_wrapper import MultiStepWrapper
from diffusion_policy.scripts import generate_demos
from tests.conftest import SHARED
from tests.util import ROOT, train_here

LOOK = (
    "from diffusion_policy.env.metaworld.metaworld_wrapper import MetaWorldEnv\nMetaWorldEnv('reach', 8).reset(seed=0)"
)


def look(first="", **changes):
    """Look at a task in another process, in which OpenGL has not been used yet; `first` is run before that."""
    environment = (
        {key: value for key, value in os.environ.items() if key != "DISPLAY"} | {"PYTHONPATH": str(ROOT)} | changes
    )
    return subprocess.run(
        [sys.executable, "-c", f"{first}\n{LOOK}"], capture_output=True, text=True, env=environment, timeout=120
    )


@pytest.fixture(scope="module", autouse=True)
def renderer():
    if (done := look()).returncode != 0:
        pytest.skip(f"this machine cannot render: {done.stderr[-300:]}")


@pytest.fixture
def reach():
    env = MetaWorldEnv("reach", 64)
    yield env
    env.close()


def world_of(env, points):
    """Points of a cloud back in the world, by the camera's real pose."""
    data, camera = env.generator.data, env.generator.model.camera(env.generator.camera).id
    in_camera = (points - env.view.offset) @ env.view.rotation
    return in_camera @ (data.cam_xmat[camera].reshape(3, 3) @ np.diag([1.0, -1.0, -1.0])).T + data.cam_xpos[camera]


class Constant:
    """A policy that does one thing, and remembers what it was shown."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, action):
        self.action, self.seen = torch.as_tensor(action, dtype=torch.float32), []

    def reset(self):
        pass

    def predict_action(self, obs):
        self.seen.append(obs)
        return {"action": self.action.expand(len(obs["agent_pos"]), 8, -1)}


# ---------------------------------------------------------------------- MetaWorld
def test_metaworld_has_the_paper_s_tasks_and_each_has_an_environment_and_an_expert():
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    from metaworld.policies import ENV_POLICY_MAP

    assert {level: len(tasks) for level, tasks in metaworld.LEVELS.items()} == {
        "easy": 28,
        "medium": 11,
        "hard": 6,
        "very_hard": 5,
    }
    assert {f"{task}-v3" for task in metaworld.TASKS} == set(ALL_V3_ENVIRONMENTS) == set(ENV_POLICY_MAP)


def test_the_cloud_shows_the_hand_and_the_object_where_they_are_and_not_the_table():
    env = MetaWorldEnv("push", 1024)
    obs, _ = env.reset(seed=3)
    assert obs["point_cloud"].shape == (1024, 3) and obs["point_cloud"].dtype == obs["agent_pos"].dtype == np.float32
    world = world_of(env, obs["point_cloud"])
    for what, near in (
        (env.env.tcp_center, 0.06),
        (env.raw[4:7], 0.03),
        (env.env._target_pos, 0.03),
    ):  # between the fingers; puck; mark of the goal
        assert np.linalg.norm(world - what, axis=1).min() < near
    assert np.allclose(obs["agent_pos"][:3], env.env.get_endeff_pos(), atol=1e-6) and obs["agent_pos"].shape == (9,)
    assert np.all(obs["point_cloud"] > metaworld.LOW) and np.all(obs["point_cloud"] < metaworld.HIGH)
    depth = env.generator.depth()
    everything = back_project(depth, env.generator.fovy) @ env.view.rotation.T
    assert (everything[:, 2] < metaworld.LOW[2]).mean() > 0.3  # most of the image is table and floor, which are cropped
    env.close()


def test_videos_have_the_ceiling_above(reach):
    reach.reset(seed=0)
    up = reach.generator.data.cam_xmat[reach.generator.camera_id].reshape(3, 3)[:, 1]
    assert up[2] < -0.5  # where the camera's own images have the world's ceiling: below
    assert np.array_equal(reach.render(), np.rot90(reach.generator.image(), 2))


@pytest.mark.parametrize("task", ["assembly", "disassemble", "sweep", "coffee-button"])
def test_marks_of_the_goal_are_in_their_place_in_every_frame(task):
    env = MetaWorldEnv(task, 64)
    for _ in range(2):
        env.reset(seed=5)
        for _ in range(3):
            for name, position in env.env._target_site_config:
                assert np.allclose(env.env.data.site(name).xpos, position[:3])
            env.step(np.zeros(4))
    env.close()


@pytest.mark.parametrize("task", ["hammer", "push"])
def test_what_is_out_of_view_is_not_drawn_and_not_missed(task):
    env = MetaWorldEnv(task, 64)
    generator = env.generator
    for seed in range(2):
        env.reset(seed=seed)
        for number in range(10):
            env.step(np.random.default_rng(number).uniform(-1, 1, 4))
        depth = generator.depth()
        hidden = generator.model.geom_group != generator._groups
        assert hidden.any() and "head" in {
            generator.model.body(body).name for body in generator.model.geom_bodyid[hidden]
        }
        generator._groups, generator.model.geom_group[:] = generator.model.geom_group.copy(), generator._groups
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(generator, "_hide_what_is_out_of_view", lambda: None)
            assert np.array_equal(generator.depth(), depth)
        generator._groups = generator.model.geom_group.copy()
    env.close()


def test_a_seed_decides_the_start(reach):
    first, again, other = (reach.reset(seed=seed)[0] for seed in (1, 1, 2))
    assert np.array_equal(first["point_cloud"], again["point_cloud"]) and not np.array_equal(
        first["point_cloud"], other["point_cloud"]
    )
    state = np.random.get_state()[1].copy()
    reach.reset(seed=1)
    after_one = reach.reset()[0]  # without a seed: a new start
    assert not np.array_equal(after_one["point_cloud"], first["point_cloud"]) and np.array_equal(
        np.random.get_state()[1], state
    )
    # ... in another environment, too.
    env = MetaWorldEnv("reach", 64)
    assert np.array_equal(env.reset(seed=1)[0]["point_cloud"], first["point_cloud"])
    env.close()


def test_two_environments_of_one_process_do_not_disturb_each_other(reach):
    other = MetaWorldEnv("push", 64)
    alone = other.reset(seed=0)[0]["point_cloud"]
    for _ in range(2):
        mine = reach.reset(seed=0)[0]["point_cloud"]
        assert np.array_equal(other.reset(seed=0)[0]["point_cloud"], alone)
        assert np.array_equal(reach.reset(seed=0)[0]["point_cloud"], mine)
    other.close()


@pytest.mark.parametrize("stop", [True, False])
def test_an_expert_solves_it_and_that_ends_the_episode_or_not(stop):
    env, expert = MetaWorldEnv("drawer-close", 16, terminate_on_success=stop), expert_policy("drawer-close")
    env.reset(seed=0)
    env.observing = False
    results = []
    while len(results) < 120 and not (results and results[-1][1]):
        _, reward, terminated, _, info = env.step(expert.get_action(env.raw))
        assert info["success"] == (reward == 1.0)
        results.append((reward, terminated))
    assert results[-1] == ((1.0, True) if stop else (1.0, False)) and len(results) == 120 - (120 - len(results)) * stop
    env.close()


def test_a_cloud_that_nobody_sees_is_not_drawn(reach, monkeypatch):
    drawn = []
    cloud = reach.generator.point_cloud
    monkeypatch.setattr(reach.generator, "point_cloud", lambda *arguments: drawn.append(1) or cloud(*arguments))
    chunks = MultiStepWrapper(reach, n_obs_steps=2, n_action_steps=8)
    first, _ = chunks.reset(seed=0)
    obs, *_ = chunks.step(np.tile([1.0, 0, 0, 0], (8, 1)))
    assert len(drawn) == 3  # at reset, and of the last two of eight steps
    assert obs["point_cloud"].shape == (2, 64, 3) and not np.array_equal(obs["point_cloud"][0], obs["point_cloud"][1])
    reach.reset(seed=0)
    for _ in range(8):
        last = reach.step(np.array([1.0, 0, 0, 0]))[0]
    assert np.array_equal(obs["point_cloud"][-1], last["point_cloud"])


def test_unknown_tasks_are_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="MetaWorld has no task 'asembly'; did you mean assembly?"):
        MetaWorldEnv("asembly")
    with pytest.raises(ConfigError, match="Adroit has no task 'hamer'; did you mean hammer?"):
        AdroitRunner("out", "hamer")
    with pytest.raises(ConfigError, match="there are: button-press, "):
        MetaworldRunner("out", "xyz")


def test_a_misspelt_task_is_reported_before_its_demonstrations_are_looked_for(tmp_path):
    for overrides in (["task.name=asembly"], ["task=adroit", "task.name=hamer"]):
        with pytest.raises(ConfigError, match="did you mean"):
            train_here(tmp_path / "run", "train_idp_mlp_pointcloud", "preset=debug", *overrides)
    with pytest.raises(DataNotFoundError, match="generate_demos metaworld --task soccer --episodes 10"):
        train_here(
            tmp_path / "run",
            "train_idp_mlp_pointcloud",
            "preset=debug",
            "task.name=soccer",
            f"task.zarr_path={tmp_path}/nothing.zarr",
        )


def test_a_package_that_is_missing_is_named(monkeypatch):
    import importlib.metadata

    version = importlib.metadata.version

    def without(name):
        if name == "metaworld":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    with pytest.raises(ConfigError, match=r"needs the package metaworld.*\.\[metaworld\]"):
        MetaworldRunner("out", "reach")


def test_a_renderer_that_cannot_start_is_reported_and_the_user_s_choice_respected():
    done = look(MUJOCO_GL="glfw")  # needs a display
    assert (
        done.returncode != 0
        and "Depth cannot be rendered with MUJOCO_GL=glfw" in done.stderr
        and "libosmesa6" in done.stderr
    )


def test_a_renderer_can_be_named_after_mujoco_is_imported():
    """As robosuite does."""
    done = look(f"import os, mujoco; os.environ['MUJOCO_GL'] = {os.environ['MUJOCO_GL']!r}", MUJOCO_GL="")
    assert done.returncode == 0, done.stderr


def test_an_action_of_another_size_is_refused(reach):
    reach.reset(seed=0)
    with pytest.raises(ConfigError, match=r"reach takes actions of 4 numbers, got \(7,\)"):
        reach.step(np.zeros(7))


# ---------------------------------------------------------------------- Adroit
@pytest.fixture(scope="module")
def dapg():
    """Path of an expert of Adroit, by task."""
    folder = SHARED / "data/adroit"
    if not folder.is_dir():
        pytest.skip("DAPG's experts are not beside this checkout")
    return lambda task: folder / f"{task}_policy_weights.npz"


@pytest.mark.parametrize("task, action_dim", [("hammer", 26), ("door", 28), ("pen", 24)])
def test_adroit_s_tasks(task, action_dim):
    env = AdroitEnv(task, 256)
    first, again, other = (env.reset(seed=seed)[0] for seed in (1, 1, 2))
    assert (
        first["agent_pos"].shape == (24,)
        and first["point_cloud"].shape == (256, 3)
        and env.action_space.shape == (action_dim,)
    )
    assert np.array_equal(first["point_cloud"], again["point_cloud"]) and not np.array_equal(
        first["point_cloud"], other["point_cloud"]
    )
    palm = env.env.unwrapped.data.site("S_grasp").xpos
    assert np.linalg.norm(world_of(env, other["point_cloud"]) - palm, axis=1).min() < 0.08  # a point inside the palm
    env.observing = False
    for number in range(1, adroit.MAX_STEPS[task] + 1):
        _, reward, over, _, _ = env.step(np.zeros(action_dim))
        assert over == (number == adroit.MAX_STEPS[task]) and reward == 0
    assert env.steps == adroit.TASKS[task]["horizon"]
    env.close()


@pytest.mark.parametrize("task", ["hammer", "door", "pen"])
def test_an_expert_of_adroit_succeeds_at_the_end(task, dapg):
    env = AdroitEnv(task, 16)
    expert = DAPGExpert(dapg(task), env)
    env.reset(seed=0)
    env.observing, over, rewards = False, False, []
    while not over:
        _, reward, over, _, _ = env.step(expert.get_action(env.raw))
        rewards.append(reward)
    assert rewards[-1] == 1 and not any(rewards[:-1])
    env.close()


def test_the_cloud_of_hammer_is_dp3_s():
    """The frame and crop of DP3's published clouds. Boards hang at random heights, so single points differ."""
    path = SHARED / "data/adroit/adroit_hammer_expert.zarr"
    if not path.is_dir():
        pytest.skip("DP3's demonstrations of hammer are not beside this checkout")
    theirs = ReplayBuffer.copy_from_path(str(path), keys=["point_cloud", "state"])
    starts = np.concatenate([[0], theirs.episode_ends[:-1]])
    env = AdroitEnv("hammer", 512)
    ours = [env.reset(seed=seed)[0] for seed in range(10)]
    env.close()

    # Hand and hammer start in the same place: each of their points is close to one of ours, and vice versa.
    def hand(cloud):
        return cloud[cloud[:, 2] < 0.0]

    for cloud in theirs["point_cloud"][starts][:, :, :3]:
        distance = np.linalg.norm(hand(cloud)[:, None] - hand(ours[0]["point_cloud"])[None], axis=2)
        assert np.median(distance.min(axis=0)) < 0.015 and np.median(distance.min(axis=1)) < 0.015
    assert np.allclose(theirs["state"][starts], [obs["agent_pos"] for obs in ours], atol=0.15)


def test_experts_that_are_none_are_refused(tmp_path, dapg):
    env = AdroitEnv("pen", 16)
    with pytest.raises(ConfigError, match="observes 46 numbers and gives 26; pen has 45 and 24"):
        DAPGExpert(dapg("hammer"), env)
    with pytest.raises(DataNotFoundError, match="no expert at"):
        DAPGExpert(tmp_path / "nothing.npz", env)
    np.savez(tmp_path / "half.npz", W0=np.zeros((2, 2)))
    with pytest.raises(DataError, match="has no b0, W1"):
        DAPGExpert(tmp_path / "half.npz", env)
    (tmp_path / "text.npz").write_text("no expert")
    with pytest.raises(DataError, match="cannot be read as an .npz"):
        DAPGExpert(tmp_path / "text.npz", env)
    np.savez(tmp_path / "code.npz", **{key: np.array([print], dtype=object) for key in DAPGExpert.KEYS})
    with pytest.raises(DataError, match="cannot be read as an .npz"):  # a pickle, which would run code
        DAPGExpert(tmp_path / "code.npz", env)
    env.close()


# ---------------------------------------------------------------------- demonstrations
@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    """Two demonstrations of drawer-close."""
    path = tmp_path_factory.mktemp("metaworld") / "drawer-close.zarr"
    assert generate_demos.generate("metaworld", "drawer-close", 2, path, num_points=64) == 1.0
    return path


def test_demonstrations_have_dp3_s_layout_and_say_where_they_come_from(demos):
    buffer = ReplayBuffer.copy_from_path(str(demos))
    assert {key: (value.shape[1:], str(value.dtype)) for key, value in buffer.items()} == {
        "point_cloud": ((64, 6), "float32"),
        "state": ((9,), "float32"),
        "action": ((4,), "float32"),
        "img": ((128, 128, 3), "uint8"),
        "depth": ((128, 128), "float32"),
    }
    assert buffer.episode_lengths.tolist() == [200, 200]
    attributes = dict(ReplayBuffer.create_from_path(str(demos)).root.attrs)
    assert attributes["expert"] == {
        "source": "scripted expert of MetaWorld",
        "attempts": 2,
        "successes": 2,
        "success_rate": 1.0,
        "episode_seeds": [0, 1],
    }
    assert attributes["settings"]["task"] == "drawer-close" and "mujoco" in attributes["versions"]
    assert not demos.with_name("drawer-close.zarr.parts").exists()
    # What is stored is what a policy will see.
    env = MetaWorldEnv("drawer-close", 32)
    obs, _ = env.reset(seed=1)
    assert np.array_equal(obs["point_cloud"], buffer["point_cloud"][200, :32, :3]) and np.array_equal(
        obs["agent_pos"], buffer["state"][200]
    )
    colours = buffer["point_cloud"][..., 3:]
    assert colours.min() >= 0 and colours.max() > 100
    env.close()


def test_a_demonstration_can_end_once_it_is_solved(tmp_path):
    output = tmp_path / "short.zarr"
    generate_demos.generate("metaworld", "drawer-close", 1, output, num_points=8, stop_after=6)
    actions = ReplayBuffer.copy_from_path(str(output), keys=["action"])["action"]
    env = MetaWorldEnv("drawer-close", 8, terminate_on_success=False)
    env.reset(seed=0)
    env.observing = False
    rewards = [env.step(action)[1] for action in actions]  # what is stored, played again
    env.close()
    assert len(actions) < 150 and sum(rewards) == 6 and rewards[-1] == 1
    with pytest.raises(ConfigError, match="at least 5 steps"):
        generate_demos.generate("metaworld", "drawer-close", 1, tmp_path / "other.zarr", stop_after=2)


def test_an_interrupted_generation_goes_on(tmp_path, monkeypatch):
    output = tmp_path / "out.zarr"
    parts = generate_demos._open_parts(
        output, {"suite": "metaworld", "task": "reach", "num_points": 8, "expert": None, "stop_after": None}
    )
    episode = {
        "point_cloud": np.zeros((3, 8, 6), np.float32),
        "state": np.zeros((3, 9), np.float32),
        "action": np.full((3, 4), 7.0, np.float32),
        "img": np.zeros((3, 4, 4, 3), np.uint8),
        "depth": np.ones((3, 4, 4), np.float32),
    }
    np.savez(parts / "0.npz", **episode)
    (parts / "1.failed").touch()
    np.savez(parts / "2.npz", **episode)
    assert generate_demos.generate("metaworld", "reach", 2, output, num_points=8) == pytest.approx(
        2 / 3
    )  # nothing was left to play
    assert ReplayBuffer.copy_from_path(str(output))["action"].max() == 7
    # Episodes of other settings are not mixed in.
    other = generate_demos._open_parts(tmp_path / "other.zarr", {"task": "reach"})
    (other / "0.npz").touch()
    generate_demos._open_parts(tmp_path / "other.zarr", {"task": "push"})
    assert [path.name for path in other.iterdir()] == ["settings.json"]


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    def fails(*arguments):
        with pytest.raises(SystemExit):
            generate_demos.main([*arguments])
        return capsys.readouterr().err

    assert "did you mean assembly" in fails("metaworld", "--task", "asembly")
    assert "--expert" in fails("adroit", "--task", "pen")
    assert "at least 1" in fails("metaworld", "--task", "reach", "--episodes", "0")
    (tmp_path / "there.zarr").mkdir()
    assert "exists already" in fails("metaworld", "--task", "reach", "--output", str(tmp_path / "there.zarr"))
    np.savez(tmp_path / "half.npz", W0=np.zeros((2, 2)))
    assert "has no b0" in fails(
        "adroit",
        "--task",
        "pen",
        "--expert",
        str(tmp_path / "half.npz"),
        "--output",
        str(tmp_path / "x.zarr"),
        "--num_workers",
        "1",
    )


def test_an_expert_that_fails_is_given_up(tmp_path, monkeypatch):
    def never(*_):
        return False

    class Pool:
        def __init__(self, *_):
            pass

        __enter__, __exit__ = (lambda self: self), (lambda self, *_: None)

        def submit(self, call, *arguments):
            import concurrent.futures

            future = concurrent.futures.Future()
            future.set_result(never())
            return future

    monkeypatch.setattr(generate_demos.concurrent.futures, "ProcessPoolExecutor", Pool)
    with pytest.raises(Exception, match="succeeded in only 0 of 20 episodes"):
        generate_demos.generate("metaworld", "reach", 2, tmp_path / "out.zarr")


# ---------------------------------------------------------------------- rollouts
def test_rollouts_score_success_and_do_not_depend_on_how_they_are_run(tmp_path):
    scores = {}
    for vector, n_envs in (("sync", 2), ("async", 1)):
        policy = Constant([0.0, 0.0, -1.0, 0.0])
        runner = MetaworldRunner(
            str(tmp_path), "reach", 32, n_test=2, n_test_vis=0, max_steps=24, n_envs=n_envs, vector=vector
        )
        log = runner.run(policy)
        runner.close()
        assert (
            policy.seen[0]["point_cloud"].shape == (n_envs, 2, 32, 3)
            and policy.seen[0]["point_cloud"].dtype == torch.float32
        )
        scores[vector] = [(episode["seed"], episode["max_reward"], episode["steps"]) for episode in runner.episodes]
        assert log["test/mean_score"] == np.mean([score for _, score, _ in scores[vector]])
    assert scores["sync"] == scores["async"] and [seed for seed, _, _ in scores["sync"]] == [100000, 100001]


def test_an_episode_of_adroit_is_scored_at_its_end(tmp_path, dapg):
    """The expert, in a policy's place, with the simulator's own observation."""
    runner = AdroitRunner(
        str(tmp_path), "hammer", 16, n_test=1, n_test_vis=0, n_envs=1, vector="sync", n_action_steps=1
    )

    class Expert(Constant):
        def predict_action(self, obs):
            env = runner._slots._envs[0].env.unwrapped
            self.expert = getattr(self, "expert", None) or DAPGExpert(dapg("hammer"), env)
            return {"action": torch.as_tensor(self.expert.get_action(env.raw))[None, None]}

    log = runner.run(Expert([0.0]))
    runner.close()
    assert log["test/mean_score"] == 1 and runner.episodes[0]["steps"] == 100


@pytest.mark.parametrize(
    "name, overrides",
    [
        ("train_idp_transformer_pointcloud", []),
        ("train_simple_dp3", ["task.env_runner.vector=sync"]),
    ],
)
def test_trains_on_demonstrations_evaluates_and_records(name, overrides, demos, tmp_path):
    workspace, summary = train_here(
        tmp_path / "run",
        name,
        "preset=debug",
        "task.name=drawer-close",
        f"task.zarr_path={demos}",
        "task.env_runner.n_envs=1",
        *overrides,
    )
    assert summary["evaluations"] == 2 and summary["mean_of_best_scores"] is not None and len(summary["videos"]) == 2
    lines = [json.loads(line) for line in (tmp_path / "run/logs.json.txt").read_text().splitlines()]
    assert "test/sim_max_reward_100001" in lines[-1]
