"""Every config: composes to the recorded values, builds at full size, and trains and evaluates at the smallest.

tests/golden/configs.json holds a hash of every composed config. After an intended change, write it anew with
`python -m tests.integration.test_configs`, and name the change in the commit.
"""

import hashlib
import json
import os
import re
import subprocess
import sys

import hydra
import pytest
import torch
import yaml
from omegaconf import OmegaConf

from diffusion_policy import load_policy
from diffusion_policy.common.config_util import GRID, choices, comments, config_names, grid
from diffusion_policy.common.errors import ConfigError
from diffusion_policy.policy.loading import policy_of
from diffusion_policy.scripts import eval as eval_script
from diffusion_policy.storage import checkpoint_io
from diffusion_policy.workspace import run_folder
from tests import golden
from tests.util import ROOT, command, load_config, train_here, write_point_clouds, write_pusht

UPSTREAM_ALL = [name for name in config_names() if name.startswith("train_diffusion") and name.endswith("_workspace")]
UPSTREAM = [  # the others are in test_hybrid_policies.py and test_upstream_tasks.py
    f"train_diffusion_{name}_workspace" for name in ("transformer_lowdim_pusht", "unet_lowdim", "unet_ddim_lowdim")
]
NAMES = [name for name in config_names() if name != "train" and (name not in UPSTREAM_ALL or name in UPSTREAM)]
IMAGE = [name for name in NAMES if name.endswith("_image")]
DP3 = ["train_dp3", "train_simple_dp3"]
POINTCLOUD = [name for name in NAMES if name.endswith("_pointcloud") or name in DP3]
CONFIGS = [name for name in NAMES if name not in (*IMAGE, *POINTCLOUD)]
ABLATIONS = sorted(path.stem for path in (ROOT / "config/ablation").glob("*.yaml"))
NAMED = [
    *UPSTREAM[:2],
    *(
        f"train_{objective}_{backbone}_lowdim"
        for objective in ("idp", "naive_drifting")
        for backbone in ("transformer", "unet", "mlp")
    ),
]


GOLDEN = ROOT / "tests/golden/configs.json"
PRESETS = ("paper", "cpu", "debug")
OBJECTIVES = sorted({chosen[0] for chosen in grid().values()})
BACKBONES = ("mlp", "unet", "transformer")


def rotated(modality):
    """Every objective once, with backbones in turn: what is built from both is in the unit tests of all pairs."""
    return [f"train_{objective}_{BACKBONES[i % 3]}_{modality}" for i, objective in enumerate(OBJECTIVES)]


#: Every objective with the MLP, and every backbone with an objective that needs no time, one that does, and IDP.
TRAINED = [
    *(f"train_{objective}_mlp_lowdim" for objective in OBJECTIVES),
    *(
        f"train_{objective}_{backbone}_lowdim"
        for objective in ("idp", "flow", "naive_drifting")
        for backbone in BACKBONES[1:]
    ),
    *UPSTREAM,
]


def digest(name, *overrides):
    """Return a hash of all values of a composed config, wherever the repository is and whatever the time."""
    text = json.dumps(OmegaConf.to_container(load_config(name, *overrides)), sort_keys=True)
    text = re.sub(r"\d{4}\.\d\d\.\d\d[-/]\d\d\.\d\d\.\d\d", "NOW", text.replace(f"{ROOT}/", ""))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@pytest.fixture(scope="module")
def recorded():
    return json.loads(GOLDEN.read_text())


def test_the_recorded_names_are_all_names(recorded):
    assert sorted(recorded) == [name for name in config_names() if name != "train"]
    assert len(recorded) == 48 * 3 + len(DP3) + len(UPSTREAM_ALL) and len(UPSTREAM_ALL) == 14
    assert len(list((ROOT / "config").rglob("*.yaml"))) < 130


@pytest.mark.parametrize("name", [name for name in config_names() if name != "train"])
def test_composes_to_the_recorded_values(name, recorded):
    preset = PRESETS[sum(map(ord, name)) % 3]  # one of the three, to save time
    assert recorded[name][preset] == digest(name, f"preset={preset}"), f"{name} preset={preset} has changed"


@pytest.mark.parametrize("name", [name for modality in ("lowdim", "image", "pointcloud") for name in rotated(modality)])
def test_three_choices_equal_the_named_config(name, recorded):
    chosen = grid()[name]
    overrides = [f"{group}={choice}" for group, choice in zip(GRID, chosen, strict=True)]
    preset = PRESETS[(sum(map(ord, name)) + 1) % 3]  # another preset than in the test above
    assert recorded[name][preset] == digest("train", *overrides, f"preset={preset}")


