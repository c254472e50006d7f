"""The diffusion policies on low-dimensional observations."""

import json

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler
from torch import nn

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.model.common.normalizer import LinearNormalizer
from diffusion_policy.model.diffusion.conditional_unet1d import ConditionalUnet1D
from diffusion_policy.model.diffusion.transformer_for_diffusion import TransformerForDiffusion
from diffusion_policy.policy.diffusion_transformer_lowdim_policy import DiffusionTransformerLowdimPolicy
from diffusion_policy.policy.diffusion_unet_lowdim_policy import DiffusionUnetLowdimPolicy
from tests import golden

B, T, TO, TA, DO, DA = 4, 8, 2, 4, 5, 3
SIZES = dict(horizon=T, obs_dim=DO, action_dim=DA, n_action_steps=TA, n_obs_steps=TO)
SCHEDULE = dict(
    num_train_timesteps=100, beta_schedule="squaredcos_cap_v2", variance_type="fixed_small", clip_sample=True
)


def ddpm(**kwargs):
    return DDPMScheduler(**{**SCHEDULE, "prediction_type": "epsilon", **kwargs})


def normalizer():
    """Actions in [0, 512], observations in [-3, 1]: far from normalised."""
    result = LinearNormalizer()
    result.fit(
        {
            "obs": torch.linspace(-3, 1, 9)[:, None].expand(9, DO),
            "action": torch.linspace(0, 512, 9)[:, None].expand(9, DA),
        }
    )
    return result


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "obs": torch.rand(B, T, DO, generator=generator) * 4 - 3,
        "action": torch.rand(B, T, DA, generator=generator) * 512,
    }


MODES = {
    "tf_cond": ("tf", dict(obs_as_cond=True)),
    "tf_steps_only": ("tf", dict(obs_as_cond=True, pred_action_steps_only=True)),
    "tf_inpaint": ("tf", dict()),
    "unet_global": ("unet", dict(obs_as_global_cond=True)),
    "unet_oa": ("unet", dict(obs_as_global_cond=True, oa_step_convention=True)),
    "unet_steps_only": ("unet", dict(obs_as_global_cond=True, pred_action_steps_only=True)),
    "unet_local": ("unet", dict(obs_as_local_cond=True)),
    "unet_inpaint": ("unet", dict()),
}


def build(mode, scheduler=None, **kwargs):
    torch.manual_seed(0)
    kind, flags = MODES[mode]
    width = DA + (DO if mode.endswith("inpaint") else 0)
    if kind == "tf":
        model = TransformerForDiffusion(
            width,
            width,
            TA if "steps_only" in mode else T,
            TO,
            cond_dim=DO if flags else 0,
            n_layer=1,
            n_head=2,
            n_emb=16,
            p_drop_emb=0.0,
            p_drop_attn=0.0,
            causal_attn=True,
        )
        policy_class = DiffusionTransformerLowdimPolicy
    else:
        model = ConditionalUnet1D(
            width,
            local_cond_dim=DO if flags.get("obs_as_local_cond") else None,
            global_cond_dim=TO * DO if flags.get("obs_as_global_cond") else None,
            diffusion_step_embed_dim=8,
            down_dims=[8, 16],
            n_groups=4,
        )
        policy_class = DiffusionUnetLowdimPolicy
    policy = policy_class(model, scheduler or ddpm(), **SIZES, num_inference_steps=5, **flags, **kwargs)
    policy.set_normalizer(normalizer())
    return policy


@pytest.mark.parametrize("mode", MODES)
def test_train_and_sample(mode):
    policy = build(mode)
    policy.compute_loss(batch()).backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in policy.model.parameters())
    policy.eval()
    obs = {"obs": batch()["obs"], "obs_mask": torch.ones(B, T, DO, dtype=torch.bool)}
    torch.manual_seed(1)
    first = policy.predict_action(obs)
    torch.manual_seed(1)
    second = policy.predict_action(obs)
    assert torch.equal(first["action"], second["action"])
    assert not torch.equal(first["action"], policy.predict_action(obs)["action"])
    assert first["action"].shape == (B, TA, DA)
    steps_only = "steps_only" in mode
    assert first["action_pred"].shape == (B, TA if steps_only else T, DA)
    start = 0 if steps_only else TO if mode in ("unet_global", "unet_local", "unet_inpaint") else TO - 1
    assert torch.equal(first["action"], first["action_pred"][:, start : start + TA])
    # later observations are not seen
    obs["obs"] = torch.cat([obs["obs"][:, :TO], obs["obs"][:, TO:] + 1], dim=1)
    torch.manual_seed(1)
    assert torch.equal(first["action"], policy.predict_action(obs)["action"])
    if mode.endswith("inpaint"):
        torch.testing.assert_close(first["obs_pred"][:, :TO], batch()["obs"][:, :TO])
        assert torch.equal(first["action_obs_pred"], first["obs_pred"][:, start : start + TA])


