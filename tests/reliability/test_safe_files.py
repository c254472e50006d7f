"""Files from strangers: nothing in a checkpoint, an export or a config runs, and damage is noticed."""

import json
import os
import pickle
import shutil
import zipfile

import dill
import pytest
import torch
from omegaconf import OmegaConf

from diffusion_policy.common.errors import CheckpointError, ConfigError
from diffusion_policy.policy.loading import load_policy
from diffusion_policy.scripts.convert_checkpoint import convert
from diffusion_policy.storage import checkpoint_io, weights_io
from diffusion_policy.storage.safe_config import VARIABLE, checked_config
from diffusion_policy.workspace.base_workspace import BaseWorkspace
from diffusion_policy.workspace.train_workspace import TrainWorkspace
from tests.util import command, equal, load_config, write_pusht


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The checkpoint of a small run."""
    folder = tmp_path_factory.mktemp("safe")
    data = write_pusht(folder / "pusht.zarr")
    cfg = load_config(
        "train_idp_mlp_lowdim",
        "preset=debug",
        f"task.dataset.zarr_path={data}",
        "training.num_epochs=1",
        "task.env_runner.n_test_vis=0",
    )
    TrainWorkspace(cfg, output_dir=str(folder / "run")).run()
    return folder / "run/checkpoints/latest.ckpt"


class Payload:
    """Unpickling this would create a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


# ---------------------------------------------------------------------- pickles
@pytest.mark.parametrize("place", ["state", "attribute", "cfg", "key", "whole file"])
@pytest.mark.parametrize("module", [pickle, dill], ids=["pickle", "dill"])
def test_a_pickle_in_a_checkpoint_does_not_run(checkpoint, tmp_path, place, module):
    marker = tmp_path / "executed"
    payload = checkpoint_io.load(checkpoint)
    match place:
        case "state":
            payload["state_dicts"]["model"]["extra"] = Payload(marker)
        case "attribute":
            payload["attributes"]["extra"] = Payload(marker)
        case "cfg":
            payload["cfg"]["extra"] = Payload(marker)
        case "key":
            payload["extra"] = Payload(marker)
        case "whole file":
            payload = Payload(marker)
    torch.save(payload, tmp_path / "evil.ckpt", pickle_module=module)
    for opened in (
        lambda: checkpoint_io.load(tmp_path / "evil.ckpt"),
        lambda: BaseWorkspace.create_from_checkpoint(str(tmp_path / "evil.ckpt")),
        lambda: convert(tmp_path / "evil.ckpt", tmp_path / "out"),
    ):
        with pytest.raises(CheckpointError, match="--trust-checkpoint"):
            opened()
    assert not marker.exists()
    torch.load(tmp_path / "evil.ckpt", pickle_module=module, weights_only=False)
    assert marker.exists(), "the payload would not have run anyway: this test shows nothing"


def test_a_bare_or_legacy_pickle_does_not_run(tmp_path):
    marker = tmp_path / "executed"
    (tmp_path / "bare.ckpt").write_bytes(pickle.dumps(Payload(marker)))
    torch.save({"cfg": Payload(marker)}, tmp_path / "legacy.ckpt", _use_new_zipfile_serialization=False)
    for name in ("bare", "legacy"):
        with pytest.raises(CheckpointError, match="not a checkpoint"):
            checkpoint_io.load(tmp_path / f"{name}.ckpt", trust=True)
    assert not marker.exists()


