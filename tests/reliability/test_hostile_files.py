"""What a config from a file may say: sizes, resolvers, classes by section, numbers; and links in datasets.

tests/reliability/test_fuzz.py runs a part of benchmarks/fuzz_targets/hostile.py, whole files against every command.
"""

import json
import os
import shutil

import pytest
import torch

from benchmarks.fuzz_targets import hostile
from diffusion_policy.common.config_util import evaluate
from diffusion_policy.common.errors import CheckpointError, ConfigError, DataError
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.policy.loading import bounded_memory
from diffusion_policy.scripts import eval as eval_script
from diffusion_policy.scripts.convert_checkpoint import convert
from diffusion_policy.storage import checkpoint_io, plain_config, weights_io
from diffusion_policy.storage.safe_config import LIMITS, checked_config
from diffusion_policy.workspace import run_folder
from tests.util import load_config, train_here, write_pusht


def plain(cfg):
    return plain_config.plain_config(cfg, "a file")


# ---------------------------------------------------------------------- plain data
def test_references_and_our_resolvers_are_resolved_as_omegaconf_does():
    cfg = {
        "n": 2,
        "name": "a",
        "shape": {"obs": [3, 96]},
        "size": {"n": "${n}", "sum": "${eval:'${n} + 1'}", "beside": "${.sum}", "above": "${..name}"},
        "copy": "${shape}",
        "item": "${shape.obs[1]}",
        "text": "x_${name}_${n}",
        "choice": '${eval:\'3 if "${name}" == "a" else 4\'}',
    }
    assert plain(cfg) == {
        **cfg,
        "size": {"n": 2, "sum": 3, "beside": 3, "above": "a"},
        "copy": {"obs": [3, 96]},
        "item": 96,
        "text": "x_a_2",
        "choice": 3,
    }


@pytest.mark.parametrize(
    "text",
    [
        "${oc.env:HOME}",
        "a ${oc.env:HOME} b",
        "${env:HOME}",
        "${now:%Y}",
        "${oc.decode:1}",
        "${oc.${x}:HOME}",
        "\\${oc.env:HOME}",
        "${oc.env:HOME",
        "${none}",
        "${x}",
        "${eval:'10**10**10'}",
    ],
)
def test_every_other_interpolation_is_refused(text):
    with pytest.raises(CheckpointError, match="cannot be used") as error:
        plain({"x": text})
    assert os.environ["HOME"] not in str(error.value)


@pytest.mark.parametrize(
    "cfg",
    [
        {"extra": hostile.laughs()},
        {"x0": "ha", **{f"x{i}": f"${{x{i - 1}}}" * 2 for i in range(1, 60)}},
        {"x": hostile.shared()},
        {"x": hostile.itself()},
        {"x": hostile.nested()},
        {"x": "x" * 3_000_000},
        {"x" * 3_000_000: 1},
        {"x": [0] * 30_000},
    ],
    ids=["references", "texts", "shared", "itself", "nested", "text", "key", "values"],
)
def test_a_config_cannot_grow(cfg):
    with pytest.raises(CheckpointError, match="larger than any real one"):
        plain(cfg)


@pytest.mark.parametrize("value", [b"x", torch.zeros(1), {(1, 2): 3}, 10**30, {1, 2}], ids=repr)
def test_a_config_is_plain_data(value):
    with pytest.raises(CheckpointError):
        plain({"x": value})


def test_expressions_stay_small():
    with pytest.raises(ConfigError, match="characters"):
        evaluate("1+" * 1000 + "1")
    with pytest.raises(ConfigError, match="cannot be computed"):
        evaluate("9" * 900 + " / 1.0")
    with pytest.raises(ConfigError, match="only arithmetic"):
        evaluate("10**10")


# ---------------------------------------------------------------------- roles and numbers
ROLES = {
    "policy": "torch.nn.Linear",
    "task.env_runner": "diffusion_policy.env_runner.pusht_state_runner.PushTStateRunner",
    "task.dataset": "diffusion_policy.dataset.pusht_dataset.PushTStateDataset",
    "optimizer": "torch.optim.AdamW",
    "ema": "diffusion_policy.model.diffusion.ema_model.EMAModel",
    "": "diffusion_policy.workspace.train_workspace.TrainWorkspace",
}


@pytest.mark.parametrize("section", ROLES)
@pytest.mark.parametrize("role", ROLES)
def test_a_section_builds_only_what_it_is_for(section, role):
    cfg = {"_target_": ROLES[role]}
    for name in reversed(section.split(".") if section else []):
        cfg = {name: cfg}
    if section == role:
        assert checked_config(cfg, "a file") == cfg
    else:
        with pytest.raises(CheckpointError, match="this section may build nothing else"):
            checked_config(cfg, "a file")


def test_pretrained_weights_are_not_fetched_for_a_file():
    resnet = {"_target_": "diffusion_policy.model.vision.model_getter.get_resnet", "weights": "IMAGENET1K_V1"}
    cfg = checked_config({"policy": {"_target_": "torch.nn.Linear", "model": resnet}}, "a file")
    assert cfg["policy"]["model"]["weights"] is None


