import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import shapely
import shapely.affinity
from hypothesis import given, settings
from hypothesis import strategies as st

import diffusion_policy.env.pusht  # noqa: F401  registers the ids
from diffusion_policy.env.pusht import tee
from diffusion_policy.env.pusht.pusht_env import PushTEnv
from diffusion_policy.env.pusht.pusht_image_env import PushTImageEnv
from diffusion_policy.env.pusht.pusht_keypoints_env import BLOCK_KEYPOINTS, PushTKeypointsEnv
from tests import golden

GOAL = (256.0, 256.0, np.pi / 4)


@pytest.fixture(scope="module")
def upstream():
    return golden.read("pusht_env")


def rollout(env, actions, **reset):
    """-> states (N+1, 5), rewards (N,), terminations (N,), infos (N, 8)."""
    states, rewards, dones, infos = [env.reset(**reset)[0]], [], [], []
    for action in actions:
        obs, reward, terminated, _, info = env.step(action)
        states.append(obs)
        rewards.append(reward)
        dones.append(terminated)
        infos.append(np.concatenate([info["pos_agent"], info["vel_agent"], info["block_pose"], [info["n_contacts"]]]))
    return np.array(states), np.array(rewards), np.array(dones), np.array(infos)


def pushing_actions(seed, n=60):
    """Targets around the middle of the window, where the block is."""
    return np.random.default_rng(seed).uniform(150, 380, (n, 2))


# Against upstream


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_trajectories_equal_upstream(upstream, legacy, seed):
    prefix = f"legacy{int(legacy)}_seed{seed}_"
    states, rewards, dones, infos = rollout(PushTEnv(legacy=legacy), upstream[prefix + "actions"], seed=seed)
    np.testing.assert_allclose(states, upstream[prefix + "states"], rtol=0, atol=1e-9)
    np.testing.assert_allclose(rewards, upstream[prefix + "rewards"], rtol=0, atol=1e-12)
    np.testing.assert_array_equal(dones, upstream[prefix + "dones"])
    np.testing.assert_allclose(infos, upstream[prefix + "info"], rtol=0, atol=1e-9)


def test_starts_equal_upstream(upstream):
    names = [name for name in upstream if name.startswith("reset_")]
    assert len(names) > 40
    for name in names:
        _, legacy, seed = name.split("_")
        obs, _ = PushTEnv(legacy=legacy == "legacy1").reset(seed=int(seed[4:]))
        np.testing.assert_allclose(obs, upstream[name], rtol=0, atol=1e-9)


@pytest.mark.parametrize("agent_keypoints", [False, True])
@pytest.mark.parametrize("rate", [1.0, 0.7])
def test_keypoints_and_visibility_equal_upstream(upstream, agent_keypoints, rate):
    name = f"kpenv_ak{int(agent_keypoints)}_rate{rate}"
    env = PushTKeypointsEnv(legacy=True, agent_keypoints=agent_keypoints, keypoint_visible_rate=rate)
    obs = [env.reset(seed=3)[0]] + [env.step(action)[0] for action in upstream["kpenv_actions"]]
    np.testing.assert_allclose(obs, upstream[name + "_obs"], rtol=0, atol=1e-9)
    np.testing.assert_array_equal(env.observation_space.high, upstream[name + "_high"])


def test_images_equal_upstream_up_to_edges(upstream):
    """Upstream's pygame (2.1) fills polygons and thick lines one pixel differently along edges."""
    env = PushTImageEnv(legacy=True)
    images, frames = [env.reset(seed=3)[0]["image"]], [env.render()]
    for action in upstream["kpenv_actions"]:
        images.append(env.step(action)[0]["image"])
        frames.append(env.render())
    for ours, theirs in (
        (np.array(images).transpose(0, 2, 3, 1) * 255, upstream["imgenv_image"].transpose(0, 2, 3, 1).astype(float)),
        (np.array(frames, dtype=float), upstream["imgenv_render"]),
    ):
        difference = np.abs(ours - theirs).max(-1)
        assert (difference > 0.5).mean() < 0.006
        assert difference.mean() < 0.3


