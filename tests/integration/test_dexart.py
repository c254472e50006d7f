"""DexArt's tasks: errors without DexArt, and the wrapper and the runner against a stand-in.

DexArt and its assets are not on PyPI, and its simulator renders on NVIDIA GPUs only. So these tests replace it by a
small module with its public interface: names, sizes, and sources of random numbers. They do not cover DexArt's physics.
"""

import importlib.metadata
import json
import random
import sys
import types

import hydra
import imageio.v3 as iio
import numpy as np
import pytest
import torch

from diffusion_policy.common.errors import ConfigError, DataError
from diffusion_policy.env.dexart.dexart_wrapper import STATE_DIM, TASKS, DexArtEnv, import_dexart
from diffusion_policy.env_runner.base_image_runner import BaseImageRunner
from diffusion_policy.env_runner.dexart_runner import DexArtRunner
from diffusion_policy.scripts import eval as eval_script
from tests.conftest import SHARED
from tests.util import load_config, train_here

VERSIONS = {"sapien": "2.2.1", "numpy": "1.26.4"}
POINTS = 40


class Camera:
    def take_picture(self):
        self.taken = True

    def get_color_rgba(self):
        assert self.taken
        return np.full((50, 50, 4), [1.0, 0.5, 0.0, 1.0], dtype=np.float32)


class StandIn:
    """Solved when the first numbers of the actions add up to where the object stands, between 0 and 1 along x."""

    horizon, control_time_step = 30, 0.04

    def __init__(
        self,
        task_name,
        fingers,
        use_visual_obs,
        use_gui=False,
        is_eval=False,
        pc_seg=False,
        pc_noise=False,
        index=-1,
        img_type=None,
        rand_pos=0.0,
        rand_degree=0,
        frame_skip=10,
    ):
        assert (
            use_visual_obs
            and is_eval
            and pc_seg
            and img_type == "robot"
            and not use_gui
            and isinstance(index, list)
            and frame_skip == 10
        )
        self.task_name, self.instance_list, self.rand_pos, self.fingers, self.i = task_name, index, rand_pos, fingers, 0
        self.scene, self.cameras = types.SimpleNamespace(update_render=lambda: None), {f"{task_name}_viz": Camera()}
        self.np_random = np.random.RandomState()
        self.broken = None
        self.reset()

    def seed(self, seed=None):
        assert type(seed) is int
        self.np_random = np.random.RandomState(seed)

    def reset(self):
        self.current_step, self.moved = 0, 0.0
        self.i = (self.i + 1) % len(self.instance_list)
        self.index = random.choice(self.instance_list) if self.task_name == "laptop" else self.instance_list[self.i]
        self.position = np.random.random(3) * self.rand_pos
        return self.observe()

    def step(self, action):
        self.current_step += 1
        self.moved += action[0]
        return self.observe(), -7.0, self.is_eval_done or self.current_step >= self.horizon, {}

    @property
    def is_eval_done(self):
        return np.bool_(self.moved >= self.position[0])

    def observe(self):
        state = np.concatenate(
            [np.arange(STATE_DIM[self.task_name] - 1) + self.index, [self.current_step / self.horizon]]
        )
        raw = {
            "instance_1-point_cloud": self.position + self.np_random.randn(POINTS, 3),
            "imagination_robot": self.fingers + self.moved,
            "state": state,
            "oracle_state": state,
            "instance_1-seg_gt": np.zeros((POINTS, 4)),
        }
        if self.broken is not None:
            raw[self.broken] = np.full_like(raw[self.broken], np.nan)
        return raw