@pytest.mark.parametrize("key", LIMITS)
def test_numbers_have_limits_where_something_is_built(key):
    for section in ("policy", "task.env_runner"):
        for value, refused in ((LIMITS[key], False), (LIMITS[key] + 1, True), (-LIMITS[key] - 1, True)):
            node = {"_target_": ROLES[section], "deep": [{key: value}]}
            cfg = {"policy": node} if section == "policy" else {"task": {"env_runner": node}}
            if refused:
                with pytest.raises(CheckpointError, match=key):
                    checked_config(cfg, "a file")
            else:
                checked_config(cfg, "a file")
    checked_config({"training": {key: LIMITS[key] + 1}}, "a file")  # nothing is built from it


@pytest.mark.parametrize("name", ["train_idp_unet_image", "train_dp3", "train_diffusion_unet_hybrid_workspace"])
def test_real_configs_are_far_from_the_limits(name):
    def numbers(node):
        if isinstance(node, (dict, list)):
            for child in node.values() if isinstance(node, dict) else node:
                yield from numbers(child)
        else:
            yield node

    from omegaconf import OmegaConf

    cfg = OmegaConf.to_container(load_config(name), resolve=True)
    assert plain(cfg) == cfg
    count = sum(1 for _ in numbers(cfg))
    assert 10 * count < plain_config.MAX_VALUES and 10 * len(json.dumps(cfg)) < plain_config.MAX_CHARACTERS


def test_building_a_policy_cannot_fill_the_memory():
    weights = {"w": torch.zeros(10)}
    with bounded_memory(weights):
        torch.nn.Linear(1000, 1000)
    with pytest.raises(CheckpointError, match="far more than its weights"), bounded_memory(weights):
        for _ in range(5):
            torch.empty(100_000_000)  # no page of it is touched


# ---------------------------------------------------------------------- files
@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    data = write_pusht(folder / "pusht.zarr")
    overrides = (f"task.dataset.zarr_path={data}", "task.env_runner.n_test_vis=0", "training.num_epochs=2")
    train_here(folder / "run", "train_idp_mlp_lowdim", "preset=debug", *overrides)
    return folder / "run"


def test_eval_shows_no_secret_and_writes_only_into_its_output(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOSTILE_SECRET", hostile.SECRET)
    payload = checkpoint_io.load(run / "checkpoints/latest.ckpt")
    payload["cfg"]["name"] = "${oc.env:HOSTILE_SECRET}"
    checkpoint_io.save(payload, tmp_path / "case.ckpt")
    with pytest.raises(SystemExit):
        eval_script.main(["-c", str(tmp_path / "case.ckpt"), "-o", str(tmp_path / "out"), "-n", "1"])
    printed = capsys.readouterr()
    assert "oc.env" in printed.err and hostile.SECRET not in printed.out + printed.err
    before = set(tmp_path.rglob("*")) | set(run.rglob("*"))
    eval_script.main(["-c", str(run), "-o", str(tmp_path / "out"), "-n", "1"])
    after = set(tmp_path.rglob("*")) | set(run.rglob("*"))
    assert all(tmp_path / "out" in (path, *path.parents) for path in after - before)


def test_sparse_weights_of_60_gb_are_refused_at_once(run, tmp_path):
    export = convert(run, tmp_path / "weights")
    hostile.sparse_file(export / weights_io.WEIGHTS, hostile.safetensors_header(hostile.SPARSE_BYTES - 100))
    with pytest.raises(CheckpointError, match="too much to read|checksum"):
        checkpoint_io.load(export)


def test_a_damaged_latest_is_followed_by_the_previous_and_then_the_best_by_step(run, tmp_path):
    payload = checkpoint_io.load(run / "checkpoints/latest.ckpt")
    folder = tmp_path / "run/checkpoints"
    for age, (name, step) in enumerate({"latest": 40, "previous": 10, "zzz": 20, "epoch=1": 30, "mmm": 5}.items()):
        payload["attributes"]["global_step"] = step
        checkpoint_io.save(payload, folder / f"{name}.ckpt")
        os.utime(folder / f"{name}.ckpt", (1000 * age, 1000 * age))  # the newest file is the one with the fewest steps
    settings = load_config("train_idp_mlp_lowdim").checkpoint
    for expected in ("latest", "previous", "epoch=1", "zzz", "mmm"):
        found = run_folder.find_checkpoints(folder / "latest.ckpt", settings, True)
        path, _ = run_folder.load_first_readable(found)
        assert path.stem == expected
        path.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="none of the checkpoints"):
        run_folder.load_first_readable(run_folder.find_checkpoints(folder / "latest.ckpt", settings, True))


# ---------------------------------------------------------------------- links in a dataset
@pytest.mark.parametrize("place", ["data", "data/action", "data/action/0.0", "data/action/.zarray", ".zgroup", "extra"])
def test_zarr_folders_do_not_follow_links_out_of_the_tree(tmp_path, place):
    data, outside = write_pusht(tmp_path / "pusht.zarr"), tmp_path / "outside"
    expected = ReplayBuffer.copy_from_path(data)["action"]
    (tmp_path / "link.zarr").symlink_to(data)  # the dataset itself may be a link
    assert (ReplayBuffer.copy_from_path(tmp_path / "link.zarr")["action"] == expected).all()
    inside = data / "data/inside"
    inside.symlink_to(data / "data/action")
    ReplayBuffer.copy_from_path(data, keys=["action"])
    inside.unlink()
    if (data / place).exists():
        shutil.move(data / place, outside)
    else:
        outside.write_text("")
    (data / place).symlink_to(outside)
    with pytest.raises(DataError, match="is a link out of the dataset"):
        ReplayBuffer.copy_from_path(data)
