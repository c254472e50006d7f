"""A built wheel holds the packages and the configurations, and they work from inside it."""

import os
import subprocess
import sys
import zipfile

import pytest

from tests.util import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy: building leaves folders behind
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(source)], check=True)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            str(folder),
            str(source),
        ],
        check=True,
    )
    return next(folder.glob("*.whl"))


def test_it_holds_everything(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "diffusion_policy", "idp_workspace", "config"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    expected = {f"diffusion_policy/{path}" if path.startswith("config/") else path for path in tracked}
    assert expected <= names, sorted(expected - names)
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_it_trains_from_elsewhere(wheel, tmp_path):
    """Unpacked into an empty folder, outside the checkout: the configurations are found and a debug run trains."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "from small_data import write_pusht; import pathlib; write_pusht(pathlib.Path('pusht.zarr'))\n"
        "import diffusion_policy.common.config_util as c; assert 'site' in str(c.config_dir()), c.config_dir()\n"
        "from diffusion_policy.scripts.train import main; main()\n"
    )
    (tmp_path / "small_data.py").write_text((ROOT / "benchmarks/data.py").read_text())
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            "--config-name=train_regression_mlp_lowdim",  # a name that only the grid has
            "preset=debug",
            "task.dataset.zarr_path=pusht.zarr",
            "task.env_runner.n_test_vis=0",
            "hydra.run.dir=run",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/checkpoints/latest.ckpt").is_file()
