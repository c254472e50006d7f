import gc
import json
import pathlib

import imageio.v3 as iio
import numpy as np
import pymunk
import pytest
import torch

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.env.pusht.pusht_env import PushTEnv
from diffusion_policy.env_runner.base_image_runner import BaseImageRunner
from diffusion_policy.env_runner.base_lowdim_runner import BaseLowdimRunner
from diffusion_policy.env_runner.pusht_image_runner import PushTImageRunner
from diffusion_policy.env_runner.pusht_keypoints_runner import PushTKeypointsRunner
from diffusion_policy.env_runner.pusht_state_runner import PushTStateRunner
from tests import golden

RUNNERS = {"state": PushTStateRunner, "keypoints": PushTKeypointsRunner, "image": PushTImageRunner}


class Policy:
    """Records what it is given; the actions come from `act(obs_dict, call)` -> (N, Ta, 2)."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, act):
        self.act = act
        self.inputs = []
        self.n_resets = 0

    def reset(self):
        self.n_resets += 1

    def predict_action(self, obs_dict):
        self.inputs.append(obs_dict)
        return {"action": self.act(obs_dict, len(self.inputs) - 1)}


def diagonal(obs_dict, call):
    """The same targets along the diagonal for every environment."""
    n = next(iter(obs_dict.values())).shape[0]
    return torch.linspace(150, 350, 8)[None, :, None].expand(n, 8, 2)


def push(obs_dict, call):
    """From the state: alternate between a point beside the block and its centre, which moves it."""
    obs = obs_dict["obs"][:, -1]
    centre, agent = obs[:, 2:4], obs[:, :2]
    away = agent - centre
    start = centre + 150 * away / away.norm(dim=1, keepdim=True).clamp(min=1e-3)
    return torch.stack([start] * 4 + [centre] * 4, dim=1)


def small(cls, tmp_path, **kwargs):
    defaults = dict(
        n_train=1,
        n_train_vis=0,
        n_test=3,
        n_test_vis=0,
        test_start_seed=100000,
        max_steps=24,
        n_obs_steps=2,
        n_action_steps=8,
    )
    return cls(str(tmp_path), **{**defaults, **kwargs})


@pytest.mark.parametrize("case", ["keypoints", "keypoints_nenvs2", "image"])
def test_scores_equal_upstream(tmp_path, case):
    expected = golden.read("runner")[case]
    runner = RUNNERS[case.split("_")[0]](str(tmp_path), **expected["kwargs"])
    policy = Policy(diagonal)
    log = runner.run(policy)
    assert list(log)[: len(expected["log"])] == expected["log_key_order"]
    for key, value in expected["log"].items():
        if "video" not in key:
            assert log[key] == pytest.approx(value, abs=1e-9)
    assert len(policy.inputs) == expected["n_policy_calls"] and policy.n_resets == expected["n_resets"]
    assert {k: [list(v.shape), str(v.dtype)] for k, v in policy.inputs[0].items()} == expected["obs_spec_first_call"]


@pytest.mark.parametrize(
    "name, shapes",
    [
        ("state", {"obs": (4, 2, 5)}),
        ("keypoints", {"obs": (4, 2, 20), "obs_mask": (4, 2, 20)}),
        ("image", {"image": (4, 2, 3, 96, 96), "agent_pos": (4, 2, 2)}),
    ],
)
def test_what_the_policy_gets_and_what_comes_back(tmp_path, name, shapes):
    runner = small(RUNNERS[name], tmp_path, n_test_vis=1)
    assert isinstance(runner, BaseImageRunner if name == "image" else BaseLowdimRunner)
    policy = Policy(diagonal)
    log = runner.run(policy)
    assert {key: tuple(value.shape) for key, value in policy.inputs[0].items()} == shapes
    for key, value in policy.inputs[0].items():
        assert value.dtype == (torch.bool if key == "obs_mask" else torch.float32)
    test_scores = [log[f"test/sim_max_reward_{seed}"] for seed in (100000, 100001, 100002)]
    assert log["test/mean_score"] == pytest.approx(np.mean(test_scores))
    assert log["train/mean_score"] == log["train/sim_max_reward_0"]
    assert [(e["split"], e["seed"], e["steps"]) for e in runner.episodes] == [
        ("train", 0, 24),
        ("test", 100000, 24),
        ("test", 100001, 24),
        ("test", 100002, 24),
    ]
    video = pathlib.Path(log["test/sim_video_100000"])
    assert video.parent == tmp_path / "media" and runner.episodes[1]["video"] == str(video)
    assert [e["video"] is None for e in runner.episodes] == [True, False, True, True]
    assert video.name == f"test_seed100000_score{test_scores[0]:.2f}.mp4"
    frames = iio.imread(video)
    assert frames.shape == (24, 384 + 32, 384, 3)
    assert frames[:, :384].std(axis=0).max() > 10 and frames[:, 384:].min() < 120  # a moving scene above a caption
    json.dumps(log)


def test_scores_do_not_depend_on_batching_or_processes_or_earlier_runs(tmp_path):
    together = small(PushTStateRunner, tmp_path, max_steps=60)
    scores = together.run(Policy(push))
    assert len({e["max_reward"] for e in together.episodes}) > 1
    assert together.run(Policy(push)) == scores
    assert small(PushTStateRunner, tmp_path, max_steps=60, n_envs=3).run(Policy(push)) == scores
    assert small(PushTStateRunner, tmp_path, max_steps=60, n_envs=1).run(Policy(push)) == scores
    parallel = small(PushTStateRunner, tmp_path, max_steps=60, n_envs=2, vector="async", n_test_vis=1)
    try:
        log = parallel.run(Policy(push))
    finally:
        parallel.close()
    assert {k: v for k, v in log.items() if "video" not in k} == scores
    assert len(iio.imread(log["test/sim_video_100000"])) == 60


def test_environments_are_kept_between_runs(tmp_path):
    runner = small(PushTStateRunner, tmp_path)
    assert runner._slots is None
    runner.run(Policy(diagonal))
    slots = runner._slots
    runner.run(Policy(diagonal))
    assert runner._slots is slots
    runner.close()
    runner.run(Policy(diagonal))


def test_worlds_of_earlier_episodes_are_freed_even_if_the_collector_sees_no_reason(tmp_path):
    runner = small(PushTStateRunner, tmp_path, n_train=0, n_test=2, max_steps=8)

    def alive():
        return sum(type(x) is pymunk.Space for x in gc.get_objects())

    gc.collect()
    before = alive()
    gc.disable()
    try:
        for _ in range(6):
            runner.run(Policy(diagonal))
        assert alive() - before <= 2 * 2  # the last episode's and the one before
    finally:
        gc.enable()


def test_a_finished_episode_stops_while_the_others_go_on(tmp_path, monkeypatch):
    """Start one of the episodes on the goal: it is over after one step, with score 1."""
    plain_reset = PushTEnv.reset

    def reset(self, *, seed=None, options=None):
        state = [50, 50, 256, 256, np.pi / 4] if seed == 100001 else None
        return plain_reset(self, seed=seed, options={"state": state})

    monkeypatch.setattr(PushTEnv, "reset", reset)
    runner = small(PushTStateRunner, tmp_path, n_test_vis=2)
    policy = Policy(lambda obs, call: torch.full((4, 8, 2), 50.0))
    log = runner.run(policy)
    assert [e["steps"] for e in runner.episodes] == [24, 24, 1, 24]
    assert log["test/sim_max_reward_100001"] == 1.0
    assert len(iio.imread(log["test/sim_video_100001"])) == 1
    assert len(policy.inputs) == 3


def test_slots_without_an_episode_simulate_nothing(tmp_path, monkeypatch):
    calls = []
    plain_step = PushTEnv.step
    monkeypatch.setattr(PushTEnv, "step", lambda self, action: calls.append(1) or plain_step(self, action))
    runner = small(PushTStateRunner, tmp_path, n_envs=3)  # 4 episodes: 2 of the last 3 slots are idle
    runner.run(Policy(diagonal))
    assert len(calls) == sum(e["steps"] for e in runner.episodes) == 4 * 24


def test_train_or_test_may_be_empty(tmp_path):
    log = small(PushTStateRunner, tmp_path, n_train=0).run(Policy(diagonal))
    assert "test/mean_score" in log and not any(key.startswith("train") for key in log)
    log = small(PushTStateRunner, tmp_path, n_test=0).run(Policy(diagonal))
    assert list(log)[:2] == ["train/sim_max_reward_0", "train/mean_score"]
    assert all(key.startswith("train/") for key in log)
    with pytest.raises(ConfigError, match="no episode"):
        small(PushTStateRunner, tmp_path, n_train=0, n_test=0)
    with pytest.raises(ConfigError, match="'sync' or 'async'"):
        small(PushTStateRunner, tmp_path, vector="threads")


def test_past_actions_are_the_executed_ones(tmp_path):
    policy = Policy(lambda obs, call: torch.arange(8.0)[None, :, None].expand(4, 8, 2) + 100 + 10 * call)
    small(PushTStateRunner, tmp_path, n_obs_steps=3, past_action=True).run(policy)
    assert "past_action" not in policy.inputs[0]
    assert policy.inputs[1]["past_action"].shape == (4, 2, 2)
    assert policy.inputs[2]["past_action"][0, :, 0].tolist() == [116, 117]


def test_latency_shows_old_observations_and_drops_the_first_actions(tmp_path):
    def act(obs, call):
        return torch.tensor([[450.0, 450.0]] * 2 + [[60.0, 60.0]] * 6).expand(4, 8, 2)

    late, policy = small(PushTStateRunner, tmp_path, n_latency_steps=2), Policy(act)
    late.run(policy)
    reference = PushTEnv()
    states = [reference.reset(seed=0)[0]] + [reference.step([60, 60])[0] for _ in range(6)]
    # 6 of 8 actions are executed per call; the policy then sees the states after 3 and 4 of them.
    np.testing.assert_allclose(policy.inputs[1]["obs"][0].numpy(), states[3:5], rtol=1e-6)
    with pytest.raises(ConfigError, match="n_latency_steps"):
        small(PushTStateRunner, tmp_path, n_latency_steps=8).run(Policy(diagonal))


def test_latency_can_be_measured(tmp_path, monkeypatch):
    """An environment of 10 Hz and a policy of 180 ms: two control steps."""
    from diffusion_policy.workspace import measurement

    monkeypatch.setattr(measurement, "latency", lambda policy, obs, device: {"p50": 180.0})
    runner, policy = small(PushTStateRunner, tmp_path, n_latency_steps="measured"), Policy(diagonal)
    scores = runner.run(policy)
    assert runner.n_latency_steps == 2
    assert scores == small(PushTStateRunner, tmp_path, n_latency_steps=2).run(Policy(diagonal))
    for wrong in ("soon", -1, 1.5):
        with pytest.raises(ConfigError, match="n_latency_steps"):
            small(PushTStateRunner, tmp_path, n_latency_steps=wrong)


def test_the_latency_of_a_fast_policy_is_no_step(tmp_path):
    runner = small(PushTStateRunner, tmp_path, n_latency_steps="measured", max_steps=4)
    runner.run(Policy(diagonal))
    assert runner.n_latency_steps == 0


def test_an_action_that_is_not_finite_is_an_error_with_its_seed_and_step(tmp_path):
    def act(obs, call):
        action = diagonal(obs, call).clone()
        if call == 1:
            action[2, 3, 0] = float("nan")
        return action

    runner = small(PushTStateRunner, tmp_path)
    with pytest.raises(RuntimeError, match="not finite.*seed 100001 after 8 steps"):
        runner.run(Policy(act))
    runner.run(Policy(diagonal))  # and the runner can be used again


def test_held_out_episodes_are_reported_beside_the_test_ones(tmp_path):
    alone = small(PushTStateRunner, tmp_path, n_train=0, n_test=2, test_start_seed=0)
    both = small(PushTStateRunner, tmp_path, n_train=0, n_test=2, test_start_seed=0, n_heldout=2, heldout_start_seed=50)
    expected, log = alone.run(Policy(push)), both.run(Policy(push))
    assert {key: value for key, value in log.items() if key.startswith("test/")} == expected
    scores = [log[f"heldout/sim_max_reward_{seed}"] for seed in (50, 51)]
    assert log["heldout/mean_score"] == pytest.approx(np.mean(scores))
    other = small(PushTStateRunner, tmp_path, n_train=0, n_test=2, test_start_seed=50).run(Policy(push))
    assert other["test/mean_score"] == log["heldout/mean_score"]


def stand(obs_dict, call):
    """Stay where the agent is."""
    return obs_dict["obs"][:, -1:, :2].expand(-1, 8, -1)


def test_an_evaluation_says_whether_episodes_end_standing_still(tmp_path):
    still = small(PushTStateRunner, tmp_path, max_steps=48).run(Policy(stand))
    moving = small(PushTStateRunner, tmp_path, max_steps=48).run(Policy(push))
    assert still["test/ends_still"] == 1 and moving["test/ends_still"] == 0
    assert still["test/path_length"] < 10 < 500 < moving["test/path_length"]
    runner = small(PushTStateRunner, tmp_path, max_steps=48)
    log = runner.run(Policy(push))
    assert log["test/final_score"] == np.mean([e["final_reward"] for e in runner.episodes if e["split"] == "test"])
    assert log["test/final_score"] <= log["test/mean_score"]


def test_noise_moves_a_policy_that_stands_still_and_depends_on_the_seeds_only(tmp_path):
    logs = [
        small(PushTStateRunner, tmp_path, max_steps=48, act_noise=20.0, n_envs=n).run(Policy(stand)) for n in (None, 1)
    ]
    assert logs[0] == logs[1] and logs[0]["test/ends_still"] == 0
    for wrong in (-1.0, float("nan"), "much"):
        with pytest.raises(ConfigError, match="act_noise"):
            small(PushTStateRunner, tmp_path, act_noise=wrong)
