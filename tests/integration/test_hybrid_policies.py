"""Diffusion policies on images, the hybrid ones with robomimic's encoder; their configurations, and other objectives
in their place.
"""

import copy
import json

import hydra
import pytest
import torch
import yaml
from diffusers import DDIMScheduler, DDPMScheduler
from torch import nn

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.common.normalize_util import get_image_range_normalizer
from diffusion_policy.model.common.normalizer import LinearNormalizer
from diffusion_policy.model.diffusion.ema_model import EMAModel
from diffusion_policy.model.vision.crop_randomizer import CropRandomizer
from diffusion_policy.model.vision.model_getter import get_resnet
from diffusion_policy.model.vision.multi_image_obs_encoder import MultiImageObsEncoder
from diffusion_policy.model.vision.resnet import ResNet
from diffusion_policy.model.vision.robomimic_obs_encoder import ObservationEncoder, SpatialSoftmax, VisualCore
from diffusion_policy.policy.base_image_policy import BaseImagePolicy
from diffusion_policy.policy.diffusion_transformer_hybrid_image_policy import DiffusionTransformerHybridImagePolicy
from diffusion_policy.policy.diffusion_unet_hybrid_image_policy import DiffusionUnetHybridImagePolicy
from diffusion_policy.policy.diffusion_unet_image_policy import DiffusionUnetImagePolicy
from diffusion_policy.policy.loading import policy_of
from diffusion_policy.storage import checkpoint_io
from idp_workspace import policy as policies
from tests import golden
from tests.util import command, load_config, train_here, write_pusht

B, T, TO, TA, DA = 3, 8, 2, 4, 2
META = {"obs": {"pos": {"shape": [2]}, "image": {"shape": [3, 40, 40], "type": "rgb"}}, "action": {"shape": [DA]}}
SIZES = dict(shape_meta=META, horizon=T, n_action_steps=TA, n_obs_steps=TO)
HYBRID = dict(crop_shape=(36, 36), obs_encoder_group_norm=True, eval_fixed_crop=True, obs_encoder_width=4)
UNET = dict(diffusion_step_embed_dim=8, down_dims=(8, 16), n_groups=4)
TRANSFORMER = dict(n_layer=1, n_head=2, n_emb=16, p_drop_attn=0.0)
FEATURES = 64 + 2


def ddpm(**options):
    return DDPMScheduler(
        **{
            **dict(
                num_train_timesteps=100,
                beta_schedule="squaredcos_cap_v2",
                variance_type="fixed_small",
                clip_sample=True,
            ),
            **options,
        }
    )


def normalizer():
    out = LinearNormalizer()
    out.fit(
        {
            "pos": torch.linspace(-3, 1, 9)[:, None].expand(9, 2),
            "action": torch.linspace(0, 512, 9)[:, None].expand(9, DA),
        }
    )
    out["image"] = get_image_range_normalizer()
    return out


def build(kind, seed=0, scheduler=None, **options):
    torch.manual_seed(seed)
    common = {**SIZES, "noise_scheduler": scheduler or ddpm(), "num_inference_steps": 3}
    if kind == "unet":
        policy = DiffusionUnetHybridImagePolicy(**{**common, **HYBRID, **UNET, **options})
    elif kind == "transformer":
        policy = DiffusionTransformerHybridImagePolicy(**{**common, **HYBRID, **TRANSFORMER, **options})
    else:
        encoder = MultiImageObsEncoder(META, get_resnet("resnet18", width=4), crop_shape=(36, 36), use_group_norm=True)
        policy = DiffusionUnetImagePolicy(**{**common, **UNET, "obs_encoder": encoder, **options})
    policy.set_normalizer(normalizer())
    return policy


KINDS = ("unet", "transformer", "image")
INPAINT = {
    "unet": {"obs_as_global_cond": False},
    "transformer": {"obs_as_cond": False},
    "image": {"obs_as_global_cond": False},
}


