"""Score against delay: the two loops, and the study's files."""

import json

import numpy as np
import pytest

from benchmarks import latency_vs_score
from benchmarks.fleet import RUNTIME, WAITS, play
from benchmarks.untrained import export_untrained, untrained
from diffusion_policy.env_runner.pusht_state_runner import PushTStateRunner

SEEDS = range(100_000, 100_003)


@pytest.fixture(scope="module")
def policy():
    policy, _ = untrained("train_regression_mlp_lowdim", "preset=debug")
    policy.normalizer["action"].params_dict["scale"].data.fill_(1 / 200)  # actions all over the table
    return policy


def test_without_a_delay_both_loops_play_as_the_runner(policy, tmp_path):
    runner = PushTStateRunner(
        str(tmp_path), n_train=0, n_test=3, n_test_vis=0, test_start_seed=100_000, max_steps=40, n_obs_steps=2
    )
    runner.run(policy)
    expected = [episode["max_reward"] for episode in runner.episodes]
    for mode in (WAITS, RUNTIME):
        np.testing.assert_allclose(play(policy, 0, mode, SEEDS, steps=40), expected, atol=1e-6)


def test_a_waiting_robot_stands_still_during_the_delay(policy, monkeypatch):
    def sent(delay, mode):
        actions = []
        monkeypatch.setattr(
            "benchmarks.fleet.Fleet.send_action", lambda fleet, action: actions.append(np.array(action)[0])
        )
        play(policy, delay, mode, SEEDS, steps=24)
        return np.abs(np.diff(actions, axis=0)).sum(axis=1)

    moves = sent(4, WAITS)
    assert (moves[7:11] == 0).all() and (moves[:7] > 0).all()  # 8 actions, then 4 steps at the last one
    assert (sent(4, RUNTIME)[7:11] > 0).any()  # the rest of the prediction


def test_the_study_writes_its_table_and_figure(tmp_path):
    for method in ("idp", "mip"):
        export_untrained(tmp_path / "runs" / method, f"train_{method}_mlp_lowdim", "preset=debug")
    options = ["--delays", "0", "3", "--episodes", "2", "--steps", "20", "--preset", "debug"]
    options += ["--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "out")]
    latency_vs_score.main([*options, "--only", "mip"])
    data = json.loads((tmp_path / "out/results.json").read_text())
    assert len(data["rows"]) == 4 and set(data["own_delay"]) == {"mip"}
    assert "| MIP | with the runtime |" in (tmp_path / "out/README.md").read_text()
    assert (tmp_path / "out/latency_vs_score.png").stat().st_size > 1000
    latency_vs_score.main(["--only-latency", "--preset", "debug", "--output", str(tmp_path / "out")])
    again = json.loads((tmp_path / "out/results.json").read_text())
    assert again["rows"] == data["rows"] and again["own_delay"] != data["own_delay"]
    latency_vs_score.main([*options, "--only", "idp"])
    both = json.loads((tmp_path / "out/results.json").read_text())
    assert both["rows"][:4] == data["rows"] and set(both["own_delay"]) == {"idp", "mip"}
    latency_vs_score.main([*options, "--only", "idp", "--episodes", "1"])  # others are not comparable
    assert {row["method"] for row in json.loads((tmp_path / "out/results.json").read_text())["rows"]} == {"idp"}