class Stub(nn.Module):
    """Returns a constant and keeps what it was called with."""

    def __init__(self, value=0.0):
        super().__init__()
        self.value = value

    def forward(self, sample, timestep, **conditions):
        self.sample, self.timestep, self.conditions = sample, timestep, conditions
        return torch.full_like(sample, self.value)


def stub_policy(prediction_type="epsilon", **flags):
    policy = DiffusionUnetLowdimPolicy(Stub(0.5), ddpm(prediction_type=prediction_type), **SIZES, **flags)
    policy.set_normalizer(normalizer())
    return policy


def test_loss_in_closed_form():
    data = batch()
    action = data["action"] / 256 - 1
    for prediction_type in ("epsilon", "sample"):
        policy = stub_policy(prediction_type, obs_as_global_cond=True)
        torch.manual_seed(3)
        loss = policy.compute_loss(data)
        torch.manual_seed(3)
        noise = torch.randn(B, T, DA)
        steps = torch.randint(0, 100, (B,))
        target = noise if prediction_type == "epsilon" else action
        torch.testing.assert_close(loss, ((0.5 - target) ** 2).mean(), rtol=1e-5, atol=1e-5)
        signal = policy.noise_scheduler.alphas_cumprod[steps][:, None, None]
        noisy = signal.sqrt() * action + (1 - signal).sqrt() * noise
        torch.testing.assert_close(policy.model.sample, noisy, rtol=1e-4, atol=1e-5)
        assert torch.equal(policy.model.timestep, steps)
        torch.testing.assert_close(policy.model.conditions["global_cond"], ((data["obs"] + 1) / 2)[:, :TO].flatten(1))


def test_inpainting_gives_observed_entries_and_leaves_them_out_of_the_loss():
    policy, data = stub_policy(), batch()
    torch.manual_seed(3)
    loss = policy.compute_loss(data)
    torch.manual_seed(3)
    error = (0.5 - torch.randn(B, T, DA + DO)) ** 2
    error[:, :TO, DA:] = 0
    torch.testing.assert_close(loss, error.mean())
    torch.testing.assert_close(policy.model.sample[:, :TO, DA:], ((data["obs"] + 1) / 2)[:, :TO])
    assert policy.model.conditions == {}


def test_local_condition_is_zero_after_the_observed_steps():
    policy, data = stub_policy(obs_as_local_cond=True), batch()
    policy.compute_loss(data)
    local = policy.model.conditions["local_cond"]
    torch.testing.assert_close(local[:, :TO], ((data["obs"] + 1) / 2)[:, :TO])
    assert local.shape == (B, T, DO) and local[:, TO:].abs().max() == 0


def test_perfect_denoiser_recovers_the_action():
    """x_0 prediction of a constant, sampled without noise, ends at that constant."""
    scheduler = DDIMScheduler(num_train_timesteps=100, beta_schedule="squaredcos_cap_v2", prediction_type="sample")
    policy = DiffusionUnetLowdimPolicy(Stub(0.5), scheduler, **SIZES, num_inference_steps=8, obs_as_global_cond=True)
    policy.set_normalizer(normalizer())
    action = policy.predict_action({"obs": torch.zeros(B, TO, DO)})["action"]
    torch.testing.assert_close(action, torch.full((B, TA, DA), 384.0))


def test_inference_attributes_are_read_at_call_time():
    policy = build("unet_oa").eval()
    calls = []
    policy.model.register_forward_hook(lambda *args: calls.append(1))
    policy.num_inference_steps = 3
    policy.n_action_steps = T - TO + 1
    assert policy.predict_action({"obs": torch.zeros(1, TO, DO)})["action"].shape == (1, T - TO + 1, DA)
    assert len(calls) == 3
    assert stub_policy(obs_as_global_cond=True).num_inference_steps == 100


def test_unknown_arguments_reach_the_scheduler():
    scheduler = DDIMScheduler(num_train_timesteps=100, beta_schedule="squaredcos_cap_v2")
    obs = {"obs": torch.zeros(1, TO, DO)}
    results = []
    for eta in (0.0, 1.0):
        policy = build("unet_oa", scheduler, eta=eta).eval()
        assert policy.kwargs == {"eta": eta}
        torch.manual_seed(0)
        results.append(policy.predict_action(obs)["action"])
    assert not torch.allclose(*results)


