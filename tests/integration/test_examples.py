"""The examples run, and do what they say."""

import importlib
import re

import pytest
import torch

from tests.util import ROOT

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