def batch(steps=TO, seed=0, n=B):
    g = torch.Generator().manual_seed(seed)
    return {
        "obs": {
            "image": torch.randint(0, 256, (n, steps, 3, 40, 40), generator=g, dtype=torch.uint8),
            "pos": torch.rand(n, steps, 2, generator=g) * 4 - 3,
        },
        "action": torch.rand(n, T, DA, generator=g) * 512,
    }


def normalised(obs):
    """By hand: what the encoder is given, frames in one row."""
    return {"image": (obs["image"].float() / 255 * 2 - 1).flatten(0, 1), "pos": ((obs["pos"] + 1) / 2).flatten(0, 1)}


class Stub(nn.Module):
    """Returns a constant and keeps what it was called with."""

    def forward(self, sample, timestep, **conditions):
        self.sample, self.timestep, self.conditions = sample, timestep, conditions
        return torch.full_like(sample, 0.5)


# ---------------------------------------------------------------------- robomimic's encoder
def test_a_keypoint_is_the_mean_position_under_its_map():
    pool = SpatialSoftmax((3, 4, 5), num_kp=2)
    features = torch.randn(6, 3, 4, 5)
    maps = torch.einsum("kc,bchw->bkhw", pool.nets.weight[:, :, 0, 0], features) + pool.nets.bias[:, None, None]
    weights = maps.exp() / maps.exp().sum(dim=(2, 3), keepdim=True)
    x = (weights.sum(2) * torch.tensor([-1, -0.5, 0, 0.5, 1])).sum(-1)
    y = (weights.sum(3) * torch.tensor([-1, -1 / 3, 1 / 3, 1])).sum(-1)
    torch.testing.assert_close(pool(features), torch.stack([x, y], dim=-1))


def test_the_encoder_is_cropped_image_features_and_numbers_in_the_order_of_shape_meta():
    torch.manual_seed(0)
    encoder = ObservationEncoder(META, (36, 36), True, True, width=4).eval()
    obs = normalised(batch()["obs"])
    out = encoder(obs)
    assert out.shape == (B * TO, FEATURES) and encoder.output_shape() == [FEATURES]
    assert torch.equal(out[:, :2], obs["pos"])
    core = encoder.obs_nets["image"]
    expected = core.nets[3](core.pool(core.backbone(obs["image"][:, :, 2:38, 2:38])).flatten(1)).clamp(min=0)
    assert torch.equal(out[:, 2:], expected) and out[:, 2:].min() == 0 < out[:, 2:].max()
    with pytest.raises(ValueError, match=r"'image' must have shape \(batch, 3, 40, 40\)"):
        encoder({**obs, "image": obs["image"][..., 1:]})
    with pytest.raises(ConfigError, match="rgb or low_dim, not 'depth'"):
        ObservationEncoder({"obs": {"d": {"shape": [1, 8, 8], "type": "depth"}}})


@pytest.mark.parametrize("eval_fixed_crop", [True, False])
def test_crops_in_training_and_evaluation(eval_fixed_crop):
    """Without eval_fixed_crop they are random in evaluation too, as robomimic's are."""
    encoder = ObservationEncoder(META, (36, 36), True, eval_fixed_crop, width=4)
    crop = encoder.obs_randomizers["image"]
    images = torch.rand(5, 3, 40, 40)
    for mode in (True, False):
        encoder.train(mode)
        torch.manual_seed(7)
        out = crop(images)
        torch.manual_seed(7)
        if mode or not eval_fixed_crop:
            tops, lefts = ((torch.rand(5, 1) * 4).long().flatten() for _ in range(2))
        else:
            tops = lefts = [2] * 5
        assert torch.equal(
            out, torch.stack([image[:, t : t + 36, u : u + 36] for image, t, u in zip(images, tops, lefts)])
        )
    assert (type(crop) is CropRandomizer) == eval_fixed_crop