# ---------------------------------------------------------------------- configs
EVIL = [
    {"_target_": "os.system", "command": "touch {marker}"},
    {"_target_": "subprocess.Popen", "args": ["touch", "{marker}"]},
    {"_target_": "builtins.eval", "_args_": ["open('{marker}', 'w')"]},
    {"_target_": "builtins.open", "file": "{marker}", "mode": "w"},
    {"_target_": "pathlib.Path.touch", "self": "{marker}"},
    {"_target_": "torch.load", "f": "{pickle}", "weights_only": False},
    {"_target_": "torch.hub.load", "repo_or_dir": "{marker}", "model": "x", "source": "local"},
    # Everything that an allowed module imports can be reached through it.
    {"_target_": "diffusion_policy.storage.checkpoint_io.os.system", "command": "touch {marker}"},
    {"_target_": "diffusion_policy.common.video_recorder.subprocess.Popen", "args": ["touch", "{marker}"]},
    {"_target_": "torch.optim.optimizer.os.system", "command": "touch {marker}"},
    # Functions and methods of our own do things with their arguments.
    {"_target_": "diffusion_policy.storage.checkpoint_io.load", "path": "{pickle}", "trust": True},
    {
        "_target_": "diffusion_policy.workspace.base_workspace.BaseWorkspace.create_from_checkpoint",
        "path": "{pickle}",
        "trust": True,
    },
    {"_target_": "diffusion_policy.storage.atomic.copy", "source": "/etc/hostname", "path": "{marker}"},
    # Not what it seems.
    {"_target_": "diffusion_policy_evil.Policy"},
    {"_target_": "torch.nnx.Module"},
    {"_target_": "${{eval:'\"os.system\"'}}", "command": "touch {marker}"},
    {"_target_": "\\${{oc.env:TARGET}}", "command": "touch {marker}"},
    {"_target_": ["os.system"]},
    {"_target_": None},
]


@pytest.mark.parametrize("evil", EVIL, ids=lambda evil: str(evil["_target_"]))
@pytest.mark.parametrize(
    "place", ["policy", "policy.model", "task.env_runner", "task.dataset", "optimizer", "ema", "", "list"]
)
def test_a_config_in_a_checkpoint_calls_nothing_but_known_classes(checkpoint, tmp_path, monkeypatch, evil, place):
    monkeypatch.setenv("TARGET", "os.system")
    marker, pickled = tmp_path / "executed", tmp_path / "pickle.ckpt"
    torch.save({"cfg": Payload(marker), "state_dicts": {}}, pickled)

    def fill(value):
        return value.format(marker=marker, pickle=pickled) if isinstance(value, str) else value

    node = {key: [fill(v) for v in value] if isinstance(value, list) else fill(value) for key, value in evil.items()}
    payload = checkpoint_io.load(checkpoint)
    if place == "list":
        payload["cfg"]["policy"]["extra"] = [1, [{"deep": node}]]
    elif place == "":
        payload["cfg"] |= node
    else:
        OmegaConf_node = OmegaConf.create(payload["cfg"])
        OmegaConf.update(OmegaConf_node, place, OmegaConf.create({}), merge=False)
        payload["cfg"] = OmegaConf.to_container(OmegaConf_node)
        parent = payload["cfg"]
        *path, last = place.split(".")
        for name in path:
            parent = parent[name]
        parent[last] = node
    checkpoint_io.save(payload, tmp_path / "evil.ckpt")
    for opened in (
        lambda: checkpoint_io.load(tmp_path / "evil.ckpt"),
        lambda: BaseWorkspace.create_from_checkpoint(str(tmp_path / "evil.ckpt")),
    ):
        with pytest.raises(CheckpointError):
            opened()
    assert not marker.exists()


def test_a_teacher_is_a_file_from_a_stranger_too(checkpoint, tmp_path):
    from idp_workspace.teacher import TeacherError, load_teacher

    payload = checkpoint_io.load(checkpoint)
    payload["cfg"]["policy"]["model"] = {"_target_": "os.system", "command": f"touch {tmp_path / 'executed'}"}
    checkpoint_io.save(payload, tmp_path / "teacher.ckpt")
    student = load_policy(checkpoint)
    with pytest.raises(TeacherError, match="os.system"):
        load_teacher(tmp_path / "teacher.ckpt", type(student), student, "train_idp_mlp_lowdim")
    assert not (tmp_path / "executed").exists()