@pytest.fixture
def no_dexart(monkeypatch):
    """Forgets whichever there is, and afterwards the one that a test brought along."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("dexart", "sapien", "open3d")]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "dexart"]:
        del sys.modules[name]


@pytest.fixture
def versions(monkeypatch):
    """The versions of packages that are said to be installed; others are those that are."""
    found, real = dict(VERSIONS), importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found.get(name) or real(name))
    return found


@pytest.fixture
def dexart(no_dexart, versions, monkeypatch, tmp_path):
    """The stand-in; its settings can be changed."""
    for name in ("annotation", "robot", "sapien"):
        (tmp_path / "clone/assets" / name).mkdir(parents=True)
    setting, creating = types.ModuleType("dexart.env.task_setting"), types.ModuleType("dexart.env.create_env")
    setting.__file__ = str(tmp_path / "clone/dexart/env/task_setting.py")
    setting.TRAIN_CONFIG = {task: {"seen": [1000, 2000, 3000], "unseen": [4000, 5000]} for task in TASKS}
    setting.RANDOM_CONFIG = {task: {"rand_pos": 1.0, "rand_degree": 60} for task in TASKS}
    setting.EVAL_CAM_NAMES_CONFIG = {task: [f"{task}_viz"] for task in TASKS}
    setting.OBS_CONFIG = {"instance_pc_seg": {"instance_1": {"point_cloud": {"num_points": POINTS}}}}
    open3d = types.ModuleType("open3d")
    numbers = np.random.RandomState()
    open3d.utility = types.SimpleNamespace(random=types.SimpleNamespace(seed=numbers.seed))
    creating.create_env = lambda **kwargs: StandIn(fingers=numbers.randn(96, 7), **kwargs)
    package, env = types.ModuleType("dexart"), types.ModuleType("dexart.env")
    env.task_setting, env.create_env = setting, creating
    for module in (package, env, setting, creating, open3d):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return env


def make(task="laptop", **kwargs):
    return DexArtEnv(task, **{"num_points": POINTS, **kwargs})


def assert_same(one, other):
    assert list(one) == list(other)
    for key in one:
        np.testing.assert_array_equal(one[key], other[key], err_msg=key)


# ---------------------------------------------------------------------- what is missing
def clone(tmp_path, monkeypatch, first_line):
    folder = tmp_path / "clone/dexart/env"
    folder.mkdir(parents=True)
    (folder / "task_setting.py").write_text(f"{first_line}\n")
    (folder / "create_env.py").write_text("create_env = None\n")
    monkeypatch.syspath_prepend(str(tmp_path / "clone"))


def test_without_dexart_environment_and_runner_say_where_it_comes_from(no_dexart, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "dexart", None)
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: (_ for _ in ()).throw(importlib.metadata.PackageNotFoundError(name))
    )
    for build in (import_dexart, lambda: DexArtEnv("laptop"), lambda: DexArtRunner(str(tmp_path), "laptop")):
        with pytest.raises(ConfigError, match="package dexart, which is not installed") as error:
            build()
        for part in ("Kami-code/dexart-release", "SAPIEN 2.2.1", "assets/", "Vulkan", "task.env_runner=null"):
            assert part in str(error.value)


def test_without_sapien(no_dexart, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sapien", None)
    clone(tmp_path, monkeypatch, "import sapien.core")
    with pytest.raises(ConfigError, match="package sapien, which is not installed"):
        import_dexart()


def test_sapien_that_cannot_be_loaded(no_dexart, versions, monkeypatch, tmp_path):
    clone(tmp_path, monkeypatch, "raise ImportError('libvulkan.so.1: cannot open shared object file')")
    with pytest.raises(ConfigError, match="cannot be imported: libvulkan.so.1"):
        import_dexart()


def test_without_assets(no_dexart, versions, monkeypatch, tmp_path):
    clone(tmp_path, monkeypatch, "")
    (tmp_path / "clone/assets/robot").mkdir(parents=True)
    with pytest.raises(ConfigError, match="clone/assets has no annotation, sapien"):
        import_dexart()


@pytest.mark.parametrize(
    "package, version, message",
    [("sapien", "3.0.3", "needs SAPIEN 2.2, and 3.0.3"), ("numpy", "2.4.6", "wrong poses.*numpy 2.4.6.*'numpy<2'")],
)
def test_versions_that_do_not_work(dexart, versions, package, version, message):
    import_dexart()
    versions[package] = version
    with pytest.raises(ConfigError, match=message):
        import_dexart()


def test_a_simulator_that_cannot_start(dexart):
    def create_env(**kwargs):
        raise RuntimeError("failed to find a rendering device")

    dexart.create_env.create_env = create_env
    with pytest.raises(
        ConfigError, match="cannot build laptop: RuntimeError: failed to find a rendering device.*NVIDIA"
    ):
        make()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"task": "laptp"}, "no task 'laptp'; did you mean laptop"),
        ({"task": "dishwasher"}, "laptop, faucet, bucket, toilet"),
        ({"num_points": POINTS + 1}, f"has {POINTS} points, {POINTS + 1} are asked for"),
        ({"num_points": 0}, "0 are asked for"),
        ({"state_dim": 33}, "32 numbers of state, 33 are asked for"),
        ({"task": "bucket", "state_dim": 34}, "33 numbers of state, 34"),
    ],
)
def test_what_dexart_does_not_have(dexart, tmp_path, change, message):
    """Known before anything is built: by the runner, in the process that starts the run."""
    dexart.create_env.create_env = None
    with pytest.raises(ConfigError, match=message):
        make(**change)
    with pytest.raises(ConfigError, match=message):
        DexArtRunner(
            str(tmp_path),
            **{
                "task_name": change.get("task", "laptop"),
                "num_points": POINTS,
                **{k: v for k, v in change.items() if k != "task"},
            },
        )


# ---------------------------------------------------------------------- the environment
@pytest.mark.parametrize("task", TASKS)
def test_observations(dexart, task):
    env = make(task, num_points=POINTS - 8)
    obs, _ = env.reset(seed=0)
    assert env.observation_space.contains(obs) and env.control_hz == 25 and env.render_mode == "rgb_array"
    assert {key: value.shape for key, value in obs.items()} == {
        "point_cloud": (POINTS - 8, 3),
        "imagin_robot": (96, 3),
        "agent_pos": (33 if task == "bucket" else 32,),
    }
    assert all(value.dtype == np.float32 for value in obs.values())
    env.reset(seed=4)
    raw = {}
    plain = env.env.observe
    env.env.observe = lambda: raw.update(plain()) or raw
    obs, *_ = env.step(np.zeros(22))
    np.testing.assert_array_equal(obs["point_cloud"], raw["instance_1-point_cloud"][: POINTS - 8].astype(np.float32))
    np.testing.assert_array_equal(obs["imagin_robot"], raw["imagination_robot"][:, :3].astype(np.float32))
    np.testing.assert_array_equal(obs["agent_pos"], raw["state"].astype(np.float32))
    short = make(task, state_dim=31)
    assert short.reset(seed=4)[0]["agent_pos"].shape == (31,)
    np.testing.assert_array_equal(short.step(np.zeros(22))[0]["agent_pos"], obs["agent_pos"][:31])
    image = env.render()
    assert image.shape == (256, 256, 3) and image.dtype == np.uint8 and image[9, 9].tolist() == [255, 127, 0]
    with pytest.raises(ConfigError, match=r"22 numbers, got \(7,\)"):
        env.step(np.zeros(7))
    env.close()


@pytest.mark.parametrize("task", TASKS)
def test_a_start_and_its_noise_are_the_seed_s_alone(dexart, task):
    env = make(task)
    starts, seen = [env.reset(seed=seed)[0] for seed in range(6)], []
    for i, start in enumerate(starts):
        seen.append(env.objects.index(int(start["agent_pos"][0])))
        assert not any(np.array_equal(start["point_cloud"], other["point_cloud"]) for other in starts[:i])
    assert seen == [0, 1, 2, 0, 1, 2]  # all objects equally often
    after = env.reset(seed=4)[0], env.step(np.full(22, 0.01))[0]
    another = make(task)
    another.reset(seed=0)
    again = another.reset(seed=4)[0], another.step(np.full(22, 0.01))[0]
    assert_same(starts[4], after[0])
    for one, other in zip(after, again, strict=False):
        assert_same(one, other)
    held_out = make(task, use_test_set=True)
    assert [int(held_out.reset(seed=seed)[0]["agent_pos"][0]) for seed in range(3)] == [4000, 5000, 4000]


def test_without_a_seed_starts_go_on_from_the_last_one(dexart):
    env = make()
    first = [env.reset(seed=3)[0], env.reset()[0], env.reset()[0]]
    second = [env.reset(seed=3)[0], env.reset()[0], env.reset()[0]]
    for one, other in zip(first, second, strict=False):
        assert_same(one, other)
    assert not np.array_equal(first[1]["point_cloud"], first[2]["point_cloud"])


def test_global_random_numbers_are_left_as_they_were(dexart):
    def numbers():
        return np.random.random(), random.random(), torch.rand(1).item()

    def seed():
        np.random.seed(5), random.seed(5), torch.manual_seed(5)

    seed()
    expected = numbers()
    seed()
    env = make()
    env.reset(seed=1)
    env.reset()
    env.step(np.zeros(22))
    assert numbers() == expected


def test_success_is_worth_one_and_ends_the_episode(dexart):
    env = make()
    env.reset(seed=1)
    goal = env.env.position[0]
    half = np.full(22, 0.6 * goal)
    assert env.step(half)[1:] == (0.0, False, False, {"success": False})
    assert env.step(half)[1:] == (1.0, True, False, {"success": True})
    env = make(terminate_on_success=False)
    env.reset(seed=1)
    env.step(half)
    assert env.step(half)[1:] == (1.0, False, False, {"success": True})
    assert env.step(-half)[1:] == (0.0, False, False, {"success": False})
    over = [env.step(half)[3] for _ in range(27)]
    assert over == [False] * 26 + [True] and env.env.current_step == env.env.horizon


@pytest.mark.parametrize(
    "key, name",
    [("instance_1-point_cloud", "point_cloud"), ("imagination_robot", "imagin_robot"), ("state", "agent_pos")],
)
def test_numbers_that_are_not_finite(dexart, key, name):
    env = make()
    env.reset(seed=0)
    env.env.broken = key
    with pytest.raises(DataError, match=f"{name} of DexArt's laptop is not finite at step 1"):
        env.step(np.zeros(22))


# ---------------------------------------------------------------------- the runner
class Policy:
    """Every action is 0.02: after 24 steps, objects up to 0.48 away are reached."""

    device = torch.device("cpu")

    def __init__(self):
        self.inputs = []

    def reset(self):
        pass

    def predict_action(self, obs):
        self.inputs.append(obs)
        return {"action": torch.full((len(obs["point_cloud"]), 8, 22), 0.02)}


def test_runner(dexart, tmp_path):
    def run(**changes):
        runner = DexArtRunner(
            str(tmp_path),
            "faucet",
            num_points=POINTS,
            **{"n_test": 5, "n_test_vis": 1, "max_steps": 24, "vector": "sync", **changes},
        )
        policy = Policy()
        log = runner.run(policy)
        runner.close()
        return runner, policy, log

    runner, policy, log = run()
    assert isinstance(runner, BaseImageRunner) and runner.n_envs == 1
    assert {key: tuple(value.shape) for key, value in policy.inputs[0].items()} == {
        "point_cloud": (1, 2, POINTS, 3),
        "imagin_robot": (1, 2, 96, 3),
        "agent_pos": (1, 2, 32),
    }
    assert all(value.dtype == torch.float32 for value in policy.inputs[0].values())
    env = make("faucet")
    for episode in runner.episodes:
        env.reset(seed=episode["seed"])
        needed = int(np.ceil(env.env.position[0] / 0.02))
        assert (episode["max_reward"], episode["steps"]) == ((1.0, needed) if needed <= 24 else (0.0, 24))
    scores = {episode["seed"]: episode["max_reward"] for episode in runner.episodes}
    assert list(scores) == [100000 + i for i in range(5)] and set(scores.values()) == {0.0, 1.0}
    assert log["test/mean_score"] == np.mean(list(scores.values())) and "train/mean_score" not in log
    assert iio.imread(log["test/sim_video_100000"]).shape == (
        runner.episodes[0]["steps"] // 2,
        384 + 32,
        384,
        3,
    )  # 25 steps a second, 10 images
    json.dumps(log)
    again, _, _ = run(n_envs=3, n_test_vis=0)
    assert [dict(episode, video=None) for episode in runner.episodes] == again.episodes
    late, policy, _ = run(n_latency_steps=2, n_test_vis=0, stop_on_success=False, n_test=1)
    assert policy.inputs[0]["point_cloud"].shape == (1, 2, POINTS, 3) and late.episodes[0]["steps"] == 24
    assert len(DexArtRunner(str(tmp_path), "toilet", num_points=POINTS)._plan) == 20


# ---------------------------------------------------------------------- the configuration
@pytest.mark.parametrize("task", TASKS)
def test_one_word_chooses_the_task(dexart, tmp_path, task):
    def config(*overrides):
        return load_config(
            "train_idp_mlp_lowdim",
            "task=dexart",
            f"task.name={task}",
            f"++size.pointcloud.num_points={POINTS}",
            *overrides,
        )

    cfg = config()
    state_dim = STATE_DIM[task]
    shapes = {key: list(meta.shape) for key, meta in cfg.task.shape_meta.obs.items()}
    assert shapes == {
        "point_cloud": [POINTS, 3],
        "imagin_robot": [96, 3],
        "agent_pos": [state_dim],
    } and cfg.task.shape_meta.action.shape == [22]
    assert cfg.task_name == task and cfg.task.dataset.zarr_path == f"data/dexart/dexart_{task}_expert.zarr"
    assert cfg.task.dataset.shape_meta == cfg.task.shape_meta and cfg.task.dataset.max_train_episodes == 100
    runner = hydra.utils.instantiate(cfg.task.env_runner, output_dir=str(tmp_path))
    assert (len(runner._plan), runner.max_steps, runner.vector, runner.title) == (20, 50, "async", f"{task} rollouts")
    assert runner._make_env.args[1] == {
        "task_name": task,
        "num_points": POINTS,
        "state_dim": state_dim,
        "use_test_set": False,
        "terminate_on_success": True,
    }
    assert config("preset=cpu", "task.env_runner=null", "task.state_dim=31").task.env_runner is None


# ---------------------------------------------------------------------- the data
def test_public_demonstrations_are_learned_without_dexart(tmp_path):
    path = SHARED / "data/dexart/dexart_laptop_100.zarr"
    if not path.is_dir():
        pytest.skip("the public demonstrations of Laptop are not beside this checkout")
    _, summary = train_here(
        tmp_path / "run",
        "train_idp_mlp_pointcloud",
        "preset=debug",
        "task=dexart",
        "task.name=laptop",
        "task.state_dim=31",
        f"task.zarr_path={path}",
        "task.env_runner=null",
        "task.dataset.val_ratio=0.1",
        "training.steps_per_epoch=100",
        "learning_rate=0.003",
    )
    eval_script.main(["-c", summary["checkpoint"], "--open-loop", "-o", str(tmp_path / "eval"), "-d", "cpu"])
    log = json.loads((tmp_path / "eval/eval_log.json").read_text())
    found = log["open_loop"]
    error = np.square(found["rmse"])
    variance = error / (1 - np.array(found["variance_explained"], dtype=float))
    assert len(found["episodes"]) == 10 and 1 - error.sum() / variance.sum() > 0.3  # the mean action gives 0
