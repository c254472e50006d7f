"""The same weights and the same batch give the same loss and the same actions as this project's policy."""

from __future__ import annotations

import pytest
import torch
from conftest import SIZES
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature
from lerobot.policies import make_pre_post_processors
from lerobot_policy_idp import IDPConfig, IDPPolicy, make_idp_pre_post_processors

from diffusion_policy.policy.loading import load_policy
from diffusion_policy.scripts.convert_checkpoint import convert

B, A = 12, 3
VECTORS = {"observation.state": 5, "observation.environment_state": 4}
CAMERA = "observation.images.front"


def features(images: bool) -> dict[str, PolicyFeature]:
    kinds = {"observation.state": FeatureType.STATE, "observation.environment_state": FeatureType.ENV}
    out = {key: PolicyFeature(kinds[key], (width,)) for key, width in VECTORS.items()}
    return out | ({CAMERA: PolicyFeature(FeatureType.VISUAL, (3, 20, 24))} if images else {})


def config(images: bool = False, **settings) -> IDPConfig:
    return IDPConfig(
        device="cpu",
        input_features=features(images),
        output_features={"action": PolicyFeature(FeatureType.ACTION, (A,))},
        **{**SIZES, "vision_width": 16, **settings},
    )


def batch(cfg: IDPConfig) -> dict[str, torch.Tensor]:
    """A batch in the units of a dataset, as LeRobot's loader gives it."""
    g = torch.Generator().manual_seed(1)
    out = {key: 100 * torch.rand(B, cfg.n_obs_steps, width, generator=g) for key, width in VECTORS.items()}
    if CAMERA in cfg.input_features:
        out[CAMERA] = torch.rand(B, cfg.n_obs_steps, 3, 20, 24, generator=g)
    out["action"] = 50 * torch.rand(B, cfg.horizon, A, generator=g) - 20
    out["action_is_pad"] = torch.arange(cfg.horizon) >= torch.randint(3, 30, (B, 1), generator=g)
    assert out["action_is_pad"].any()
    return out


