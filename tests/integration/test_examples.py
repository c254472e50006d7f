"""The examples run, and do what they say."""

import importlib
import re

import numpy as np
import pytest
import torch

from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.dataset.recordings import open_recordings
from tests.util import ROOT, write_pusht

NOTEBOOK = ROOT / "examples/idp_from_scratch.ipynb"


@pytest.fixture(autouse=True)
def keep_random_state():
    with torch.random.fork_rng(devices=[]):
        yield


def example(name: str):
    return importlib.import_module(f"examples.{name}")


def test_your_own_data(tmp_path):
    assert example("your_own_data").main(str(tmp_path)) < 0.05
    assert (tmp_path / "mine.zarr").is_dir()


def test_your_own_robot(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    robot = example("your_own_robot")
    assert robot.main(robot.record_and_train(tmp_path)) < 0.1


def test_your_own_objective():
    losses = example("your_own_objective").main()
    assert set(losses) == {"mlp", "transformer", "unet"}
    assert all(after < 0.8 * before for before, after in losses.values())


def test_your_own_objective_checks_its_options():
    with pytest.raises(ValueError, match="delta"):
        example("your_own_objective").HuberPolicy.Options(delta=-1.0)


def test_your_own_task(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert example("your_own_task").main(str(tmp_path)) > 0.9
    assert list((tmp_path / "run/eval/media").glob("*.mp4"))


@pytest.mark.parametrize("images", [False, True])
def test_pusht_for_lerobot(tmp_path, capsys, images):
    """Positions, corners of the block and mirrored episodes, as they are in the recordings of LeRobot."""
    path = write_pusht(tmp_path / "pusht.zarr", episodes=2, length=12)
    source = ReplayBuffer.create_from_path(str(path), mode="r+")
    frames = np.random.default_rng(0).integers(0, 256, (24, 96, 96, 3), dtype=np.uint8)
    if images:
        source.data.create_array("img", data=frames)
    script, state = example("pusht_for_lerobot"), source["state"][:]
    script.main([str(tmp_path / "out"), "--data", str(path), "--mirror", *["--images"] * images])
    written = open_recordings(tmp_path / "out")
    assert written.lengths == [12] * 4 and written.fps == 10 and bool(written.cameras) == images
    first, mirrored = written.episode(0), written.episode(1)
    np.testing.assert_allclose(first["observation.state"], state[:12, :2])
    np.testing.assert_allclose(mirrored["action"], 512 - first["action"][:, ::-1], atol=1e-4)
    corners = first["observation.environment_state"].reshape(12, 8, 2)
    centres = np.stack([state[:12, 2] - 60 * np.sin(state[:12, 4]), state[:12, 3] + 60 * np.cos(state[:12, 4])], axis=1)
    assert (np.linalg.norm(corners - centres[:, None], axis=-1) < 90).all()  # the T is 120 x 120
    flipped = 512 - corners[:, :, ::-1]
    distances = np.linalg.norm(
        mirrored["observation.environment_state"].reshape(12, 8, 1, 2) - flipped[:, None], axis=-1
    )
    assert (distances.min(axis=2) < 1e-3).all()  # the same points, in another order
    with pytest.raises(SystemExit):
        script.main([str(tmp_path / "none"), "--data", str(write_pusht(tmp_path / "b.zarr")), "--images"])
    assert "has no images (img)" in capsys.readouterr().err


def test_notebook_is_committed_with_outputs():
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, 4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert NOTEBOOK.stat().st_size < 500_000
    images = [output for cell in cells for output in cell.outputs if "image/png" in output.get("data", {})]
    assert len(images) >= 3
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]


def test_notebook_runs(monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, 4)
    resources = {"metadata": {"path": str(ROOT / "examples")}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    text = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    untrained, trained = map(float, re.findall(r"mean score ([\d.]+)", text))
    assert "largest difference" in text and trained > untrained