def test_keypoints_equal_the_human_data(human_pusht):
    zarr = pytest.importorskip("zarr")
    data = zarr.open(str(human_pusht), mode="r")["data"]
    state, keypoint = data["state"][:2000].astype(float), data["keypoint"][:2000].astype(float)
    cos, sin = np.cos(state[:, 4]), np.sin(state[:, 4])
    rotation = np.stack([np.stack([cos, -sin], -1), np.stack([sin, cos], -1)], -2)
    ours = np.einsum("nij,kj->nki", rotation, BLOCK_KEYPOINTS) + state[:, None, 2:4]
    # Rows recorded while the block was being pushed lag by a substep; most are exact.
    assert np.median(np.abs(ours - keypoint).max(axis=(1, 2))) < 1e-3


# On their own


def test_same_seed_same_trajectory_and_a_used_environment_is_as_good_as_new():
    actions = pushing_actions(1)
    fresh = rollout(PushTEnv(), actions, seed=3)
    used = PushTEnv()
    rollout(used, pushing_actions(2), seed=2)
    assert np.ptp(fresh[0][:, 2]) > 1, "the actions must move the block"
    for a, b in zip(fresh, rollout(used, actions, seed=3), strict=False):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(used.reset()[0], fresh[0][0])
    assert not np.array_equal(used.reset(seed=8)[0], fresh[0][0])


@pytest.mark.parametrize("legacy", [False, True])
def test_set_state(legacy):
    state = np.array([100.0, 120.0, 250.0, 260.0, 2.5])
    by_option, _ = PushTEnv(legacy=legacy).reset(options={"state": state})
    by_argument, _ = PushTEnv(legacy=legacy, reset_to_state=state).reset(seed=5)
    np.testing.assert_array_equal(by_option, by_argument)
    np.testing.assert_allclose(by_option[[0, 1, 4]], state[[0, 1, 4]], atol=1e-9)
    # Legacy order turns the block about its centre of gravity (0, 45) after placing its origin.
    shift = np.array([45 * np.sin(2.5), 45 - 45 * np.cos(2.5)]) if legacy else 0
    np.testing.assert_allclose(by_option[2:4], state[2:4] + shift, atol=1e-9)
    with pytest.raises(ValueError, match="5 finite numbers"):
        PushTEnv().reset(options={"state": state[:4]})


def test_success_at_the_goal():
    env = PushTEnv(reset_to_state=[100, 100, *GOAL])
    env.reset()
    _, reward, terminated, truncated, _ = env.step([100, 100])
    assert reward == 1.0 and terminated and not truncated


def test_step_without_action_does_not_move():
    env = PushTEnv()
    obs, _ = env.reset(seed=0)
    env.step([400, 400])
    before = env.step(None)[0]
    np.testing.assert_array_equal(env.step(None)[0], before)
    assert not np.array_equal(before, obs)


def shapely_tee(pose):
    shape = shapely.union_all([shapely.box(*tee.BAR), shapely.box(*tee.STEM)])
    shape = shapely.affinity.rotate(shape, pose[2], origin=(0, 0), use_radians=True)
    return shapely.affinity.translate(shape, pose[0], pose[1])


near = st.floats(156, 356)


@given(x=near, y=near, angle=st.floats(-10, 10))
@settings(max_examples=300)
def test_shared_area_equals_shapely(x, y, angle):
    pose = (x, y, angle)
    expected = shapely_tee(GOAL).intersection(shapely_tee(pose)).area
    assert tee.shared_area(GOAL, pose) == pytest.approx(expected, abs=1e-9 * tee.AREA)
    assert tee.shared_area(pose, GOAL) == pytest.approx(expected, abs=1e-9 * tee.AREA)
    assert tee.shared_area(pose, pose) == pytest.approx(tee.AREA)