def test_choices_override_each_other_as_before():
    """A named config keeps its name; task, encoder and the values of a pair follow what is chosen."""
    assert load_config("train").name == "train_idp_transformer_lowdim"
    cfg = load_config("train_idp_mlp_lowdim", "objective=flow")
    assert cfg.name == "train_idp_mlp_lowdim" and cfg.policy._target_.endswith("FlowMatchingPolicy")
    assert load_config("train", "modality=image", "task=can_ph_image").task.name == "can_ph_image"
    assert load_config("train", "modality=pointcloud").policy.obs_encoder._target_.endswith("DP3Encoder")
    cfg = load_config("train", "encoder=pointcloud", "task=metaworld")
    assert cfg.policy.obs_encoder._target_.endswith("DP3Encoder") and cfg.horizon == 4
    scales = [
        load_config("train", "objective=consistency", f"backbone={backbone}").policy.time_scale
        for backbone in ("mlp", "unet")
    ]
    assert scales == [0.25, 250.0]
    assert load_config("train", "objective=edm_teacher").name == "train_edm_teacher_transformer_lowdim"


def test_every_file_starts_with_a_line_that_describes_it():
    for path in (ROOT / "config").rglob("*.yaml"):
        assert comments(path) and len(comments(path)[0]) > 10, path
    assert not {name for name in grid() if "dp3" in name or "edm_teacher" in name}
    pairs = {f"{objective}_{backbone}" for objective in choices("objective") for backbone in choices("backbone")}
    assert set(choices("pair")) <= pairs


def test_studies_name_configs_that_exist():
    for path in (ROOT / "benchmarks/studies").glob("*.yaml"):
        named = set(re.findall(r"\bconfig: (\w+)", path.read_text()))
        assert named <= set(config_names()), path


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_every_choice_without_importing_torch(arguments):
    code = "import sys; from diffusion_policy.scripts.train import main; main(); assert 'torch' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for group in ("objective", "backbone", "modality", "task", "preset", "ablation"):
        for name, path in choices(group).items():
            first = comments(path)[0].removeprefix("# ")
            assert re.search(rf"^(  \*|   ) {name} +{re.escape(first)}$", done.stdout, re.MULTILINE), (group, name)
    assert "train_dp3" in done.stdout and max(map(len, done.stdout.splitlines())) <= 120
    assert "== Config groups ==" not in done.stdout


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--config-name=train_flow_unet_imag"], "train_flow_unet_image"),
        (["objective=naive_drifing"], "naive_drifting"),
        (["task=pusht_stat", "preset=debug"], "pusht_state"),
    ],
)
def test_a_misspelt_name_gets_the_nearest(arguments, expected):
    done = command("train.py", *arguments)
    assert done.returncode == 2 and expected in done.stderr and len(done.stderr.splitlines()) == 1