def test_without_a_crop_the_whole_image_is_seen():
    encoder = ObservationEncoder(META, None, True, True, width=4)
    obs = normalised(batch()["obs"])
    before = torch.get_rng_state()
    out = encoder(obs)
    assert not encoder.obs_randomizers and torch.equal(torch.get_rng_state(), before)
    assert torch.equal(out[:, 2:], encoder.obs_nets["image"](obs["image"]).relu())
    with pytest.raises(ConfigError, match="40 x 40 must be smaller"):
        ObservationEncoder(META, (40, 40))


def test_group_norm_is_replaced_under_both_names():
    torch.manual_seed(0)
    plain, grouped = (ObservationEncoder(META, (36, 36), group_norm).obs_nets["image"] for group_norm in (False, True))
    assert sum(isinstance(m, nn.BatchNorm2d) for m in plain.modules()) == 20
    norms = [m for m in grouped.modules() if isinstance(m, nn.GroupNorm)]
    assert (
        sorted({(m.num_channels, m.num_groups) for m in norms}) == [(64, 4), (128, 8), (256, 16), (512, 32)]
        and len(norms) == 20
    )
    assert (
        not any(isinstance(m, nn.BatchNorm2d) for m in grouped.modules())
        and grouped.nets[0].nets[1] is grouped.backbone.nets[1]
    )


def test_both_names_of_a_weight_stay_one_weight():
    torch.manual_seed(0)
    core, source = VisualCore((3, 36, 36), width=4), VisualCore((3, 36, 36), width=4)
    state = {key: value.clone() for key, value in source.state_dict().items()}  # as from a file: two tensors
    assert len(state) > len(dict(core.named_parameters()))
    core.load_state_dict(state)
    for part, alias in ((core.backbone, core.nets[0]), (core.pool, core.nets[1])):
        assert part is alias
    images = torch.rand(2, 3, 36, 36)
    assert torch.equal(core.eval()(images), source.eval()(images))
    twin = copy.deepcopy(core)
    assert twin.backbone is twin.nets[0] and twin.pool is twin.nets[1]
    # An average keeps them one, and steps once.
    ema = EMAModel(twin, rate=0.5)
    with torch.no_grad():
        core.backbone.nets[0].weight += 1
    before = twin.backbone.nets[0].weight.clone()
    ema.step(core)
    torch.testing.assert_close(twin.nets[0].nets[0].weight, before + 0.5)


# ---------------------------------------------------------------------- upstream's layouts
def golden_policy(config_name, overrides, reference, tasks):
    """Upstream's policy section for these overrides, made of its resolved configurations."""
    config = copy.deepcopy(reference[config_name])
    policy = config["policy"]
    for override in overrides:
        key, value = override.split("=", 1)
        if key == "task":
            meta = tasks[value]
            policy["shape_meta"] = meta
            if "obs_encoder" in policy:
                policy["obs_encoder"]["shape_meta"] = meta
        else:
            target = policy
            *path, last = key.removeprefix("policy.").split(".")
            for name in path:
                target = target[name]
            target[last] = json.loads(value)
    return policy


def test_layouts_and_optimizer_groups_match():
    reference = golden.read("resolved_configs")
    layouts = golden.read("state_dict_layouts_image")
    assert len(layouts) == 13
    for name, layout in layouts.items():
        with torch.device("meta"):
            policy = hydra.utils.instantiate(
                golden_policy(
                    layout["config_name"], layout["overrides"], reference["workspaces"], reference["shape_meta"]
                )
            )
        assert f"{type(policy).__module__}.{type(policy).__name__}" == layout["policy_class"], name
        expected = {
            key: (tuple(shape), dtype)
            for key, (shape, dtype) in layout["policy_state_dict"].items()
            if not key.startswith("normalizer.")
        }
        ours = {
            key: (tuple(value.shape), str(value.dtype).removeprefix("torch."))
            for key, value in policy.state_dict().items()
        }
        assert ours == expected and list(ours) == list(expected), name
        assert [key for key, _ in policy.named_buffers() if key in ours] == layout["buffers"], name
        assert policy.obs_feature_dim == layout["obs_feature_dim"] and policy.kwargs == {}
        assert sum(p.numel() for p in policy.model.parameters()) == layout["n_params_model"]
        assert sum(p.numel() for p in policy.obs_encoder.parameters()) == layout["n_params_obs_encoder"]
        if "optimizer_groups" in layout:
            optimizer = policy.get_optimizer(1e-3, 1e-6, 1e-4, [0.9, 0.95])
            names = {parameter: key for key, parameter in policy.named_parameters()}
            groups = [(group["weight_decay"], [names[p] for p in group["params"]]) for group in optimizer.param_groups]
            assert groups == [(group["weight_decay"], group["params"]) for group in layout["optimizer_groups"]], name