def test_reward_is_the_covered_share_of_the_goal():
    env = PushTEnv()
    for seed in range(10):
        env.reset(seed=seed)
        for action in pushing_actions(seed, 20):
            obs, reward, *_ = env.step(action)
            covered = shapely_tee(GOAL).intersection(shapely_tee(obs[2:])).area / tee.AREA
            assert reward == pytest.approx(min(covered / 0.95, 1.0), abs=1e-9)


def test_keypoints_turn_with_the_block():
    env = PushTKeypointsEnv()
    here = env.reset(options={"state": [50, 50, 200, 220, 0.3]})[0]
    turned = env.reset(options={"state": [50, 50, 200, 220, 0.3 + np.pi / 2]})[0]
    assert here.shape == (40,) and (here[20:] == 1).all()
    a, b = here[:18].reshape(9, 2) - [200, 220], turned[:18].reshape(9, 2) - [200, 220]
    np.testing.assert_allclose(b, np.stack([-a[:, 1], a[:, 0]], -1), atol=1e-9)
    np.testing.assert_array_equal(here[18:20], [50, 50])


def test_visibility_rate_and_its_generator():
    def masks(seed):
        env = PushTKeypointsEnv(keypoint_visible_rate=0.6)
        env.reset(seed=seed)
        return np.array([env.step(None)[0][20:] for _ in range(200)])

    first = masks(1)
    np.testing.assert_array_equal(first, masks(1))
    assert not np.array_equal(first, masks(2))
    assert abs(first[:, :18].mean() - 0.6) < 0.05 and (first[:, 18:] == 1).all()
    np.testing.assert_array_equal(first[:, 0:18:2], first[:, 1:18:2])


def test_keypoint_params_rebuild_the_environment():
    params = PushTKeypointsEnv.genenerate_keypoint_manager_params()
    assert params["local_keypoint_map"]["block"].shape == (9, 2)
    plain, _ = PushTKeypointsEnv().reset(seed=4)
    given_params, _ = PushTKeypointsEnv(draw_keypoints=True, **params).reset(seed=4)
    np.testing.assert_array_equal(plain, given_params)


def test_draw_keypoints_changes_the_picture():
    plain, drawn = PushTKeypointsEnv(), PushTKeypointsEnv(draw_keypoints=True, agent_keypoints=True)
    plain.reset(seed=4)
    drawn.reset(seed=4)
    changed = (plain.render() != drawn.render()).any(-1)
    assert 9 <= changed.sum() < 200


def test_image_observation():
    env = PushTImageEnv()
    obs, _ = env.reset(seed=1)
    assert env.observation_space.contains(obs)
    assert obs["image"].shape == (3, 96, 96) and obs["image"].dtype == np.float32
    assert obs["image"].min() >= 0 and obs["image"].max() == 1
    obs, *_ = env.step([400, 100])
    frame = env.render()
    assert frame.shape == (96, 96, 3) and frame.dtype == np.uint8
    # The cross of the action, at (75, 18), is on the frame and not in the observation.
    np.testing.assert_array_equal(frame[18, 75], [255, 0, 0])
    assert obs["image"][:, 18, 75].tolist() != [1, 0, 0]


@pytest.mark.parametrize("env_id, dim", [("pusht-state-v0", 5), ("pusht-keypoints-v0", 40), ("pusht-image-v0", None)])
def test_registered_ids(env_id, dim):
    env = gymnasium.make(env_id)
    obs, _ = env.reset(seed=0)
    assert env.observation_space.contains(obs)
    assert dim is None or obs.shape == (dim,)
    obs, reward, *_ = env.step(env.action_space.sample())
    assert env.observation_space.contains(obs) and 0 <= reward <= 1


def test_pygame_is_loaded_only_for_rendering(repo_root):
    code = (
        "import sys; from diffusion_policy.env.pusht.pusht_keypoints_env import PushTKeypointsEnv as E; "
        "e = E(); e.reset(seed=0); e.step([1, 1]); assert 'pygame' not in sys.modules; "
        "e.render(); assert 'pygame' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=repo_root, check=True)
