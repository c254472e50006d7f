"""Checkpoints of LeRobot, read and written without LeRobot; plugins/lerobot_policy_idp/tests reads them with it."""

import json
import pathlib
import tomllib

import hydra
import pytest
import safetensors.torch
import torch
from omegaconf import OmegaConf

from diffusion_policy import load_policy
from diffusion_policy.common.errors import CheckpointError, ConfigError
from diffusion_policy.model.common.normalizer import LinearNormalizer
from diffusion_policy.policy.loading import policy_of
from diffusion_policy.scripts.convert_checkpoint import convert
from diffusion_policy.storage import checkpoint_io, lerobot_io
from idp_workspace import lerobot
from idp_workspace.policy.idp_options import IDPOptions
from tests.util import ROOT, load_config

PLUGIN = ROOT / "plugins/lerobot_policy_idp"


def payload(name: str, *overrides: str) -> dict:
    """A checkpoint of a new policy, as a run writes it."""
    cfg = load_config(name, "preset=debug", *overrides)
    torch.manual_seed(0)
    policy = hydra.utils.instantiate(cfg.policy)
    fields = {"action": torch.rand(50, cfg.task.action_dim) * 300}
    if cfg.task.get("shape_meta"):
        for key, entry in cfg.task.shape_meta.obs.items():
            fields[key] = torch.rand(50, 1 if entry.type == "rgb" else entry.shape[0])
    else:
        fields["obs"] = torch.rand(50, cfg.task.obs_dim) * 300
    normalizer = LinearNormalizer()
    normalizer.fit(fields)
    if cfg.task.get("shape_meta"):
        from diffusion_policy.common.normalize_util import get_image_range_normalizer

        normalizer["image"] = get_image_range_normalizer()
    policy.set_normalizer(normalizer)
    plain = OmegaConf.to_container(cfg, resolve=True)
    plain["training"]["use_ema"] = False
    return {"cfg": plain, "state_dicts": {"model": policy.state_dict()}, "attributes": {}}


def observation(policy, batch: int = 3) -> dict:
    shapes = policy.obs_shapes()
    return {key: torch.rand(batch, policy.n_obs_steps, *shape) for key, shape in shapes.items()}


NAMES = [
    *(f"train_idp_{backbone}_lowdim" for backbone in ("mlp", "transformer", "unet")),
    *(f"train_idp_{backbone}_image" for backbone in ("mlp", "transformer", "unet")),
]