def test_own_packages_can_be_allowed(tmp_path, monkeypatch):
    (tmp_path / "my_robot_policies.py").write_text("import torch\nclass Mine(torch.nn.Module):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    cfg = {"policy": {"_target_": "my_robot_policies.Mine"}}
    with pytest.raises(CheckpointError, match=VARIABLE):
        checked_config(cfg, "a file")
    monkeypatch.setenv(VARIABLE, "another, my_robot_policies")
    assert checked_config(cfg, "a file") == cfg


@pytest.mark.parametrize(
    "name",
    [
        "train_idp_transformer_lowdim",
        "train_consistency_unet_lowdim",
        "train_one_step_diffusion_mlp_lowdim",
        "train_diffusion_transformer_lowdim_pusht_workspace",
        "train_diffusion_unet_lowdim_workspace",
    ],
)
def test_the_configurations_that_ship_are_allowed(name):
    cfg = OmegaConf.to_container(load_config(name), resolve=True)
    assert checked_config(cfg, name) == cfg


def test_a_yaml_file_cannot_call_python(tmp_path):
    marker = tmp_path / "executed"
    (tmp_path / "evil.yaml").write_text(f"x: !!python/object/apply:os.system ['touch {marker}']\n")
    done = command("train.py", "--config-dir", tmp_path, "--config-name=evil")
    assert done.returncode != 0 and "could not determine a constructor" in done.stderr and not marker.exists()


# ---------------------------------------------------------------------- damage
def rebuilt(source, target, **zip_options):
    """A copy of a torch file with its records written anew."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", **zip_options) as new:
        for record in old.infolist():
            new.writestr(record.filename, old.read(record))


def test_every_flipped_bit_is_noticed_or_harmless(checkpoint, tmp_path):
    """torch reads records without comparing their checksums: a flipped bit in a weight would go unseen."""
    good, content = checkpoint_io.load(checkpoint), checkpoint.read_bytes()
    noticed = 0
    for position in range(0, len(content), max(1, len(content) // 300)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        (tmp_path / "damaged.ckpt").write_bytes(damaged)
        try:
            assert equal(checkpoint_io.load(tmp_path / "damaged.ckpt"), good)
        except CheckpointError:
            noticed += 1
    assert noticed > 150


def test_records_that_would_unpack_to_more_than_the_file_are_refused(checkpoint, tmp_path):
    rebuilt(checkpoint, tmp_path / "stored.ckpt")
    assert equal(checkpoint_io.load(tmp_path / "stored.ckpt"), checkpoint_io.load(checkpoint))
    rebuilt(checkpoint, tmp_path / "deflated.ckpt", compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="compressed"):
        checkpoint_io.load(tmp_path / "deflated.ckpt")


@pytest.mark.parametrize(
    "change",
    [
        {"cfg": 3},
        {"cfg": {1: 2}},
        {"state_dicts": []},
        {"state_dicts": {"model": 1}},
        {"attributes": [1]},
        {"format": 99},
        {"format": "one"},
        {"cfg": {"a": "${b}"}},
        {"cfg": {"a": "${a}"}},
        {"cfg": {"_target_": 1}},
    ],
    ids=str,
)
def test_payloads_of_another_shape_are_refused(checkpoint, tmp_path, change):
    checkpoint_io.save(checkpoint_io.load(checkpoint) | change, tmp_path / "odd.ckpt")
    with pytest.raises(CheckpointError):
        checkpoint_io.load(tmp_path / "odd.ckpt")


# ---------------------------------------------------------------------- exports and conversions
def test_exported_weights_act_the_same(checkpoint, tmp_path):
    folder = convert(checkpoint, tmp_path / "weights")
    assert {path.name for path in folder.iterdir()} == {weights_io.WEIGHTS, weights_io.CONFIG}
    assert json.loads((folder / weights_io.CONFIG).read_text())["weights"] == "ema_model"
    obs = {"obs": torch.rand(3, 2, 5) * 400}
    assert equal(load_policy(folder).predict_action(obs), load_policy(checkpoint).predict_action(obs))
    with pytest.raises(ConfigError, match="--overwrite"):
        convert(checkpoint, tmp_path / "weights")
    done = command("eval.py", "-c", folder, "-n", 1)
    assert done.returncode == 0 and (folder / "eval_weights_n1/eval_log.json").is_file(), done.stderr


def test_damaged_exports_are_refused(checkpoint, tmp_path):
    folder = convert(checkpoint, tmp_path / "weights")

    def broken(name, change):
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        change(copy / name)
        with pytest.raises(CheckpointError) as error:
            checkpoint_io.load(copy)
        return str(error.value)

    def flip(path):
        path.write_bytes(path.read_bytes()[:-1] + b"\x55")

    assert "checksum" in broken(weights_io.WEIGHTS, flip)
    assert "no model.safetensors" in broken(weights_io.WEIGHTS, lambda path: path.unlink())
    assert "no config.json" in broken(weights_io.CONFIG, lambda path: path.unlink())
    assert "cannot be read" in broken(weights_io.CONFIG, lambda path: path.write_text("[]"))
    assert "cannot be read" in broken(weights_io.CONFIG, lambda path: path.write_text("{"))
    evil = json.loads((folder / weights_io.CONFIG).read_text())
    evil["cfg"]["policy"]["_target_"] = "os.system"
    assert "os.system" in broken(weights_io.CONFIG, lambda path: path.write_text(json.dumps(evil)))


def test_an_upstream_checkpoint_becomes_a_safe_one(checkpoint, tmp_path):
    marker = tmp_path / "executed"
    payload = checkpoint_io.load(checkpoint)
    upstream = {
        "cfg": OmegaConf.create(payload["cfg"]),
        "state_dicts": {name: payload["state_dicts"][name] for name in ("model", "ema_model", "optimizer")},
        "pickles": {"global_step": dill.dumps(4), "epoch": dill.dumps(1), "extra": dill.dumps(Payload(marker))},
    }
    torch.save(upstream, tmp_path / "upstream.ckpt", pickle_module=dill)
    with pytest.raises(CheckpointError, match="convert_checkpoint"):
        convert(tmp_path / "upstream.ckpt", tmp_path / "safe.ckpt")
    assert not marker.exists() and not (tmp_path / "safe.ckpt").exists()
    convert(tmp_path / "upstream.ckpt", tmp_path / "safe.ckpt", trust=True)
    assert marker.exists()  # that is what trust means
    marker.unlink()
    convert(tmp_path / "upstream.ckpt", tmp_path / "weights", trust=True)
    marker.unlink()
    safe = checkpoint_io.load(tmp_path / "safe.ckpt")
    assert safe["attributes"]["global_step"] == 4 and equal(
        safe["state_dicts"]["model"], payload["state_dicts"]["model"]
    )
    obs = {"obs": torch.rand(3, 2, 5) * 400}
    for path in ("safe.ckpt", "weights"):
        assert equal(load_policy(tmp_path / path).predict_action(obs), load_policy(checkpoint).predict_action(obs))
    assert not marker.exists()


def test_an_upstream_optimiser_with_an_omegaconf_list_becomes_plain(checkpoint, tmp_path):
    """Upstream's UNet workspaces build AdamW from the config, and torch 1.12 keeps the betas as it gets them."""
    payload = checkpoint_io.load(checkpoint)
    layer = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["param_groups"][0]["betas"] = OmegaConf.create({"betas": [0.95, 0.999]}).betas
    upstream = {
        "cfg": OmegaConf.create(payload["cfg"]),
        "state_dicts": {"model": payload["state_dicts"]["model"], "optimizer": state},
        "pickles": {"global_step": dill.dumps(4)},
    }
    torch.save(upstream, tmp_path / "upstream.ckpt", pickle_module=dill)
    convert(tmp_path / "upstream.ckpt", tmp_path / "safe.ckpt", trust=True)
    safe = checkpoint_io.load(tmp_path / "safe.ckpt")["state_dicts"]["optimizer"]
    assert safe["param_groups"][0]["betas"] == [0.95, 0.999] and equal(safe["state"], state["state"])
    optimizer.load_state_dict(safe)
    optimizer.step()


def test_the_convert_command(checkpoint, tmp_path):
    done = command("diffusion_policy.scripts.convert_checkpoint", checkpoint, tmp_path / "weights")
    assert done.returncode == 0 and f"eval.py --checkpoint {tmp_path / 'weights'}" in done.stdout
    done = command("diffusion_policy.scripts.convert_checkpoint", tmp_path / "nothing", tmp_path / "x")
    assert done.returncode == 2 and "no checkpoint at" in done.stderr and "Traceback" not in done.stderr