def started(*arguments):
    """The output of train.py in a new process: a fork would know the configs of this one already."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, str(ROOT / "train.py"), *arguments]
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_a_folder_of_the_user_joins_the_grid(tmp_path):
    (tmp_path / "objective").mkdir()
    (tmp_path / "objective/mine.yaml").write_text(
        "# @package _global_\n# Mine.\npolicy: {_target_: idp_workspace.policy.RegressionPolicy, loss_scale: 0.2}\n"
    )
    (tmp_path / "own.yaml").write_text(
        "defaults: [train_flow_mlp_lowdim, override objective: mine, _self_]\nname: own\n"
    )
    for arguments, name in (
        (["objective=mine", "backbone=unet"], "train_mine_unet_lowdim"),
        (["--config-name=train_mine_mlp_image"], "train_mine_mlp_image"),
        (["--config-name=own"], "own"),
    ):
        done = started("--config-dir", str(tmp_path), *arguments, "--cfg", "job")
        assert done.returncode == 0, done.stderr
        assert f"name: {name}\n" in done.stdout and "loss_scale: 0.2" in done.stdout
    assert " mine " in started("--config-dir", str(tmp_path), "--help").stdout


def test_a_file_of_the_user_replaces_one_of_ours(tmp_path):
    """A config that we have as a file, one that only the grid has, and a file of a group."""
    (tmp_path / "task").mkdir()
    (tmp_path / "task/pusht_state.yaml").write_text("# Mine.\nname: my_task\nobs_dim: 77\n")
    for name in ("train_idp_mlp_lowdim", "train_flow_mlp_lowdim"):
        (tmp_path / f"{name}.yaml").write_text(f"defaults: [task: pusht_state]\nname: my_{name}\n")
        done = started("--config-dir", str(tmp_path), f"--config-name={name}", "--cfg", "job")
        assert done.returncode == 0, done.stderr
        assert yaml.safe_load(done.stdout) == {"name": f"my_{name}", "task": {"name": "my_task", "obs_dim": 77}}
    for arguments in ([], ["--config-name=train_mip_unet_lowdim", "task=pusht_state"]):
        done = started("--config-dir", str(tmp_path), *arguments, "--cfg", "job")
        task = yaml.safe_load(done.stdout)["task"]
        assert (task["name"], task["obs_dim"]) == ("my_task", 77), done.stderr
    assert choices("task", [tmp_path])["pusht_state"] == tmp_path / "task/pusht_state.yaml"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_pusht(tmp_path_factory.mktemp("data") / "pusht.zarr")


def run(name, output, data, *overrides):
    cfg = load_config(name, "preset=debug", f"task.dataset.zarr_path={data}", *overrides)
    workspace = hydra.utils.get_class(cfg._target_)(cfg, output_dir=str(output))
    return workspace, workspace.run()


def test_the_promised_configurations_are_there():
    assert set(NAMED) <= set(CONFIGS)
    assert len(ABLATIONS) == 6  # the paper's five, and none


@pytest.mark.parametrize("name", TRAINED)
def test_trains_checkpoints_and_evaluates(name, tmp_path, data):
    workspace, summary = run(name, tmp_path / "run", data)
    assert summary["steps"] == 8 and summary["evaluations"] == 2
    lines = [json.loads(line) for line in (tmp_path / "run/logs.json.txt").read_text().splitlines()]
    assert lines[-1]["global_step"] == 7 and "test/mean_score" in lines[-1] and "train_loss" in lines[-1]
    for file in ("config.yaml", "summary.json", "learning_curve.png", "checkpoints/latest.ckpt"):
        assert (tmp_path / "run" / file).stat().st_size > 0
    assert summary["videos"]
    # The saved policy acts like the one in memory.
    payload = checkpoint_io.load(summary["checkpoint"])
    policy = policy_of(payload)
    obs = {"obs": torch.rand(2, 2, payload["cfg"]["task"]["obs_dim"]) * 400}
    torch.manual_seed(0)
    expected = workspace.policy.eval().predict_action(obs)["action"]
    torch.manual_seed(0)
    assert torch.equal(policy.predict_action(obs)["action"], expected)


@pytest.mark.parametrize(
    "name",
    [
        "train_idp_transformer_image",
        "train_naive_drifting_unet_image",
        "train_consistency_mlp_image",
        "train_ofp_mlp_image",
    ],
)
def test_trains_and_evaluates_from_images(name, tmp_path, data):
    workspace, summary = run(
        name,
        tmp_path / "run",
        data,
        "training.steps_per_epoch=1",
        "task.env_runner.n_test=1",
        "task.env_runner.n_test_vis=0",
        "task.env_runner.max_steps=8",
    )
    assert summary["steps"] == 2 and summary["evaluations"] == 2
    payload = checkpoint_io.load(summary["checkpoint"])
    policy = policy_of(payload)
    obs = {"image": torch.rand(2, 2, 3, 96, 96), "agent_pos": torch.rand(2, 2, 2) * 400}
    torch.manual_seed(0)
    expected = workspace.policy.eval().predict_action(obs)["action"]
    torch.manual_seed(0)
    assert torch.equal(policy.predict_action(obs)["action"], expected)


def test_every_configuration_of_a_state_has_one_of_images():
    siblings = [name.replace("_lowdim", "_image") for name in CONFIGS if name not in UPSTREAM]
    assert sorted(siblings) == IMAGE and len(IMAGE) == 48
    assert sorted([*(name.replace("_image", "_pointcloud") for name in IMAGE), *DP3]) == POINTCLOUD


@pytest.mark.parametrize("name", rotated("image"))
def test_image_configurations_build(name):
    """They differ from their siblings in the encoder, the task and their sizes alone."""
    cfg, sibling = load_config(name), load_config(name.replace("_image", "_lowdim"))
    changed = {key for key in cfg.policy if cfg.policy[key] != sibling.policy.get(key)}
    assert changed == {"obs_encoder", "shape_meta", "obs_dim"} and cfg.name == name and cfg.task.name == "pusht_image"
    assert cfg.dataloader.batch_size == cfg.val_dataloader.batch_size == 256
    small = load_config(name, "preset=debug")
    policy = hydra.utils.instantiate(small.policy)
    assert policy.obs_encoder.frame.rgb_keys == ["image"] and type(policy) is hydra.utils.get_class(cfg.policy._target_)
    assert issubclass(
        hydra.utils.get_class(cfg._target_),
        hydra.utils.get_class("diffusion_policy.workspace.train_workspace.TrainWorkspace"),
    )


@pytest.mark.parametrize("backbone, count", [("transformer", 11_522_112), ("unet", 11_374_144), ("mlp", 11_702_848)])
def test_image_encoders_have_the_protocol_s_size(backbone, count):
    with torch.device("meta"):
        policy = hydra.utils.instantiate(load_config(f"train_idp_{backbone}_image").policy)
    assert sum(p.numel() for p in policy.obs_encoder.parameters()) == count


@pytest.mark.parametrize("number, name", list(enumerate(CONFIGS)))
def test_builds_at_full_and_at_small_size(number, name):
    tasks = ("pusht_state", "pusht_lowdim")
    for preset, task in zip(("paper", "cpu"), tasks if number % 2 else tasks[::-1], strict=True):
        with torch.device("meta"):  # sizes without the memory
            cfg = load_config(name, f"preset={preset}", f"task={task}")
            policy = hydra.utils.instantiate(cfg.policy)
        assert sum(p.numel() for p in policy.parameters()) > (5e6 if preset == "paper" else 1e4)


@pytest.mark.parametrize(
    "name, target", [*((name, "IDPPolicy") for name in UPSTREAM), (UPSTREAM[0], "NaiveDriftingPolicy")]
)
def test_swapping_only_the_policy_target_of_an_upstream_configuration_trains(name, target, tmp_path, data):
    short = ("training.steps_per_epoch=1", "task.env_runner.max_steps=8", "task.env_runner.n_test_vis=0")
    workspace, summary = run(name, tmp_path / "run", data, f"policy._target_=idp_workspace.policy.{target}", *short)
    assert type(workspace.model).__name__ == target and summary["steps"] == 2
    assert type(workspace.model.model).__module__.startswith("diffusion_policy.model.diffusion.")


def test_intervals_count_epochs_from_one_and_include_the_last(tmp_path, data):
    run(
        "train_idp_mlp_lowdim",
        tmp_path / "run",
        data,
        "training.num_epochs=5",
        "training.rollout_every=2",
        "training.checkpoint_every=2",
        "training.val_every=3",
        "task.dataset.val_ratio=0.2",
        "task.env_runner.max_steps=8",
        "task.env_runner.n_test_vis=0",
        "lambda_schedule=ramp",
    )
    lines = [json.loads(line) for line in (tmp_path / "run/logs.json.txt").read_text().splitlines()]

    def epochs(key):
        return [line["epoch"] + 1 for line in lines if key in line]

    assert epochs("test/mean_score") == [2, 4, 5] and epochs("val_loss") == [3, 5]


def test_a_run_reports_the_best_and_the_mean_of_the_last_five_evaluations(tmp_path, data):
    workspace, _ = run(
        "train_idp_mlp_lowdim", tmp_path / "run", data, "task.env_runner.max_steps=8", "task.env_runner.n_test_vis=0"
    )
    workspace.scores = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    summary = run_folder.finish(workspace, None)
    assert (summary["score"], summary["best_score"], summary["mean_of_last_scores"]) == (6.0, 6.0, 4.0)
    workspace.scores = [6.0, 0.0, 5.0, 1.0, 4.0, 3.0, 2.0]  # DP3 reports the mean of the five best
    assert run_folder.finish(workspace, None)["mean_of_best_scores"] == 4.0


RECIPE = ("optimizer=muon", "energy_power=0.5", "probe_fraction=0.5", "state_features=features", "augment=mirror")


@pytest.mark.parametrize("backbone", ["transformer", "unet", "mlp"])
def test_the_parts_of_the_small_recipe_train_resume_and_load(backbone, tmp_path, data):
    name, short = f"train_idp_{backbone}_lowdim", "task.env_runner.max_steps=8"
    whole, _ = run(name, tmp_path / "whole", data, short, *RECIPE)
    assert type(whole.optimizer).__name__ == "Muon"
    if backbone == "transformer":  # has parameters of every kind; a resume does not know the network
        run(name, tmp_path / "half", data, short, *RECIPE, "training.num_epochs=1")
        half, _ = run(name, tmp_path / "half", data, short, *RECIPE, "training.lr_scheduler=constant")
        assert type(half.optimizer).__name__ == "Muon" and half.global_step == whole.global_step
    policy = load_policy(tmp_path / "whole", device="cpu")
    obs = {"obs": torch.rand(1, 2, 5) * 500}
    assert torch.equal(policy.predict_action(obs)["action"], whole.policy.predict_action(obs)["action"])


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_every_ablation_trains(ablation, tmp_path, data):
    short = ("training.steps_per_epoch=1", "task.env_runner=null")
    workspace, summary = run("train_idp_mlp_lowdim", tmp_path / "run", data, f"ablation={ablation}", *short)
    assert summary["steps"] == 2
    options = workspace.model.options
    assert {
        "none": True,
        "without_terminal_eval": workspace.model.lambda_prox == 0,
        "uniform_neighbors": options.weights == "uniform",
        "shuffled_neighbors": options.weights == "shuffled",
        "without_reference": options.reference == "none",
        "absolute_excess": options.excess == "absolute",
    }[ablation]


def test_the_paper_s_preset_has_the_paper_s_values():
    cfg = load_config("train_idp_transformer_lowdim")
    policy = hydra.utils.instantiate(cfg.policy)
    assert policy.lambda_prox == pytest.approx(81) and policy.options.lambda_schedule == "constant"
    assert (policy.options.tau, policy.options.granularity, policy.options.reference) == (1.0, "per_step", "batch")
    assert cfg.training.steps_per_epoch * cfg.training.num_epochs == 300_000
    assert (
        cfg.dataloader.batch_size,
        cfg.optimizer.lr,
        cfg.optimizer.weight_decay,
        cfg.ema.rate,
        cfg.training.grad_clip_norm,
    ) == (1024, 1e-4, 1e-5, 0.995, 10.0)
    # MIP's network for PushT from state, less its unused scalar head, and its encoder.
    assert sum(p.numel() for p in policy.model.parameters()) == 20_272_130
    assert sum(p.numel() for p in policy.obs_encoder.parameters()) == 447_744


def flat(value, prefix=""):
    if not isinstance(value, dict):
        return {prefix: value}
    return {k: v for key, child in value.items() for k, v in flat(child, f"{prefix}.{key}" if prefix else key).items()}


#: What differs from upstream on purpose: where data, device and logs are; no loader processes for data in memory.
OURS = (
    "logging.",
    "multi_run.",
    "training.device",
    *(f"{split}dataloader.{key}" for split in ("", "val_") for key in ("num_workers", "persistent_workers")),
    "task.dataset.zarr_path",
    "dataset.zarr_path",
)


@pytest.mark.parametrize("name", UPSTREAM_ALL)
def test_upstream_configurations_have_upstream_s_values(name):
    reference = golden.read("resolved_configs")["workspaces"][name]
    ours = flat(OmegaConf.to_container(load_config(name), resolve=True))
    allowed = OURS
    if reference["task_name"] == "lift_image":  # ours train on PushT unless told: lift needs robosuite and its data
        assert ours["task.name"] == "pusht_image"
        allowed += ("task", "shape_meta.", "policy.shape_meta.", "policy.obs_encoder.shape_meta.")
    theirs = {key: value for key, value in flat(reference).items() if not key.startswith(allowed)}
    assert {key: (value, ours.get(key)) for key, value in theirs.items() if key not in ours or ours[key] != value} == {}
    # Nothing else reaches the policy: upstream's would hand it to the scheduler.
    added = {key for key in ours if key.startswith("policy.") and not key.startswith(allowed)} - set(theirs)
    assert added <= {"policy.obs_encoder_width", "policy.obs_encoder.rgb_model.width"}


@pytest.mark.parametrize("task, theirs", golden.read("resolved_configs")["tasks"].items())
def test_upstream_s_tasks_have_upstream_s_values(task, theirs):
    kind = "unet_hybrid" if task.endswith("_image") else "unet_lowdim"
    cfg = load_config(f"train_diffusion_{kind}_workspace", f"task={task}")
    ours = flat(OmegaConf.to_container(cfg.task, resolve=True))
    different = {key: (value, ours.get(key)) for key, value in flat(theirs).items() if ours.get(key, "-") != value}
    assert not [key for key in different if not key.startswith(OURS)], different


def test_a_task_has_mip_s_values_under_mip_s_protocol_and_upstream_s_under_upstream_s():
    for name, legacy, ratio, episodes in (
        ("train_idp_transformer_image", False, 0.0, None),
        ("train_diffusion_unet_image_workspace", True, 0.02, 90),
    ):
        task = load_config(name, "task=pusht_image").task
        assert (task.env_runner.legacy_test, task.dataset.val_ratio, task.dataset.max_train_episodes) == (
            legacy,
            ratio,
            episodes,
        )
        task = load_config(name, "task=lift_ph_image").task
        assert (task.dataset.normalization, task.dataset.val_ratio) == ("upstream" if legacy else "min_max", ratio)


def test_layers_of_the_code(repo_root):
    """The host knows nothing of the plugin; the plugin uses only what upstream also has at the same path."""
    import ast

    upstream = {
        "diffusion_policy.model.common.normalizer": {"LinearNormalizer", "SingleFieldLinearNormalizer"},
        "diffusion_policy.model.diffusion.conditional_unet1d": {"ConditionalUnet1D"},
        "diffusion_policy.policy.base_image_policy": {"BaseImagePolicy"},
        "diffusion_policy.policy.base_lowdim_policy": {"BaseLowdimPolicy"},
        "diffusion_policy.policy.diffusion_transformer_hybrid_image_policy": {"DiffusionTransformerHybridImagePolicy"},
        "diffusion_policy.policy.diffusion_unet_hybrid_image_policy": {"DiffusionUnetHybridImagePolicy"},
        "diffusion_policy.workspace.base_workspace": {"BaseWorkspace"},
        "diffusion_policy.workspace.train_diffusion_unet_image_workspace": {"TrainDiffusionUnetImageWorkspace"},
        "diffusion_policy.workspace.train_diffusion_unet_lowdim_workspace": {"TrainDiffusionUnetLowdimWorkspace"},
        "diffusion_policy.common.pytorch_util": {"dict_apply"},
    }
    for path in (repo_root / "diffusion_policy").rglob("*.py"):
        assert "idp_workspace" not in path.read_text(), f"{path} knows the plugin"
    # Tools that no policy needs: one starts runs of this repository, the other reads settings of LeRobot.
    tools = [repo_root / "idp_workspace" / name for name in ("suite", "lerobot.py")]
    for path in (repo_root / "idp_workspace").rglob("*.py"):
        if any(path.is_relative_to(tool) for tool in tools):
            continue
        tree = ast.parse(path.read_text())
        # An import of the host's own may be tried first, if upstream's name follows.
        tried = [line for node in ast.walk(tree) if isinstance(node, ast.Try) for line in node.body]
        for node in ast.walk(tree):
            if node in tried:
                continue
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("diffusion_policy"):
                names = {alias.name for alias in node.names}
                assert names <= upstream.get(node.module, set()), (
                    f"{path} imports {names} from {node.module}, which upstream does not have"
                )
            elif isinstance(node, ast.Import):
                assert not any(alias.name.startswith("diffusion_policy") for alias in node.names), path


def test_third_parties_extend_the_package_as_a_namespace(tmp_path):
    """Their folder adds modules; those before ours in sys.path come first, so that upstream's tree stays upstream's."""
    for folder, text in (("first", "mine"), ("second", "not mine")):
        module = tmp_path / folder / "diffusion_policy/common/errors.py"
        module.parent.mkdir(parents=True)
        module.write_text(f"NAME = {text!r}")
    (tmp_path / "second/diffusion_policy/own.py").write_text("")
    code = (
        "import diffusion_policy, sys; assert 'torch' not in sys.modules\n"
        "from diffusion_policy.common import errors; import diffusion_policy.own, diffusion_policy.common.memory\n"
        "print(errors.NAME, hasattr(diffusion_policy, 'x'))"
    )
    path = os.pathsep.join(map(str, (tmp_path / "first", ROOT, tmp_path / "second")))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "mine False\n", done.stderr


# robomimic's tasks

ROBOMIMIC = sorted(path.stem for path in (ROOT / "config/task").glob("*_[pm]h_*.yaml"))
METHODS = sorted({name.removeprefix("train_").rsplit("_", 2)[0] for name in IMAGE})


def test_robomimic_s_tasks_have_the_protocol_s_values():
    dims = {"lift": 19, "can": 23, "square": 23, "tool_hang": 53, "transport": 59}
    assert (
        sorted(
            f"{task}_{kind}_{obs}"
            for task in dims
            for kind in ("ph", "mh")
            for obs in ("lowdim", "image")
            if (task, kind) != ("tool_hang", "mh")
        )
        == ROBOMIMIC
    )
    for name in ROBOMIMIC:
        task, kind, obs = name.rsplit("_", 2)
        cfg = load_config(f"train_idp_transformer_{obs}", f"task={name}")
        long, arms = task in ("transport", "tool_hang"), 2 if task == "transport" else 1
        assert (
            cfg.task.name == cfg.task_name == name
            and cfg.task.abs_action
            and cfg.task.dataset.normalization == "min_max"
        )
        assert cfg.task.dataset_path == cfg.task.dataset.dataset_path == cfg.task.env_runner.dataset_path
        assert (
            cfg.task.dataset_path
            == f"data/robomimic/datasets/{task}/{kind}/{'low_dim' if obs == 'lowdim' else 'image'}_abs.hdf5"
        )
        assert cfg.horizon == cfg.task.dataset.horizon == (16 if (task, kind) == ("lift", "ph") else 10)
        assert cfg.task.env_runner.max_steps == (700 if long else 400) and cfg.task.action_dim == 10 * arms
        if obs == "lowdim":
            assert cfg.task.obs_dim == dims[task] and len(cfg.task.obs_keys) == 1 + 3 * arms
            assert cfg.task.env_runner.obs_keys == cfg.task.dataset.obs_keys == cfg.task.obs_keys
        else:
            shapes = {key: tuple(value.shape) for key, value in cfg.task.shape_meta.obs.items()}
            rgb = {key for key, value in cfg.task.shape_meta.obs.items() if value.type == "rgb"}
            view = {
                "transport": ["shouldercamera0", "shouldercamera1", "robot1_eye_in_hand"],
                "tool_hang": ["sideview"],
            }.get(task, ["agentview"])
            assert rgb == {f"{camera}_image" for camera in ["robot0_eye_in_hand", *view]} and {
                shapes[key] for key in rgb
            } == {(3, 84, 84)}
            assert {key: shapes[key] for key in shapes if key not in rgb} == {
                f"robot{arm}_{key}": shape
                for arm in range(arms)
                for key, shape in (("eef_pos", (3,)), ("eef_quat", (4,)), ("gripper_qpos", (2,)))
            }
            assert cfg.task.env_runner.render_obs_key == f"{view[0]}_image" and cfg.task.crop_shape == [76, 76]


def test_another_kind_of_demonstrations_is_one_word():
    cfg = load_config("train_idp_mlp_lowdim", "task=lift_ph_lowdim", "task.dataset_type=scripted")
    assert (
        cfg.task.dataset.dataset_path == "data/robomimic/datasets/lift/scripted/low_dim_abs.hdf5"
        and cfg.task.name == "lift_scripted_lowdim"
    )


def test_the_horizon_is_the_task_s_but_the_unet_s_a_power_of_two():
    for backbone, task, expected in (
        ("mlp", "can_ph_lowdim", 10),
        ("transformer", "lift_ph_lowdim", 16),
        ("unet", "can_ph_lowdim", 16),
        ("unet", "lift_mh_lowdim", 16),
        ("mlp", "pusht_state", 16),
        ("unet", "pusht_lowdim", 16),
    ):
        assert load_config(f"train_idp_{backbone}_lowdim", f"task={task}").policy.horizon == expected
        assert load_config(f"train_idp_{backbone}_lowdim", f"task={task}", "horizon=12").task.dataset.horizon == 12
    for name in UPSTREAM:
        assert load_config(name, "task=can_ph_lowdim").horizon == 16


@pytest.mark.parametrize("index, name", list(enumerate(ROBOMIMIC)))
def test_every_method_builds_with_robomimic_s_tasks(index, name):
    """A fifth of the methods, each with another network, for each task; between them, the tasks see all of them."""
    obs = name.rsplit("_", 1)[1]
    for number, method in enumerate(METHODS):
        if (number + index) % 5 == 0:
            backbone = ("transformer", "unet", "mlp")[(number + index // 3) % 3]
            cfg = load_config(f"train_{method}_{backbone}_{obs}", f"task={name}", "preset=debug")
            with torch.device("meta"):
                policy = hydra.utils.instantiate(cfg.policy)
            assert (policy.horizon, policy.action_dim) == (cfg.horizon, cfg.task.action_dim)
    if obs == "lowdim":
        cfg = load_config(UPSTREAM[index // 2 % 3], f"task={name}", "preset=debug")
        with torch.device("meta"):
            hydra.utils.instantiate(cfg.policy)


# tasks observed through point clouds


@pytest.fixture(scope="module")
def clouds(tmp_path_factory):
    return write_point_clouds(tmp_path_factory.mktemp("data") / "clouds.zarr")


@pytest.mark.parametrize("name", [*rotated("pointcloud"), *DP3])
def test_every_method_trains_on_point_clouds(name, tmp_path, clouds):
    cfg = load_config(name)
    assert (
        cfg.name == name
        and cfg.task.name == "assembly"
        and cfg.dataloader.batch_size == cfg.val_dataloader.batch_size == 128
    )
    assert (cfg.n_obs_steps, cfg.horizon, cfg.n_action_steps) == ((2, 16, 8) if name == "train_dp3" else (2, 4, 3))
    own = "one_step_diffusion" in name  # has its own rate and betas
    assert list(cfg.optimizer.betas) == [0.0 if own else 0.95, 0.999] and cfg.optimizer.lr == (1e-5 if own else 1e-4)
    assert (cfg.optimizer.weight_decay, cfg.ema.rate, cfg.ema.power) == (1e-6, None, 0.75)
    assert (
        cfg.training.num_epochs,
        cfg.training.rollout_every,
        cfg.training.steps_per_epoch,
        cfg.training.lr_warmup_steps,
    ) == (3000, 200, None, 500)
    workspace, summary = train_here(
        tmp_path / "run",
        name,
        "preset=debug",
        f"task.zarr_path={clouds}",
        "task.env_runner=null",
        "training.steps_per_epoch=1",
    )
    assert (
        summary["steps"] == 2
        and summary["score"] is None
        and type(workspace.model.obs_encoder).__name__ == "DP3Encoder"
    )
    payload = checkpoint_io.load(summary["checkpoint"])
    policy = policy_of(payload)
    obs = {"point_cloud": torch.randn(2, 2, 16, 3), "agent_pos": torch.randn(2, 2, 9)}
    torch.manual_seed(0)
    expected = workspace.policy.eval().predict_action(obs)["action"]
    torch.manual_seed(0)
    assert torch.equal(policy.predict_action(obs)["action"], expected) and expected.shape == (2, cfg.n_action_steps, 4)


@pytest.mark.parametrize(
    "overrides, points, state, action",
    [
        (["task=adroit", "task.name=hammer"], 512, 24, 26),
        (["task=adroit", "task.name=door"], 512, 24, 28),
        (["task=adroit", "task.name=pen"], 512, 24, 24),
        (["task=dexart", "task.name=laptop"], 1024, 32, 22),
        (["task=dexart", "task.name=bucket"], 1024, 33, 22),
        (["task=metaworld"], 1024, 9, 4),
        (["task=metaworld", "preset=cpu"], 256, 9, 4),
        (["task=adroit", "preset=cpu"], 256, 24, 26),
    ],
)
def test_one_file_describes_all_tasks_of_a_suite(overrides, points, state, action):
    for name in ("train_idp_transformer_pointcloud", "train_naive_drifting_unet_pointcloud", "train_simple_dp3"):
        with torch.device("meta"):
            cfg = load_config(name, *overrides)
            policy = hydra.utils.instantiate(cfg.policy)
        assert policy.generator.entries["point_cloud"].shape == (points, 3) and policy.generator.entries[
            "agent_pos"
        ].shape == (state,)
        assert (
            policy.action_dim == action
            and cfg.task.env_runner.n_test == 20
            and cfg.task.env_runner.num_points == points
        )
        assert ("imagin_robot" in policy.generator.entries) == ("task=dexart" in overrides)


def test_dp3_has_its_sizes_and_its_sampler():
    with torch.device("meta"):
        large, small = (hydra.utils.instantiate(load_config(name).policy) for name in DP3)
    millions = [sum(p.numel() for p in policy.parameters()) / 1e6 for policy in (large, small)]
    assert 255 < millions[0] < 256 and 7 < millions[1] < 8
    for policy in (large, small):
        assert (
            policy.nfe == 10 and policy.train_steps == 100 and policy.noise_scheduler.config.prediction_type == "sample"
        )


@pytest.mark.parametrize("target", ["IDPPolicy", "NaiveDriftingPolicy"])
def test_swapping_only_the_policy_target_of_dp3_trains(target, tmp_path, clouds):
    workspace, summary = train_here(
        tmp_path / "run",
        "train_simple_dp3",
        "preset=debug",
        f"task.zarr_path={clouds}",
        "task.env_runner=null",
        f"policy._target_=idp_workspace.policy.{target}",
    )
    assert type(workspace.model).__name__ == target and summary["steps"] == 8


def test_a_policy_trained_without_a_simulator_cannot_be_evaluated(tmp_path, clouds, capsys):
    _, summary = train_here(
        tmp_path / "run", "train_idp_mlp_pointcloud", "preset=debug", f"task.zarr_path={clouds}", "task.env_runner=null"
    )
    assert "eval.py" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        eval_script.main(["--checkpoint", summary["checkpoint"]])
    assert "trained without a simulator" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="task.env_runner must be a section"):
        train_here(
            tmp_path / "other",
            "train_idp_mlp_pointcloud",
            "preset=debug",
            f"task.zarr_path={clouds}",
            "task.env_runner=none",
        )


if __name__ == "__main__":
    hashes = {name: {p: digest(name, f"preset={p}") for p in PRESETS} for name in config_names() if name != "train"}
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text("{\n" + ",\n".join(f"{json.dumps(n)}: {json.dumps(v)}" for n, v in hashes.items()) + "\n}\n")
