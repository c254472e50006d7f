"""load_policy: a policy to act with, from whatever a run leaves behind, without the classes that trained it."""

import json
import os
import subprocess
import sys

import pytest
import torch

from diffusion_policy import load_policy
from diffusion_policy.common.errors import CheckpointError, ConfigError
from diffusion_policy.scripts import eval as eval_script
from diffusion_policy.scripts.convert_checkpoint import convert
from diffusion_policy.storage import checkpoint_io, weights_io
from tests.util import ROOT, equal, train_here, write_pusht

OBS = {"obs": torch.rand(3, 2, 5) * 400}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("load")
    data = write_pusht(folder / "pusht.zarr")
    overrides = (f"task.dataset.zarr_path={data}", "task.env_runner.n_test_vis=0", "checkpoint.topk.k=2")
    workspace, _ = train_here(folder / "run", "train_idp_mlp_lowdim", "preset=debug", *overrides)
    return folder / "run", workspace.policy.eval().predict_action(OBS)


def test_a_checkpoint_a_run_folder_and_an_export_act_the_same(run, tmp_path):
    folder, expected = run
    export = convert(folder, tmp_path / "weights")
    for path in (folder / "checkpoints/latest.ckpt", str(folder), folder / "checkpoints", export):
        policy = load_policy(path, device="cpu")
        assert equal(policy.predict_action(OBS), expected) and not policy.training


def with_classes(folder, **targets):
    """The run's checkpoint with other classes in its config."""
    payload = checkpoint_io.load(folder / "checkpoints/latest.ckpt")
    for section, target in targets.items():
        parent = payload["cfg"] if section in ("optimizer", "ema") else payload["cfg"]["task"]
        parent[section]["_target_"] = target
    return payload


def test_the_classes_that_trained_it_are_not_needed(run, tmp_path):
    folder, expected = run
    payload = with_classes(
        folder, dataset="my_robot.Data", env_runner="my_robot.Runner", optimizer="my_robot.Adam", ema="my_robot.Ema"
    )
    payload["cfg"]["_target_"] = "my_robot.Workspace"
    checkpoint_io.save(payload, tmp_path / "own.ckpt")
    export = convert(tmp_path / "own.ckpt", tmp_path / "weights")
    for path in (tmp_path / "own.ckpt", export):
        assert equal(load_policy(path, device="cpu").predict_action(OBS), expected)
    cfg = json.loads((export / weights_io.CONFIG).read_text())["cfg"]
    assert set(cfg) == {"name", "policy", "task", "training"} and set(cfg["task"]) == {"name", "env_runner"}
    with pytest.raises(CheckpointError, match="my_robot"):
        checkpoint_io.load(tmp_path / "own.ckpt")


def test_eval_needs_the_runner_and_not_the_dataset(run, tmp_path, capsys):
    folder, _ = run
    arguments = ["-c", str(tmp_path / "own.ckpt"), "-n", "1", "-o", str(tmp_path / "out")]
    checkpoint_io.save(with_classes(folder, env_runner="my_robot.Own"), tmp_path / "own.ckpt")
    with pytest.raises(SystemExit):
        eval_script.main(arguments)
    assert "my_robot.Own" in capsys.readouterr().err
    checkpoint_io.save(with_classes(folder, dataset="my_robot.Own"), tmp_path / "own.ckpt")
    eval_script.main(arguments)
    assert (tmp_path / "out/eval_log.json").is_file()


def test_the_best_checkpoint_is_the_one_with_the_best_monitored_score(run, tmp_path):
    folder, _ = run
    payload = checkpoint_io.load(folder / "checkpoints/latest.ckpt")
    scores = {"a.ckpt": 0.1, "../b.ckpt": 0.9, "c.ckpt": 0.5, "gone.ckpt": 1.0, "nan.ckpt": float("nan")}
    payload["state_dicts"]["topk"]["values"] = scores
    inside = tmp_path / "run/checkpoints"
    weights = payload["state_dicts"]["ema_model"]
    name = max(weights, key=lambda key: weights[key].numel())
    for number, file in enumerate(("a", "b", "c", "latest")):
        weights[name].fill_(number)
        checkpoint_io.save(payload, inside / f"{file}.ckpt")

    def loaded(**options):
        return load_policy(tmp_path / "run", device="cpu", **options).state_dict()[name].flatten()[0].item()

    assert loaded(best=True) == 1
    payload["cfg"]["checkpoint"]["topk"]["mode"] = "min"
    checkpoint_io.save(payload, inside / "latest.ckpt")
    assert loaded(best=True) == 0 and loaded() == 3
    payload["state_dicts"]["topk"]["values"] = {}
    checkpoint_io.save(payload, inside / "latest.ckpt")
    with pytest.raises(CheckpointError, match="monitored score"):
        load_policy(tmp_path / "run", best=True)
    with pytest.raises(CheckpointError, match="not a run folder"):
        load_policy(inside / "a.ckpt", best=True)


def test_what_is_no_policy_is_named(run, tmp_path):
    folder, _ = run
    with pytest.raises(CheckpointError, match="neither a run folder"):
        load_policy(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        load_policy(tmp_path / "nothing.ckpt")
    with pytest.raises(ConfigError, match="tpu9"):
        load_policy(folder, device="tpu9")
    payload = checkpoint_io.load(folder / "checkpoints/latest.ckpt")
    payload["cfg"]["policy"] = {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}
    checkpoint_io.save(payload, tmp_path / "layer.ckpt")
    with pytest.raises(CheckpointError, match="not a policy"):
        load_policy(tmp_path / "layer.ckpt")


def test_nothing_else_is_imported(run):
    """Datasets, runners, workspaces and simulators are neither needed nor loaded."""
    folder, _ = run
    code = (
        f"from diffusion_policy import load_policy; load_policy({str(folder)!r}, device='cpu')\n"
        "import sys; print(*[name for name in sys.modules if name.startswith(('diffusion_policy.dataset', "
        "'diffusion_policy.env', 'diffusion_policy.workspace.train', 'gymnasium', 'pymunk'))])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout.split(), done.stdout + done.stderr
