"""A checkpoint to a robot in real time: PushT's simulator, and a robot of one's own."""

import json

import numpy as np
import pytest

from benchmarks.untrained import export_untrained, untrained
from diffusion_policy.common.errors import ConfigError
from diffusion_policy.policy.interface import ChunkPredictor, interface_of
from diffusion_policy.real_world import ActionChunkExecutor, DelayedPlanner, SimulatedClock
from diffusion_policy.real_world.simulated import pusht
from diffusion_policy.scripts import export
from diffusion_policy.scripts.run_robot import main


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return export_untrained(tmp_path_factory.mktemp("export"), "train_idp_mlp_lowdim", "preset=debug")


@pytest.mark.parametrize("exported", [False, True], ids=["weights", "onnx"])
def test_the_simulator_runs_in_real_time(checkpoint, exported, tmp_path, capsys):
    if exported:
        export.main(["-c", str(checkpoint), "-o", str(tmp_path / "model.onnx")])
        checkpoint = tmp_path / "model.onnx"
    # A busy machine may keep a plan waiting for seconds.
    options = ["--hz", "100", "--seconds", "0.5", "--max-step", "5", "--watchdog", "30"]
    main(["-c", str(checkpoint), "-o", str(tmp_path / "out"), *options])
    report = json.loads((tmp_path / "out/cadence.json").read_text())
    assert report["steps"] >= 50 and report["fault"] is None and report["plans"]["accepted"] > 0
    out = capsys.readouterr().out
    assert "of 100 Hz" in out and "score" in out and (tmp_path / "out/cadence.png").is_file()


ROBOT = """
class Arm:
    hz, closed = 200, 0
    def __init__(self, interface):
        self.count, self.shape = 0, interface.observation["obs"].shape
    @property
    def finished(self):
        return self.count >= 20
    def read_observation(self):
        import numpy as np
        return {"obs": np.full(self.shape, 0.5)}
    def send_action(self, action):
        assert action.shape == (2,)
        self.count += 1
    def close(self):
        Arm.closed += 1
"""


def test_a_robot_of_ones_own(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "my_arm.py").write_text(ROBOT)
    monkeypatch.chdir(tmp_path)
    main(["-c", str(checkpoint), "--robot", "my_arm:Arm", "-o", "out", "--watchdog", "30"])
    import my_arm

    assert my_arm.Arm.closed == 1
    assert json.loads((tmp_path / "out/cadence.json").read_text())["steps"] >= 20


@pytest.mark.parametrize("robot", ["my_arm", "no_such_module:make", "json:no_such_function"])
def test_a_robot_that_cannot_be_made_is_one_line(checkpoint, robot, capsys):
    with pytest.raises(SystemExit) as end:
        main(["-c", str(checkpoint), "--robot", robot])
    assert end.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "config, overrides",
    [
        ("train_idp_mlp_lowdim", []),
        ("train_idp_mlp_lowdim", ["task=pusht_keypoint"]),
        ("train_idp_mlp_image", []),
        ("train_diffusion_unet_lowdim_workspace", []),
        ("train_diffusion_transformer_lowdim_pusht_workspace", []),
    ],
    ids=lambda value: str(value),
)
def test_every_kind_of_policy_drives_pusht(config, overrides):
    policy, _ = untrained(config, "preset=debug", *overrides)
    robot = pusht(interface_of(policy), seed=3)
    executor = ActionChunkExecutor(
        policy,
        robot.read_observation,
        robot.send_action,
        10,
        planner=lambda plan: DelayedPlanner(plan, 2),
        clock=SimulatedClock(),
    )
    report = executor.run(steps=20)
    assert report.counts["held"] == 0 and set(report.delays) == {2}


def test_a_chunk_starts_at_the_step_of_the_last_observation():
    """With more predicted than executed steps, the rest of the prediction is there for late plans."""
    policy, _ = untrained("train_regression_mlp_lowdim", "preset=debug")
    history = {"obs": np.random.default_rng(0).random((policy.n_obs_steps, 5))}
    predict = ChunkPredictor(policy)
    chunk, executed = predict(history), predict.executed({"obs": history["obs"][None]})[0]
    assert len(chunk) == policy.horizon - policy.n_obs_steps + 1 > len(executed) == policy.n_action_steps
    np.testing.assert_allclose(chunk[: len(executed)], executed, atol=1e-6)


def test_a_policy_that_does_not_tell_what_it_observes():
    with pytest.raises(ConfigError, match="obs_shapes"):
        interface_of(object())