@pytest.fixture
def written(tmp_path):
    """A policy of this project, and the folder that LeRobot opens."""

    def write(name: str, *overrides: str) -> tuple[dict, pathlib.Path]:
        made = payload(name, *overrides)
        checkpoint_io.save(made, tmp_path / "ours.ckpt")
        return made, convert(tmp_path / "ours.ckpt", tmp_path / "lerobot", to_lerobot=True)

    return write


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_survives_the_way_to_lerobot_and_back(name, written, tmp_path):
    made, folder = written(name, "policy.tau=0.5", "policy.energy_power=0.5")
    expected = policy_of(made).eval()
    settings = json.loads((folder / "config.json").read_text())
    assert settings["type"] == "idp" and settings["switches"] == {"tau": 0.5} and settings["energy_power"] == 0.5
    export = convert(folder, tmp_path / "export")
    again = convert(export, tmp_path / "again", to_lerobot=True)
    obs = observation(expected)
    for path in (folder, export, again):
        policy = load_policy(path, device="cpu")
        assert policy.options == expected.options
        result = policy.predict_action(obs)["action_pred"]
        torch.testing.assert_close(result, expected.predict_action(obs)["action_pred"], rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize(
    "name, overrides, message",
    [
        ("train_idp_mlp_lowdim", ["policy.obs_encoder.features={_target_: x}"], "features"),
        ("train_idp_mlp_lowdim", ["+policy.pred_action_steps_only=true"], "pred_action_steps_only is True"),
        ("train_idp_mlp_lowdim", ["+policy.model.expansion=2"], "model is"),
        ("train_flow_mlp_lowdim", [], "FlowMatchingPolicy, not a"),
        ("train_diffusion_unet_lowdim_workspace", ["policy._target_=idp_workspace.policy.IDPPolicy"], "KeyError"),
    ],
)
def test_what_lerobot_cannot_hold_is_named(name, overrides, message):
    section = OmegaConf.to_container(load_config(name, "preset=debug", *overrides).policy, resolve=True)
    with pytest.raises(ConfigError, match=f"LeRobot's IDP cannot hold this policy.*{message}"):
        lerobot.settings_of(section)


def test_options_are_named_as_in_the_objective():
    fields = IDPOptions.__dataclass_fields__
    assert set(lerobot.OPTIONS) <= set(fields)


# ---------------------------------------------------------------------- damaged and hostile folders
def edit(file: pathlib.Path, change) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def state_file(name: str):
    def change(folder: pathlib.Path) -> None:
        edit(folder / "policy_preprocessor.json", lambda x: x["steps"][3].update(state_file=name))

    return change


def setting(**values):
    return lambda folder: edit(folder / "config.json", lambda x: x.update(values))


def stats(change):
    def edit_stats(folder: pathlib.Path) -> None:
        file = folder / "policy_preprocessor_step_3_normalizer_processor.safetensors"
        values = safetensors.torch.load_file(file)
        change(values)
        safetensors.torch.save_file(values, file)

    return edit_stats


def linked(folder: pathlib.Path) -> None:
    file = folder / "policy_preprocessor_step_3_normalizer_processor.safetensors"
    file.rename(folder.parent / "elsewhere.safetensors")
    file.symlink_to(folder.parent / "elsewhere.safetensors")


DAMAGE = {
    "another type": (setting(type="act"), "type 'act', which no package here knows"),
    "no settings": (lambda folder: (folder / "config.json").write_text("[]"), "holds a list"),
    "not json": (lambda folder: (folder / "config.json").write_text("{"), "cannot be read: JSONDecodeError"),
    "large": (lambda folder: (folder / "config.json").write_text(" " * 5_000_000), "too large"),
    "a missing setting": (lambda folder: edit(folder / "config.json", lambda x: x.pop("horizon")), "KeyError"),
    "a huge network": (setting(n_emb=10**9), "more than the"),
    "another network": (setting(n_emb=32), "do not fit its configuration"),
    "a class": (setting(switches={"_target_": "os.system"}), "os.system"),
    "a path out": (state_file("../elsewhere.safetensors"), "has no file"),
    "a root path": (state_file("/etc/passwd"), "has no file"),
    "a link": (linked, "has no file"),
    "no statistics": (stats(lambda x: x.pop("observation.state.min")), "KeyError"),
    "other sizes": (stats(lambda x: x.update({"observation.state.min": torch.zeros(3)})), "not a whole checkpoint"),
    "not finite": (stats(lambda x: x["observation.state.min"].fill_(torch.nan)), "finite numbers"),
    "a step that changes numbers": (
        lambda folder: edit(
            folder / "policy_preprocessor.json",
            lambda x: x["steps"].append({"registry_name": "relative_actions_processor", "config": {}}),
        ),
        "no steps that change numbers otherwise",
    ),
    "damaged weights": (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folders_end_in_one_line(damage, written):
    _, folder = written("train_idp_mlp_lowdim")
    change, message = DAMAGE[damage]
    change(folder)
    with pytest.raises(CheckpointError) as error:
        load_policy(folder, device="cpu")
    assert message in str(error.value) and "\n" not in str(error.value)


# ---------------------------------------------------------------------- the distribution
def test_the_plugin_is_found_by_its_name():
    """LeRobot imports distributions called lerobot_policy_*, by that name."""
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    assert (PLUGIN / "src" / project["name"] / "__init__.py").is_file() and project["name"] == "lerobot_policy_idp"
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert own["name"] in project["dependencies"] and project["version"] == own["version"]
    assert lerobot_io.plugin("idp", "a test") is lerobot
    simulators = ("mujoco", "robosuite", "metaworld", "gymnasium-robotics", "sapien")
    assert not [name for name in own["dependencies"] if name.startswith(simulators)]
