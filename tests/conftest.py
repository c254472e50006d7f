"""Shared fixtures. Public data sets beside the checkout are used when they are there and never needed."""

import gc
import os
import pathlib
import zipfile

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
os.environ.setdefault("WANDB_MODE", "disabled")

import hypothesis
import pytest
import torch

from diffusion_policy.gym_util.mujoco_point_cloud import choose_renderer

choose_renderer()  # before a test module imports robosuite, which would choose a GPU renderer
torch.set_num_threads(1)
hypothesis.settings.register_profile("any_machine", deadline=None)  # a busy one is slow at any example
hypothesis.settings.load_profile("any_machine")

ROOT = pathlib.Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
#: The files that take longest. A worker takes whole files: one of these at the end would leave the others idle.
LONGEST = (
    *("test_configs", "test_robomimic_env", "test_examples", "test_commands", "test_mistakes", "test_faults"),
    *("test_hybrid_policies", "test_objectives_distilled", "test_export_graphs", "test_image_policy"),
)


def pytest_configure(config):
    config.option.loadscopereorder = False  # xdist would start the files with most tests first


def pytest_collection_modifyitems(items):
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))


def pytest_collection_finish():
    """What is imported stays: garbage collections, of which every run makes several, need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def repo_root() -> pathlib.Path:
    return ROOT


@pytest.fixture(scope="session")
def golden_files(tmp_path_factory) -> pathlib.Path:
    """Folder of the stores that upstream's code wrote and the files it read. Numbers are in `tests.golden.read`."""
    folder = tmp_path_factory.mktemp("golden")
    with zipfile.ZipFile(ROOT / "tests/golden/files.zip") as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="session")
def human_pusht() -> pathlib.Path:
    """The public human PushT demonstrations."""
    path = SHARED / "data/pusht/pusht_cchi_v7_replay.zarr"
    if not path.is_dir():
        pytest.skip("the human PushT demonstrations are not beside this checkout")
    return path


@pytest.fixture(scope="session")
def g1_recording() -> pathlib.Path:
    """The public recording of a Unitree G1 that benchmarks/studies/own_data.yaml names."""
    for path in (ROOT / "data/g1_pick_bottle", SHARED / "data/g1_pick_bottle"):
        if path.is_dir():
            return path
    pytest.skip("the recording of a Unitree G1 is not here")


@pytest.fixture(scope="session")
def scripted_lift(tmp_path_factory) -> pathlib.Path:
    """Folder of three demonstrations of Lift made here: low_dim.hdf5, low_dim_abs.hdf5."""
    pytest.importorskip("robosuite")
    from diffusion_policy.scripts.generate_robomimic_demos import generate

    folder = tmp_path_factory.mktemp("lift")
    generate("lift", 3, folder, seed=10)
    return folder
