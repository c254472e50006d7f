"""preset=paper is the protocol that docs/protocol.md describes, and results say what they were trained on."""

import functools
import json
import re

import pytest
import yaml
from omegaconf import OmegaConf

from diffusion_policy.common.errors import DataError
from diffusion_policy.dataset import pusht_source
from diffusion_policy.dataset.identity import dataset_identity
from diffusion_policy.dataset.pusht_dataset import PushTLowdimDataset, PushTStateDataset
from diffusion_policy.scripts import download
from diffusion_policy.scripts import eval as eval_script
from diffusion_policy.storage import checkpoint_io, weights_io
from tests.util import ROOT, load_config, train_here, write_pusht

PAGE = (ROOT / "docs/protocol.md").read_text()
QUOTED = re.compile(r"`([^`]+)`")


def rows():
    """(key, overrides, value) of each row of the first table."""
    table = PAGE[PAGE.index("| item |") :].split("\n\n")[0].splitlines()
    assert [cell.strip() for cell in table[0].strip("|").split("|")] == [
        *("item", "MIP", "paper", "here", "config key", "with")
    ]
    for line in table[2:]:
        _, mip, _, here, key, overrides = (cell.strip() for cell in line.strip("|").split("|"))
        assert mip, line
        (key,) = QUOTED.findall(key)
        yield pytest.param(
            key, tuple(QUOTED.findall(overrides)), yaml.safe_load(QUOTED.findall(here)[0]), id=f"{key} {overrides}"
        )


compose = functools.cache(lambda overrides: load_config("train", *overrides))


@pytest.mark.parametrize("key, overrides, value", list(rows()))
def test_the_table_is_the_configuration(key, overrides, value):
    cfg = compose(overrides)
    found = OmegaConf.select(cfg, key, default="missing")
    found = OmegaConf.to_container(found) if OmegaConf.is_config(found) else found
    assert (found, type(found)) == (value, type(value))


def test_the_table_is_long_enough_to_be_a_protocol():
    assert len({parameter.values[0] for parameter in rows()}) > 35


@pytest.mark.parametrize(
    "objective", ["mip", "regression", "straight_flow", "tsd", "flow", "diffusion", "idp_m0", "ofp", "flow_policy"]
)
def test_baselines_that_do_not_compare_samples_keep_the_short_batch(objective):
    assert compose((f"objective={objective}",)).dataloader.drop_last is False


def test_mean_flow_keeps_the_short_batch_without_the_dispersive_loss():
    for variant, dropped in (("mp1", True), ("mf", False)):
        cfg = load_config("train", "objective=mean_flow", "backbone=mlp", f"policy.variant={variant}")
        assert cfg.dataloader.drop_last is dropped and cfg.policy.time_scale == (0.05 if dropped else 1.0)


@pytest.mark.parametrize("preset", ["paper", "cpu", "debug"])
def test_upstream_s_configurations_keep_upstream_s_protocol(preset):
    for name in ("train_diffusion_unet_lowdim_workspace", "train_diffusion_unet_image_workspace"):
        cfg = load_config(name, f"preset={preset}")
        runner = cfg.task.env_runner
        assert (cfg.training.seed, runner.test_start_seed, runner.n_heldout) == (42, 100000, 0)
        assert cfg.task.dataset.normalization == "upstream" and not cfg.dataloader.get("drop_last")
        assert (cfg.task.dataset.zarr_path == "auto") == (preset == "paper")
    assert load_config(name, "task=can_ph_image").task.dataset.normalization == "upstream"


@pytest.mark.parametrize("preset", ["cpu", "debug"])
@pytest.mark.parametrize("task", ["pusht_state", "pusht_keypoint", "pusht_lowdim", "pusht_image"])
def test_the_small_presets_start_from_the_shipped_rollouts(preset, task):
    modality = "image" if task == "pusht_image" else "lowdim"
    cfg = load_config("train", f"preset={preset}", f"task={task}", f"modality={modality}")
    assert cfg.task.dataset.zarr_path.endswith("data/demos/pusht_policy_rollouts.zarr")
    runner = cfg.task.env_runner
    assert (cfg.training.seed, runner.test_start_seed, runner.n_heldout) == (42, 100000, 0)