def test_input_errors():
    policy = build("tf_cond")
    with pytest.raises(ValueError, match="'obs'.*got: state"):
        policy.predict_action({"state": torch.zeros(1, TO, DO)})
    with pytest.raises(ValueError, match=rf"obs_dim = {DO}.*\(1, 2, 7\)"):
        policy.predict_action({"obs": torch.zeros(1, TO, 7)})
    with pytest.raises(ValueError, match=rf"n_obs_steps >= {TO}.*\(1, 1, 5\)"):
        policy.predict_action({"obs": torch.zeros(1, 1, DO)})
    with pytest.raises(ValueError, match="past_action"):
        policy.predict_action({"obs": torch.zeros(1, TO, DO), "past_action": torch.zeros(1, TO, DA)})
    policy.normalizer = LinearNormalizer()
    with pytest.raises(ConfigError, match="'obs'.*set_normalizer"):
        policy.predict_action({"obs": torch.zeros(1, TO, DO)})


def test_config_errors():
    with pytest.raises(ConfigError, match="exclude each other"):
        stub_policy(obs_as_local_cond=True, obs_as_global_cond=True)
    with pytest.raises(ConfigError, match="obs_as_global_cond=True"):
        stub_policy(pred_action_steps_only=True)
    with pytest.raises(ConfigError, match="obs_as_cond=True"):
        DiffusionTransformerLowdimPolicy(Stub(), ddpm(), **SIZES, pred_action_steps_only=True)
    with pytest.raises(ConfigError, match="horizon = 8"):
        DiffusionTransformerLowdimPolicy(Stub(), ddpm(), **{**SIZES, "n_action_steps": 8}, obs_as_cond=True)
    with pytest.raises(ConfigError, match="v_prediction.*epsilon"):
        stub_policy("v_prediction", obs_as_global_cond=True).compute_loss(batch())


def test_layouts_and_optimizer_groups_match():
    models = {"TransformerForDiffusion": TransformerForDiffusion, "ConditionalUnet1D": ConditionalUnet1D}
    for name, layout in golden.read("state_dict_layouts_lowdim").items():
        config = json.loads(json.dumps(layout["resolved_policy_cfg"]))
        model_config, is_transformer = config.pop("model"), "transformer" in config.pop("_target_")
        config.pop("noise_scheduler")
        with torch.device("meta"):
            model = models[model_config.pop("_target_").rsplit(".", 1)[1]](**model_config)
            policy_class = DiffusionTransformerLowdimPolicy if is_transformer else DiffusionUnetLowdimPolicy
            policy = policy_class(model=model, noise_scheduler=ddpm(), **config)
        expected = layout["policy_state_dict_before_set_normalizer"]
        assert {k: list(v.shape) for k, v in policy.state_dict().items()} == expected, name
        assert list(policy.state_dict()) == list(expected), name
        assert policy.kwargs == {}

        names = {parameter: key for key, parameter in policy.named_parameters()}
        groups = layout["optimizer"]["groups"]
        if is_transformer:
            optimizer = policy.get_optimizer(groups[0]["weight_decay"], groups[0]["lr"], groups[0]["betas"])
        else:
            optimizer = torch.optim.AdamW(policy.parameters())
        assert [[names[p] for p in group["params"]] for group in optimizer.param_groups] == [
            g["params"] for g in groups
        ], name
        if is_transformer:
            for ours, theirs in zip(optimizer.param_groups, groups):
                assert all(ours[key] == theirs[key] for key in ("weight_decay", "lr", "eps"))
                assert list(ours["betas"]) == theirs["betas"]


def test_schedulers_match():
    """The installed diffusers takes upstream's steps."""
    expected = golden.read("noise_scheduler")
    scheduler = ddpm()
    torch.testing.assert_close(scheduler.alphas_cumprod, expected["alphas_cumprod"])
    torch.testing.assert_close(
        scheduler.add_noise(expected["x0"], expected["noise"], expected["t"]), expected["add_noise"]
    )
    scheduler.set_timesteps(20)
    assert torch.equal(scheduler.timesteps, expected["ddpm_timesteps_20"])
    ddim = DDIMScheduler(
        num_train_timesteps=100, beta_schedule="squaredcos_cap_v2", clip_sample=True, set_alpha_to_one=True
    )
    for n in (8, 16):
        ddim.set_timesteps(n)
        assert torch.equal(ddim.timesteps, expected[f"ddim_timesteps_{n}"])
    ddim.set_timesteps(8)
    for step in ddim.timesteps.tolist():
        result = ddim.step(expected["noise"], step, expected["x0"]).prev_sample
        torch.testing.assert_close(result, expected[f"ddim8_step_t{step}"]["prev_sample"])
    for prediction_type in ("epsilon", "sample"):
        scheduler = ddpm(prediction_type=prediction_type)
        scheduler.set_timesteps(100)
        for step in (99, 50, 1, 0):
            generator = torch.Generator().manual_seed(expected["ddpm_step_generator_seed"])
            result = scheduler.step(expected["noise"], step, expected["x0"], generator=generator).prev_sample
            reference = expected[f"ddpm_step_{prediction_type}_t{step}"]["prev_sample"]
            torch.testing.assert_close(result, reference, rtol=0, atol=2e-5)