# ---------------------------------------------------------------------- training and acting
@pytest.mark.parametrize("inpaint", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_train_and_sample(kind, inpaint):
    policy = build(kind, **(INPAINT[kind] if inpaint else {}))
    assert isinstance(policy, BaseImagePolicy) and (policy.inpainting, policy.obs_feature_dim) == (
        inpaint,
        32 + 2 if kind == "image" else FEATURES,
    )
    data = batch(steps=T)
    policy.compute_loss(data).backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in policy.model.parameters())
    # What is in-painted is a target, from which the encoder must not learn.
    assert inpaint == all(p.grad is None for p in policy.obs_encoder.parameters())
    policy.eval()
    torch.manual_seed(1)
    first = policy.predict_action(data["obs"])
    assert (
        set(first) == {"action", "action_pred"}
        and first["action"].shape == (B, TA, DA)
        and first["action_pred"].shape == (B, T, DA)
    )
    assert torch.equal(first["action"], first["action_pred"][:, TO - 1 : TO - 1 + TA])
    # Later observations are not seen; bytes and floats are the same image.
    seen = {"image": data["obs"]["image"][:, :TO].float() / 255, "pos": data["obs"]["pos"][:, :TO]}
    torch.manual_seed(1)
    assert torch.equal(policy.predict_action(seen)["action"], first["action"])
    assert not torch.equal(policy.predict_action(seen)["action"], first["action"])
    other = {**seen, "image": seen["image"].flip(-1)}
    torch.manual_seed(1)
    assert not torch.equal(policy.predict_action(other)["action"], first["action"])


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_in_closed_form(kind, prediction_type):
    """The order of random numbers: crops, noise, diffusion steps."""
    policy, data = build(kind, scheduler=ddpm(prediction_type=prediction_type)), batch()
    policy.model = Stub()
    torch.manual_seed(3)
    loss = policy.compute_loss(data)
    torch.manual_seed(3)
    features = policy.obs_encoder(normalised(data["obs"])).unflatten(0, (B, TO))
    noise, steps = torch.randn(B, T, DA), torch.randint(0, 100, (B,))
    action = data["action"] / 256 - 1
    torch.testing.assert_close(
        loss, ((0.5 - (noise if prediction_type == "epsilon" else action)) ** 2).mean(), rtol=1e-5, atol=1e-5
    )
    signal = policy.noise_scheduler.alphas_cumprod[steps][:, None, None]
    torch.testing.assert_close(
        policy.model.sample, signal.sqrt() * action + (1 - signal).sqrt() * noise, rtol=1e-4, atol=1e-5
    )
    assert torch.equal(policy.model.timestep, steps)
    cond = {"cond": features} if kind == "transformer" else {"global_cond": features.flatten(1)}
    assert policy.model.conditions.keys() == cond.keys()
    torch.testing.assert_close(*(next(iter(c.values())) for c in (policy.model.conditions, cond)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_inpainting_gives_the_observed_features_and_leaves_them_out_of_the_loss(kind):
    policy, data = build(kind, **INPAINT[kind]), batch(steps=T)
    width = policy.obs_feature_dim
    policy.model = Stub()
    torch.manual_seed(3)
    loss = policy.compute_loss(data)
    torch.manual_seed(3)
    features = policy.obs_encoder(normalised(data["obs"])).unflatten(0, (B, T))
    error = (0.5 - torch.randn(B, T, DA + width)) ** 2
    error[:, :TO, DA:] = 0
    torch.testing.assert_close(loss, error.mean())
    torch.testing.assert_close(policy.model.sample[:, :TO, DA:], features[:, :TO], rtol=1e-4, atol=1e-4)
    assert policy.model.conditions == {}
    # In the last call the observed features are given, too.
    policy.eval().predict_action(data["obs"])
    torch.testing.assert_close(policy.model.sample[:, :TO, DA:], policy.encode(data["obs"], TO), rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="observed for 2 steps, but 8 are needed"):
        policy.compute_loss(batch())


@pytest.mark.parametrize("causal", [True, False])
def test_only_the_executed_steps(causal):
    policy = build("transformer", pred_action_steps_only=True, causal_attn=causal).eval()
    out = policy.predict_action(batch()["obs"])
    assert out["action"].shape == out["action_pred"].shape == (B, TA, DA)
    policy.compute_loss(batch()).backward()
    policy.model = Stub()
    torch.manual_seed(3)
    policy.compute_loss(batch())
    assert policy.model.sample.shape == (B, TA, DA)
    with pytest.raises(ConfigError, match="obs_as_cond=True"):
        build("transformer", pred_action_steps_only=True, obs_as_cond=False)


def test_a_crop_that_is_fixed_in_evaluation_makes_predictions_repeatable():
    scheduler = DDIMScheduler(num_train_timesteps=100, beta_schedule="squaredcos_cap_v2", prediction_type="sample")
    for fixed in (True, False):
        policy = build("unet", scheduler=scheduler, eval_fixed_crop=fixed).eval()
        first, second = (policy.encode(batch()["obs"], TO) for _ in range(2))
        assert torch.equal(first, second) == fixed


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_one_batch_by_heart(kind):
    """The action is told by the image alone, never by the noisy action: the error of a policy that sees nothing is the
    variance.
    """
    scheduler = ddpm(
        prediction_type="sample", num_train_timesteps=4, beta_schedule="linear", beta_start=0.99, beta_end=0.999
    )
    options = {"n_emb": 64, "obs_encoder_width": 8} if kind == "transformer" else {"down_dims": (64, 128)}
    policy = build(kind, scheduler=scheduler, num_inference_steps=4, **options)
    image, colours = torch.zeros(4, TO, 3, 40, 40), torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1.0, 1, 0]])
    for i, colour in enumerate(colours):
        image[i, :, :, 10 * i : 10 * i + 10] = colour[:, None, None]
    data = {
        "obs": {"image": image, "pos": torch.zeros(4, TO, 2)},
        "action": torch.tensor([0.0, 170, 340, 510])[:, None, None].expand(4, T, DA),
    }
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4 if kind == "transformer" else 1e-3)
    for _ in range(60):
        loss = policy.compute_loss(data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    prediction = policy.eval().predict_action(data["obs"])["action_pred"]
    assert (prediction - data["action"]).square().mean() < 0.4 * data["action"].var(unbiased=False)


def test_arguments_reach_the_scheduler_and_attributes_are_read_at_call_time():
    scheduler = DDIMScheduler(num_train_timesteps=100, beta_schedule="squaredcos_cap_v2")
    results = []
    for eta in (0.0, 1.0):
        policy = build("unet", scheduler=scheduler, eta=eta).eval()
        torch.manual_seed(0)
        results.append(policy.predict_action(batch()["obs"])["action"])
    assert policy.kwargs == {"eta": 1.0} and not torch.allclose(*results)
    calls = []
    policy.model.register_forward_hook(lambda *_: calls.append(1))
    policy.num_inference_steps, policy.n_action_steps = 5, T - TO + 1
    assert policy.predict_action(batch()["obs"])["action"].shape == (B, T - TO + 1, DA) and len(calls) == 5
    assert build("image", num_inference_steps=None).num_inference_steps == 100


GOOD = batch()["obs"]


@pytest.mark.parametrize(
    "obs, message",
    [
        (GOOD["image"], "dictionary with the keys 'pos', 'image', not a Tensor"),
        ({"image": GOOD["image"]}, "needs the keys 'pos', 'image', but got: image"),
        ({**GOOD, "past_action": GOOD["pos"]}, "past_action_visible=False"),
        ({**GOOD, "image": GOOD["image"].numpy()}, "'image' as a dense tensor of real numbers, but got ndarray"),
        (
            {**GOOD, "image": GOOD["image"].movedim(2, -1)},
            r"'image' of shape \(B, n_obs_steps >= 2, 3, 40, 40\), but got \(3, 2, 40, 40, 3\)",
        ),
        ({**GOOD, "pos": GOOD["pos"][:, :1]}, r"'pos' of shape \(B, n_obs_steps >= 2, pos_dim = 2\)"),
        ({**GOOD, "pos": GOOD["pos"][:2]}, "one batch size, but got {'pos': 2, 'image': 3}"),
        ({**GOOD, "pos": GOOD["pos"] * float("nan")}, "'pos' holds NaN"),
    ],
)
def test_wrong_observations_are_named(obs, message):
    with pytest.raises(ConfigError, match=message):
        build("image").predict_action(obs)


def test_wrong_arguments_are_named():
    with pytest.raises(ConfigError, match="horizon = 8"):
        build("unet", n_action_steps=8)
    with pytest.raises(ConfigError, match="one dimension"):
        build("unet", shape_meta={**META, "action": {"shape": [2, 2]}})
    with pytest.raises(ConfigError, match="v_prediction.*epsilon"):
        build("unet", scheduler=ddpm(prediction_type="v_prediction")).compute_loss(batch())


# ---------------------------------------------------------------------- the configurations
NAMES = (
    "train_diffusion_unet_hybrid_workspace",
    "train_diffusion_transformer_hybrid_workspace",
    "train_diffusion_unet_image_workspace",
)
TEACHERLESS = sorted(set(policies.__all__) - {"ConsistencyPolicy", "OneStepDiffusionPolicy"})
SHORT = (
    "preset=debug",
    "training.steps_per_epoch=1",
    "task.env_runner.n_test=1",
    "task.env_runner.n_test_vis=0",
    "task.env_runner.max_steps=8",
)


@pytest.mark.parametrize("name", NAMES)
def test_builds_at_every_size(name):
    for preset, least in (("paper", 2e7), ("cpu", 1e5), ("debug", 1e4)):
        cfg = load_config(name, f"preset={preset}")
        with torch.device("meta"):
            policy = hydra.utils.instantiate(cfg.policy)
        assert sum(p.numel() for p in policy.parameters()) > least and policy.kwargs == {}
        assert policy.shapes == {"image": (3, 96, 96), "agent_pos": (2,)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_pusht(tmp_path_factory.mktemp("data") / "pusht.zarr")


def run(name, output, data, *overrides):
    return train_here(output, name, *SHORT, f"task.dataset.zarr_path={data}", *overrides)


def saved_policy(summary):
    payload = checkpoint_io.load(summary["checkpoint"])
    return policy_of(payload)


def same_prediction(policy, other):
    obs = {"image": torch.rand(2, 2, 3, 96, 96), "agent_pos": torch.rand(2, 2, 2) * 400}
    results = []
    for each in (policy, other):
        torch.manual_seed(0)
        results.append(each.eval().predict_action(obs)["action"])
    return torch.equal(*results)


@pytest.mark.parametrize("name", [*NAMES, "train_diffusion_unet_ddim_hybrid_workspace"])
def test_trains_checkpoints_and_evaluates(name, tmp_path, data):
    workspace, summary = run(name, tmp_path / "run", data)
    assert summary["steps"] == 2 and summary["evaluations"] == 2
    assert len(workspace.optimizer.param_groups) == (3 if "transformer" in name else 1)
    assert same_prediction(workspace.policy, saved_policy(summary))


def published_config():
    """image_pusht_diffusion_policy_cnn.yaml: flat, resolved, without groups; its crops are 84 pixels wide."""
    reference = golden.read("resolved_configs")
    cfg = copy.deepcopy(reference["workspaces"]["train_diffusion_unet_hybrid_workspace"])
    cfg["task"], shape_meta = reference["tasks"]["pusht_image"], reference["shape_meta"]["pusht_image"]
    cfg["shape_meta"] = cfg["policy"]["shape_meta"] = shape_meta
    cfg["policy"]["crop_shape"] = [84, 84]
    cfg["task_name"], cfg["logging"] = "pusht_image", {"mode": "online", "project": "diffusion_policy_debug"}
    return cfg


def test_the_published_config_runs_as_it_is(tmp_path, data):
    """As upstream's README starts it, less the size of the UNet and of the run."""
    (tmp_path / "image_pusht_diffusion_policy_cnn.yaml").write_text(yaml.safe_dump(published_config()))
    done = command(
        "train.py",
        "--config-dir=.",
        "--config-name=image_pusht_diffusion_policy_cnn.yaml",
        "training.seed=42",
        "training.device=cpu",
        "hydra.run.dir=run",
        "logging.mode=disabled",
        "training.debug=true",
        "training.max_train_steps=1",
        "policy.down_dims=[8,16]",
        "policy.num_inference_steps=2",
        "dataloader.batch_size=4",
        "val_dataloader.batch_size=4",
        f"task.dataset.zarr_path={data}",
        "task.dataset.max_train_episodes=2",
        "task.env_runner.n_train=0",
        "task.env_runner.n_test=1",
        "task.env_runner.n_test_vis=0",
        "task.env_runner.max_steps=8",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    payload = checkpoint_io.load(tmp_path / "run/checkpoints/latest.ckpt")
    assert payload["cfg"]["policy"]["crop_shape"] == [84, 84]
    assert payload["cfg"]["task"]["env_runner"]["legacy_test"] is True


def test_the_pretrained_config_trains_with_a_local_file(tmp_path, data):
    weights = ResNet((2, 2, 2, 2), width=8).state_dict()
    torch.save(weights, tmp_path / "resnet18.pt")
    workspace, summary = run(
        "train_diffusion_unet_image_pretrained_workspace",
        tmp_path / "run",
        data,
        f"policy.obs_encoder.rgb_model={{weights: {tmp_path / 'resnet18.pt'}, width: 8}}",
        "policy.obs_encoder.resize_shape=[40,40]",
        "policy.obs_encoder.crop_shape=[36,36]",
        "policy._target_=idp_workspace.policy.IDPPolicy",
    )
    network = workspace.model.obs_encoder.key_model_map["rgb"].state_dict()
    assert summary["steps"] == 2 and all(torch.equal(value, weights[name]) for name, value in network.items())
    (tmp_path / "resnet18.pt").unlink()  # not needed to act
    assert same_prediction(workspace.policy, saved_policy(summary))


def test_inpainting_trains_from_images_of_the_whole_horizon(tmp_path, data):
    workspace, summary = run(
        "train_diffusion_unet_hybrid_workspace",
        tmp_path / "run",
        data,
        "obs_as_global_cond=false",
        "task.dataset.n_obs_steps=null",
        "training.num_epochs=1",
    )
    assert summary["steps"] == 1 and workspace.policy.inpainting


# ---------------------------------------------------------------------- other objectives in their place
@pytest.mark.parametrize("name, target", [*((name, "IDPPolicy") for name in NAMES), (NAMES[1], "NaiveDriftingPolicy")])
def test_swapping_only_the_target_trains(name, target, tmp_path, data):
    workspace, summary = run(
        name, tmp_path / "run", data, f"policy._target_=idp_workspace.policy.{target}", "training.num_epochs=1"
    )
    assert type(workspace.model).__name__ == target and summary["steps"] == 1
    assert same_prediction(workspace.policy, saved_policy(summary))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("target", TEACHERLESS)
def test_every_objective_takes_a_step_with_only_the_target_swapped(name, target):
    cfg = load_config(
        name,
        "preset=debug",
        f"policy._target_=idp_workspace.policy.{target}",
        "task.image_shape=[3,40,40]",
        f"policy.{'obs_encoder.' if 'unet_image' in name else ''}crop_shape=[36,36]",
    )
    torch.manual_seed(0)
    policy = hydra.utils.instantiate(cfg.policy)
    fitted = normalizer()
    fitted["agent_pos"] = fitted["pos"]
    policy.set_normalizer(fitted)
    obs = batch()["obs"]
    obs = {"image": obs["image"], "agent_pos": obs["pos"]}
    horizon = cfg.horizon
    policy.train().compute_loss({"obs": obs, "action": torch.rand(B, horizon, DA) * 512}).backward()
    for part in (policy.model, policy.obs_encoder):
        assert any(p.grad is not None and p.grad.abs().max() > 0 for p in part.parameters())
    out = policy.eval().predict_action(obs)
    assert out["action"].shape == (B, 8, DA) and out["action_pred"].shape == (B, horizon, DA)


@pytest.mark.parametrize("kind, options", [("unet", {**HYBRID, **UNET}), ("transformer", {**HYBRID, **TRANSFORMER})])
def test_a_swapped_policy_has_upstream_s_networks(kind, options):
    theirs = build(kind)
    torch.manual_seed(0)
    ours = policies.IDPPolicy(**SIZES, **options, noise_scheduler=ddpm(), num_inference_steps=3)
    assert ours.generator.per_frame and ours.generator.conditioning == (
        "obs_as_cond" if kind == "transformer" else "obs_as_global_cond"
    )
    for part in ("model", "obs_encoder"):
        one, other = getattr(theirs, part).state_dict(), getattr(ours, part).state_dict()
        assert list(one) == list(other) and all(torch.equal(one[key], other[key]) for key in one)


def test_building_draws_no_numbers_but_for_the_weights():
    """A look at the sizes passes through the encoder, whose crops are random even in evaluation without
    eval_fixed_crop.
    """
    build("unet", eval_fixed_crop=False)
    expected = torch.rand(1)
    torch.manual_seed(0)
    policies.IDPPolicy(**SIZES, **{**HYBRID, **UNET, "eval_fixed_crop": False})
    assert torch.equal(torch.rand(1), expected)


def test_only_the_executed_steps_of_a_swapped_policy():
    for options in ({**HYBRID, **UNET}, {**HYBRID, **TRANSFORMER}):
        policy = policies.IDPPolicy(**SIZES, **options, pred_action_steps_only=True)
        policy.set_normalizer(normalizer())
        policy.compute_loss(batch()).backward()
        assert policy.eval().predict_action(batch()["obs"])["action_pred"].shape == (B, TA, DA)


@pytest.mark.parametrize(
    "options, message",
    [
        ({**UNET, "n_layer": 2}, "upstream's UNet from shape_meta; this network is given, or another one is built"),
        ({**UNET, "crop_shapes": [8, 8]}, "did you mean 'crop_shape'"),
        ({**UNET, "obs_as_global_cond": False}, "exactly one"),
        ({**TRANSFORMER, "obs_as_cond": False}, "exactly one"),
        ({**TRANSFORMER, "obs_as_global_cond": True}, "does not fit.*obs_as_cond=True"),
        ({**UNET, "crop_shape": [40, 40]}, "must be smaller"),
    ],
)
def test_wrong_arguments_of_a_swapped_policy_are_named(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        policies.IDPPolicy(**{**SIZES, **HYBRID, **options})