def stats(cfg: IDPConfig) -> dict[str, dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(2)
    out = {}
    for key, width in {**VECTORS, "action": A}.items():
        low = -10 * torch.rand(width, generator=g)
        out[key] = {"min": low, "max": low + 100, "mean": low + 50, "std": 10 + low.abs()}
        out[key] |= {"q01": low + 1, "q99": low + 99, "q10": low + 10, "q90": low + 90}
    return out


def saved(cfg: IDPConfig, folder) -> tuple[IDPPolicy, object, object]:
    torch.manual_seed(0)
    policy = IDPPolicy(cfg)
    for parameter in policy.parameters():  # also those that start at zero
        parameter.data += 0.02 * torch.randn_like(parameter)
    before, after = make_idp_pre_post_processors(cfg, stats(cfg))
    policy.save_pretrained(folder)
    before.save_pretrained(folder)
    after.save_pretrained(folder)
    return policy, before, after


def ours_loss(policy, raw, cfg) -> torch.Tensor:
    keys = {"observation.state": "state", "observation.environment_state": "environment_state", CAMERA: "front"}
    obs = {keys[key]: raw[key] for key in cfg.input_features}
    obs = obs if "front" in obs else torch.cat([raw[key] for key in VECTORS], dim=-1)
    cond = policy.generator.encode(policy.normalise_observation(obs))
    return policy.loss(cond, policy.normalizer["action"].normalize(raw["action"]), ~raw["action_is_pad"])


def ours_actions(policy, raw, cfg) -> torch.Tensor:
    if CAMERA in cfg.input_features:
        keys = {"observation.state": "state", "observation.environment_state": "environment_state", CAMERA: "front"}
        obs = {keys[key]: raw[key] for key in cfg.input_features}
    else:
        obs = {"obs": torch.cat([raw[key] for key in VECTORS], dim=-1)}
    return policy.predict_action(obs)["action_pred"][:, cfg.n_obs_steps - 1 :]


def observed(raw):
    return {key: value for key, value in raw.items() if key.startswith("observation")}


CASES = [
    *({"backbone": backbone} for backbone in ("transformer", "unet", "mlp")),
    *({"backbone": backbone, "images": True} for backbone in ("transformer", "unet", "mlp")),
    {"images": True, "resize_shape": (16, 18), "crop_shape": (12, 14)},
    {"energy_power": 1.0, "lambda_prox": None, "probe_fraction": 1.0, "nfe": 2},
    {"geometry": False, "backbone": "mlp"},
    {"switches": {"tau": 0.5, "reference": "ema", "rel_floor": 0.1}, "backbone": "mlp"},
    {"n_obs_steps": 1, "n_action_steps": 16},
]


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_loss_and_actions_equal_ours(settings, tmp_path):
    cfg = config(**settings)
    policy, before, after = saved(cfg, tmp_path / "lerobot")
    ours = load_policy(tmp_path / "lerobot", device="cpu")
    raw = batch(cfg)
    normalised = before(dict(raw))
    policy.eval(), ours.eval()
    for mode in (policy, ours):
        mode.train(not cfg.crop_shape)  # random crops draw numbers in another order
    torch.manual_seed(5)
    loss, logged = policy(normalised)
    torch.manual_seed(5)
    expected = ours_loss(ours, raw, cfg)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert all(isinstance(value, float) for value in logged.values()) and "loss_proposal" in logged
    policy.eval(), ours.eval()
    chunk = policy.predict_action_chunk(before(observed(raw)))
    expected = ours_actions(ours, raw, cfg)
    torch.testing.assert_close(after(chunk), expected, rtol=1e-5, atol=1e-4)  # actions of size 50


@pytest.mark.parametrize("mode", list(NormalizationMode), ids=lambda mode: mode.value)
def test_every_normalisation_is_known(mode, tmp_path):
    if mode.value not in ("MIN_MAX", "MEAN_STD", "IDENTITY", "QUANTILES", "QUANTILE10"):
        pytest.skip("LeRobot's processors do not have it")
    cfg = config(backbone="mlp", normalization_mapping={"STATE": mode, "ENV": mode, "ACTION": mode})
    policy, before, after = saved(cfg, tmp_path / "lerobot")
    raw = batch(cfg)
    policy.eval()
    actions = after(policy.predict_action_chunk(before(observed(raw))))
    ours = load_policy(tmp_path / "lerobot", device="cpu")
    torch.testing.assert_close(ours_actions(ours, raw, cfg), actions, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("name", ["ours.ckpt", "ours"])
def test_there_and_back(images, name, tmp_path):
    """LeRobot's checkpoint becomes ours, and ours LeRobot's again: the actions stay."""
    cfg = config(images, backbone="mlp", switches={"tau": 0.5})
    policy, before, after = saved(cfg, tmp_path / "lerobot")
    convert(tmp_path / "lerobot", tmp_path / name)
    convert(tmp_path / name, tmp_path / "back", to_lerobot=True)
    again = IDPPolicy.from_pretrained(tmp_path / "back")
    assert again.config.switches == {"tau": 0.5} and not again.training
    before_again, after_again = make_pre_post_processors(again.config, pretrained_path=str(tmp_path / "back"))
    raw, obs = batch(cfg), observed(batch(cfg))
    expected = after(policy.eval().predict_action_chunk(before(dict(obs))))
    actual = after_again(again.predict_action_chunk(before_again(dict(obs))))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)
    ours = load_policy(tmp_path / name, device="cpu")
    torch.testing.assert_close(ours_actions(ours, raw, cfg), expected, rtol=1e-5, atol=1e-4)
    normalised, normalised_again = before(dict(raw)), before_again(dict(raw))
    torch.testing.assert_close(normalised_again["action"], normalised["action"], rtol=1e-5, atol=1e-5)


def test_a_constant_number_keeps_its_scale(tmp_path):
    """A joint that never moved in the data, and moves by a hair on the robot."""
    cfg, known = config(backbone="mlp"), stats(config())
    known["observation.state"]["max"][0] = known["observation.state"]["min"][0]
    before, _ = make_idp_pre_post_processors(cfg, known)
    raw = batch(cfg)["observation.state"] * 0 + known["observation.state"]["min"]
    assert torch.equal(before({"observation.state": raw})["observation.state"][..., 0], torch.full((B, 2), -1.0))
    raw[..., 0] += 0.01
    assert before({"observation.state": raw})["observation.state"][..., 0].max() < -0.97