def test_point_clouds_keep_dp3_s_starts():
    runner = load_config("train", "modality=pointcloud").task.env_runner
    assert (runner.n_test, runner.test_start_seed, runner.n_heldout) == (20, 100000, 0)


@pytest.mark.parametrize("kind, words", [(PushTStateDataset, "state, image"), (PushTLowdimDataset, "keypoints")])
def test_the_page_names_the_shipped_rollouts(kind, words):
    identity = dataset_identity(kind(ROOT / pusht_source.SHIPPED, horizon=16), {})
    (line,) = [line for line in PAGE.splitlines() if identity["sha256"] in line]
    assert words in line


# ---------------------------------------------------------------------- a run
RUN = (
    "train_mip_mlp_lowdim",
    "preset=debug",
    "training.seed=3",
    "training.steps_per_epoch=2",
    "evaluation.test_start_seed=${training.seed}",
    "evaluation.n_heldout=1",
    "task.env_runner.n_test_vis=0",
    "task.env_runner.max_steps=8",
)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """A folder with shipped rollouts and no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pusht_source, "project_path", str)
    source = download.Source(**{**vars(download.SOURCES["pusht"]), "url": "http://127.0.0.1:9/pusht.zip"})
    monkeypatch.setitem(download.SOURCES, "pusht", source)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    write_pusht(tmp_path / pusht_source.SHIPPED)
    return tmp_path


def test_a_run_without_the_human_demonstrations_says_so_everywhere(offline, capsys, caplog):
    _, summary = train_here(offline / "run", *RUN, "task.dataset.zarr_path=auto")
    assert summary["dataset"]["name"] == "pusht_policy_rollouts.zarr" and len(summary["dataset"]["sha256"]) == 64
    warning = summary["dataset"]["warning"]
    assert "SCORES DO NOT COMPARE WITH PAPERS" in warning and warning in caplog.text
    out = capsys.readouterr().out
    assert warning in out and summary["dataset"]["sha256"] in out
    assert json.loads((offline / "run/summary.json").read_text())["dataset"] == summary["dataset"]
    payload = checkpoint_io.load(summary["checkpoint"])
    assert payload["attributes"]["dataset"] == summary["dataset"]
    exported = checkpoint_io.load(weights_io.write(payload, offline / "export"))
    assert exported["attributes"]["dataset"] == summary["dataset"]


def test_protocol_and_held_out_starts_are_reported_beside_each_other(offline):
    workspace, summary = train_here(offline / "run", *RUN)
    lines = [json.loads(line) for line in (offline / "run/logs.json.txt").read_text().splitlines()]
    last = lines[-1]
    assert {"test/sim_max_reward_3", "test/sim_max_reward_4", "heldout/sim_max_reward_100000"} <= set(last)
    assert workspace.scores == [line["test/mean_score"] for line in lines if "test/mean_score" in line]
    assert (summary["score"], summary["heldout_score"]) == (last["test/mean_score"], last["heldout/mean_score"])
    assert summary["evaluations"] == 2 and summary["dataset"]["warning"] is None
    # Evaluating plays the test starts alone, unless it is told otherwise.
    log = eval_script.evaluate(eval_script.parser().parse_args(["-c", summary["checkpoint"], "-d", "cpu"]))
    assert {episode["split"] for episode in log["episodes"]} == {"test"} and "heldout/mean_score" not in log


def test_a_run_does_not_continue_on_other_data(offline):
    first = write_pusht(offline / "first.zarr")
    train_here(offline / "run", *RUN, f"task.dataset.zarr_path={first}")
    longer = (*RUN, "training.num_epochs=3")
    first.rename(offline / "moved.zarr")
    other = write_pusht(offline / "other.zarr", seed=5)
    with pytest.raises(DataError, match="trained on first.zarr .* the dataset is now other.zarr"):
        train_here(offline / "run", *longer, f"task.dataset.zarr_path={other}")
    workspace, summary = train_here(offline / "run", *longer, "task.dataset.zarr_path=moved.zarr")
    assert summary["steps"] == 6 and summary["evaluations"] == 3 and len(workspace.heldout_scores) == 3
