"""Objectives of the MIP family, flows and diffusion: closed forms, calls, gradients, and a target that all find."""

import copy

import hydra
import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from torch import nn

from diffusion_policy.model.diffusion.mip_networks import ResidualMLP, StateEncoder
from diffusion_policy.model.diffusion.transformer_for_diffusion import TransformerForDiffusion
from diffusion_policy.policy.diffusion_transformer_lowdim_policy import DiffusionTransformerLowdimPolicy
from idp_workspace import paths
from idp_workspace.policy import (
    ConsistencyFlowPolicy,
    DDPMPolicy,
    FlowMatchingPolicy,
    IDPMultimodalPolicy,
    IDPPolicy,
    MIPPolicy,
    RegressionPolicy,
    StraightFlowPolicy,
    TSDPolicy,
)
from idp_workspace.target import TargetNetwork
from tests.unit.test_idp_policy import DO, NETWORKS, SIZES, TO, D, H, batch, make, stub_policy
from tests.util import load_config, unit_normalizer

MIP_FAMILY = (RegressionPolicy, MIPPolicy, FlowMatchingPolicy, TSDPolicy, StraightFlowPolicy)
ALL = (*MIP_FAMILY, ConsistencyFlowPolicy, DDPMPolicy)


def scheduler(prediction_type="epsilon", kind=DDPMScheduler, steps=100):
    return kind(
        num_train_timesteps=steps, beta_schedule="squaredcos_cap_v2", clip_sample=True, prediction_type=prediction_type
    )


def options(policy_class, **more):
    return {"noise_scheduler": scheduler(), "num_inference_steps": 5, **more} if policy_class is DDPMPolicy else more


def act(policy, b=4):
    return policy.predict_action({"obs": batch(b)["obs"]})["action_pred"]


# ---------------------------------------------------------------------- shared parts
def test_the_path_from_noise_to_data():
    noise, action = torch.randn(3, H, D), torch.randn(3, H, D)
    x, velocity = paths.interpolate(noise, action, torch.tensor([0.0, 1.0, 0.25]))
    assert torch.equal(x[0], noise[0]) and torch.equal(x[1], action[1]) and torch.equal(velocity, action - noise)
    assert torch.allclose(x[2], 0.75 * noise[2] + 0.25 * action[2])


def test_times():
    torch.manual_seed(0)
    t = paths.uniform_times(100_000, 0.2, 0.6, like=torch.zeros(1, dtype=torch.float64))
    assert (
        t.dtype == torch.float64
        and 0.2 <= t.min() < 0.201
        and 0.599 < t.max() <= 0.6
        and t.mean().item() == pytest.approx(0.4, abs=2e-3)
    )
    # Quantiles of a logit-normal are the sigmoid of the normal's: mean - std, mean, mean + std.
    t = paths.logit_normal_times(100_000, -0.4, 1.0, like=torch.zeros(1))
    quantiles = t.quantile(torch.tensor([0.158655, 0.5, 0.841345]))
    assert torch.allclose(quantiles, torch.sigmoid(torch.tensor([-1.4, -0.4, 0.6])), atol=5e-3)


def test_errors_and_weights():
    residual = torch.randn(2, 3, 4, requires_grad=True)
    assert torch.allclose(paths.squared_error(residual), torch.einsum("bhd,bhd->bh", residual, residual))
    delta2 = torch.tensor([0.0, 0.999], requires_grad=True)
    weight = paths.adaptive_weight(delta2, p=0.5, c=1e-3)
    assert torch.allclose(weight, torch.tensor([1e-3**-0.5, 1.0])) and not weight.requires_grad


@pytest.mark.parametrize(
    "steps, of_t, of_x, of_end", [(1, 0, 1, 1), (3, 1 / 3, 1.37037, 2 / 3), (9, 4 / 9, 1.58117, 5 / 9)]
)
def test_steps_along_a_flow(steps, of_t, of_x, of_end):
    """Velocity t, velocity x + 1 = (1 + 1/n)^n - 1, and an average velocity equal to the end of the interval; all from
    zero.
    """
    zero = torch.zeros(2, H, D, dtype=torch.float64)
    assert paths.euler(lambda x, t: 0 * x + t, zero, steps).unique().item() == pytest.approx(of_t, abs=1e-12)
    assert paths.euler(lambda x, t: x + 1, zero, steps).mean().item() == pytest.approx(of_x, abs=1e-5)
    assert paths.flow_steps(lambda x, s, t: 0 * x + t, zero, steps).mean().item() == pytest.approx(of_end)
    policy = stub_policy(lambda x, t: t, FlowMatchingPolicy, nfe=steps)
    assert act(policy).mean().item() == pytest.approx(of_t, abs=1e-6)
    policy = stub_policy(lambda x, t: x + 1, FlowMatchingPolicy)
    policy.nfe = steps
    assert act(policy).mean().item() == pytest.approx(of_x, abs=1e-5)


@pytest.mark.parametrize("network", NETWORKS)
def test_derivative_of_a_generator_in_training(network):
    """Same dropout in value, derivative and a plain call with the same seed; gradients of both reach the parameters."""
    policy = make(IDPPolicy, network).train()
    for module in policy.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    cond, f = policy.generator.encode(batch(4)["obs"]), policy.generator
    x, dx, s, t = torch.randn(4, H, D), torch.randn(4, H, D), torch.rand(4), torch.rand(4)
    results = []
    for scale in (1.0, 2.0):
        torch.manual_seed(5)
        results.append(paths.generator_jvp(f, cond, (x, s, t), (scale * dx, scale * torch.ones(4), torch.zeros(4))))
    (u, du), (again, twice) = results
    torch.manual_seed(5)
    assert torch.allclose(u, f(cond, x, t, s=s), atol=1e-6) and torch.equal(u, again)
    assert torch.allclose(2 * du, twice, rtol=1e-4, atol=1e-5 * du.abs().max().item())
    (u.square().mean() + du.square().mean()).backward()
    assert all(p.grad.isfinite().all() for p in policy.model.parameters() if p.grad is not None)
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in policy.model.parameters())


@pytest.mark.parametrize("network", ["transformer", "mlp"])
def test_target_network_is_a_moving_average(network):
    policy = make(RegressionPolicy, network).double()
    policy.target = TargetNetwork(policy)
    start = [p.clone() for p in policy.target_model.parameters()]
    with torch.no_grad():
        for p in policy.parameters():
            if p.requires_grad:
                p.add_(1.0)
    for _ in range(3):
        policy.target.update(0.9)
    for slow, fast, first in zip(policy.target_model.parameters(), policy.model.parameters(), start):
        assert torch.allclose(slow, fast + (first - fast) * 0.9**3, atol=1e-5) and not slow.requires_grad
    assert (policy.target_obs_encoder is None) == (policy.obs_encoder is None)
    # Saved with the policy, and a copy of the policy has its own.
    assert any(key.startswith("target_model.") for key in policy.state_dict())
    twin = copy.deepcopy(policy)
    assert (
        twin.target.generator.model is twin.target_model and twin.target.online.model is twin.model is not policy.model
    )
    twin.target.update(0.0)
    assert all(torch.equal(p, q) for p, q in zip(twin.target_model.parameters(), twin.model.parameters()))
    with torch.no_grad():
        obs, x = batch(2)["obs"].double(), torch.zeros(2, H, D).double()
        slow, fast = (f(f.encode(obs), x, 0.5) for f in (twin.target.generator, twin.generator))
    assert torch.allclose(slow, fast, rtol=1e-9)


# ---------------------------------------------------------------------- closed forms of MIP's family
CLOSED = {  # expert 0.5, H = 16, D = 10, scale 0.1, t* = 0.9: losses of a network that returns 0, its input, 0.5
    RegressionPolicy: (0.25, 0.25, 0.0),
    MIPPolicy: (0.25 / 0.81 + 25, 0.25 / 0.81 + 1, 0.0),
    FlowMatchingPolicy: (0.25 + 1, 7 / 3 + 0.25 / 3, 1.0),
    TSDPolicy: (0.26 / 0.81 + 25, 1.26 / 0.81 + 1, 0.01 / 0.81),
    StraightFlowPolicy: (0.25, 1.25, 0.0),
}
FORMULAS = (lambda x, t: 0 * x, lambda x, t: x, lambda x, t: 0 * x + 0.5)


@pytest.mark.parametrize("policy_class", MIP_FAMILY)
@pytest.mark.parametrize("which", range(3))
def test_closed_form_losses(policy_class, which):
    torch.manual_seed(0)
    loss = stub_policy(FORMULAS[which], policy_class).compute_loss(batch(b=8192, value=0.5)).item()
    assert loss == pytest.approx(CLOSED[policy_class][which], rel=4e-3, abs=1e-6)


@pytest.mark.parametrize(
    "policy_class, formula, expected",
    [
        (MIPPolicy, lambda x, t: x + 1, 2.0),
        (MIPPolicy, lambda x, t: x + t, 0.9),
        (TSDPolicy, lambda x, t: x + 1, 2.0),
        (TSDPolicy, lambda x, t: x + t, 0.9),
        (RegressionPolicy, lambda x, t: x + 1 + t, 1.0),
        (StraightFlowPolicy, lambda x, t: x + 1 + t, 1.0),
    ],
)
def test_closed_form_samples(policy_class, formula, expected):
    assert act(stub_policy(formula, policy_class)).unique().item() == pytest.approx(expected)


def test_flow_starts_from_zero_or_from_noise():
    still = stub_policy(lambda x, t: 0 * x, FlowMatchingPolicy)
    assert act(still).abs().max() == 0
    torch.manual_seed(0)
    drawn = act(stub_policy(lambda x, t: 0 * x, FlowMatchingPolicy, start="gaussian"), 4096)
    assert abs(drawn.mean()) < 5e-3 and abs(drawn.std() - 1) < 5e-3


@pytest.mark.parametrize("network", ["transformer", "chi_unet", "mlp"])
def test_mip_s_loss_is_idp_s_without_geometry(network):
    mip, idp = make(MIPPolicy, network), make(IDPPolicy, network, geometry=False)
    losses = []
    for policy in (mip, idp):
        torch.manual_seed(3)
        losses.append(policy.compute_loss(batch()))
        losses[-1].backward()
    assert torch.equal(*losses)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(mip.parameters(), idp.parameters()) if p.grad is not None)
    # One call of MIP is what IDP executes.
    mip.nfe = 1
    assert torch.equal(act(mip), act(idp))


# ---------------------------------------------------------------------- FlowPolicy
@pytest.mark.parametrize("alpha", [0.0, 100.0])  # the first term alone; the second in front
def test_closed_form_losses_of_consistency_flow(alpha):
    """With expert a, z ~ N(0, 1) and d = r - t: x_t - x_r = -d (a - z), so

    f = c:  F_t - F_r = d (z - a + c),              second term 0
    f = t:  F_t - F_r = d (z - a - e + t + r),      second term alpha d^2 where e - t > 1.01 delta
    f = x:  F_t - F_r = z [(1-t)(1+e-t) - (1-r)(1+e-r)] + a [t (1+e-t) - r (1+e-r)],    second term alpha d^2 (a - z)^2
    """
    a, delta = 0.5, 0.01
    t = torch.linspace(0.01, 1, 2_000_001, dtype=torch.float64)
    r = (t + delta).clamp(max=1)
    d, e = r - t, torch.where(t <= 0.5, 0.5, 1.0).double()
    second = alpha * d**2 * (e - t > 1.01 * delta)
    of_z, of_a = (1 - t) * (1 + e - t) - (1 - r) * (1 + e - r), t * (1 + e - t) - r * (1 + e - r)
    expected = {
        "0": (d**2 * (1 + a**2)).mean(),
        "c": (d**2 * 1).mean(),
        "t": (d**2 * (1 + (t + r - a - e) ** 2) + second).mean(),
        "x": (of_z**2 + (a * of_a) ** 2 + second * (1 + a**2)).mean(),
    }
    formulas = {"0": lambda x, t: 0 * x, "c": lambda x, t: 0 * x + 0.5, "t": lambda x, t: t, "x": lambda x, t: x}
    torch.manual_seed(0)
    data = batch(b=8192, value=a)
    for name, formula in formulas.items():
        loss = stub_policy(formula, ConsistencyFlowPolicy, alpha=alpha).compute_loss(data).item()
        assert loss == pytest.approx(expected[name].item(), rel=1e-2), name
    # The loss's zero: the velocity of the path that ends at the expert, (a - x) / (1 - t).
    exact = stub_policy(lambda x, t: (a - x) / (1 - t).clamp(min=1e-6), ConsistencyFlowPolicy, alpha=0.0)
    assert exact.compute_loss(data).item() < 1e-8


def test_consistency_flow_samples():
    """f = t from z: one step at eps; three at eps + (1 - eps) k / 3, of length 1/3."""
    for nfe, moved in ((1, 0.01), (3, 0.34)):
        policy = stub_policy(lambda x, t: t, ConsistencyFlowPolicy, nfe=nfe)
        torch.manual_seed(7)
        out = act(policy)
        torch.manual_seed(7)
        assert torch.allclose(out, torch.randn(4, H, D) + moved, atol=1e-6)
    seen = stub_policy(lambda x, t: 0 * x + t - x, ConsistencyFlowPolicy, time_scale=99.0)  # z cancels, time is left
    assert act(seen).mean().item() == pytest.approx(0.99, rel=1e-5)
    assert stub_policy(FORMULAS[0], ConsistencyFlowPolicy).segment_end(
        torch.tensor([0.0, 0.2, 0.5, 0.51, 1.0])
    ).tolist() == [0.5, 0.5, 0.5, 1, 1]


# ---------------------------------------------------------------------- diffusion
def test_closed_form_losses_of_diffusion():
    """With abar_k of the scheduler: f = 0 leaves 1 or a^2; f = x leaves E_k of what follows."""
    torch.manual_seed(0)
    a, data = 0.5, batch(b=8192, value=0.5)
    abar = scheduler().alphas_cumprod.double()
    expected = {
        ("epsilon", "0"): 1.0,
        ("sample", "0"): a**2,
        ("epsilon", "x"): (abar * a**2 + ((1 - abar).sqrt() - 1) ** 2).mean().item(),
        ("sample", "x"): ((abar.sqrt() - 1) ** 2 * a**2 + 1 - abar).mean().item(),
    }
    for (kind, name), value in expected.items():
        formula = FORMULAS[0] if name == "0" else FORMULAS[1]
        policy = stub_policy(formula, DDPMPolicy, noise_scheduler=scheduler(kind))
        assert policy.compute_loss(data).item() == pytest.approx(value, rel=2e-2), (kind, name)


@pytest.mark.parametrize("kind", [DDPMScheduler, DDIMScheduler])
@pytest.mark.parametrize("nfe", [1, 10, 100])
def test_the_exact_denoiser_of_one_expert_is_led_to_it(kind, nfe):
    """Expert 0.5 everywhere: eps = (x - sqrt(abar_k) 0.5) / sqrt(1 - abar_k), where the network receives integer k."""
    abar = scheduler().alphas_cumprod
    exact = lambda x, k: (x - abar[k.long()].sqrt() * 0.5) / (1 - abar[k.long()]).sqrt()
    policy = stub_policy(exact, DDPMPolicy, noise_scheduler=scheduler())
    assert policy.compute_loss(batch(b=64, value=0.5)).item() < 1e-6
    policy.noise_scheduler = scheduler(kind=kind)
    policy.nfe = nfe
    assert torch.allclose(act(policy), torch.tensor(0.5), atol=1e-3)
    policy = stub_policy(FORMULAS[2], DDPMPolicy, noise_scheduler=scheduler("sample", kind), num_inference_steps=nfe)
    assert torch.allclose(act(policy), torch.tensor(0.5), atol=1e-5)


def test_it_is_diffusion_policy_to_the_last_bit():
    def model():
        torch.manual_seed(0)
        return TransformerForDiffusion(
            D, D, H, TO, DO, n_layer=1, n_head=2, n_emb=16, p_drop_emb=0.0, p_drop_attn=0.0, causal_attn=True
        )

    ours, theirs = (
        kind(model=model(), noise_scheduler=scheduler(), obs_as_cond=True, num_inference_steps=7, **SIZES)
        for kind in (DDPMPolicy, DiffusionTransformerLowdimPolicy)
    )
    results = []
    for policy in (ours, theirs):
        policy.set_normalizer(unit_normalizer(DO, D))
        torch.manual_seed(1)
        results.append((policy.compute_loss(batch()), act(policy)))
    assert all(torch.equal(a, b) for a, b in zip(*results))


# ---------------------------------------------------------------------- calls, arguments, gradients
@pytest.mark.parametrize(
    "policy_class, nfe, calls",
    [
        (RegressionPolicy, None, 1),
        (StraightFlowPolicy, None, 1),
        (MIPPolicy, None, 2),
        (MIPPolicy, 1, 1),
        (TSDPolicy, None, 2),
        (FlowMatchingPolicy, None, 9),
        (FlowMatchingPolicy, 1, 1),
        (ConsistencyFlowPolicy, None, 1),
        (ConsistencyFlowPolicy, 4, 4),
        (DDPMPolicy, 100, 100),
        (DDPMPolicy, 10, 10),
    ],
)
def test_network_calls(policy_class, nfe, calls):
    policy = make(policy_class, **options(policy_class))
    assert policy.nfe == calls or nfe
    if nfe:
        policy.nfe = nfe
    seen = []
    policy.model.register_forward_hook(lambda *_: seen.append("model"))
    policy.obs_encoder.register_forward_hook(lambda *_: seen.append("encoder"))
    assert act(policy).shape == (4, H, D)
    assert seen == ["encoder"] + ["model"] * calls


@pytest.mark.parametrize(
    "policy_class, wrong",
    [
        (MIPPolicy, (0, 3)),
        (TSDPolicy, (3,)),
        (FlowMatchingPolicy, (0,)),
        (ConsistencyFlowPolicy, (0,)),
        (DDPMPolicy, (0, 101)),
    ],
)
def test_calls_that_cannot_be_made(policy_class, wrong):
    for nfe in wrong:
        policy = make(policy_class, **options(policy_class))
        with pytest.raises(ValueError, match=str(nfe)):
            policy.nfe = nfe
            act(policy)
        with pytest.raises(ValueError, match=str(nfe)):
            make(
                policy_class,
                **(options(policy_class, num_inference_steps=nfe) if policy_class is DDPMPolicy else {"nfe": nfe}),
            )


def test_wrong_arguments():
    with pytest.raises(ValueError, match="IDPPolicy"):
        make(MIPPolicy, geometry=True)
    with pytest.raises(ValueError, match="zero, gaussian"):
        make(FlowMatchingPolicy, start="noise")
    with pytest.raises(ValueError, match="eps"):
        make(ConsistencyFlowPolicy, eps=1.0)
    with pytest.raises(TypeError, match="noise_scheduler"):
        make(DDPMPolicy)
    with pytest.raises(ValueError, match="v_prediction"):
        make(DDPMPolicy, noise_scheduler=scheduler("v_prediction"))
    with pytest.raises(TypeError, match="loss_scale"):
        make(RegressionPolicy, loss_scal=1.0)
    for policy_class in set(ALL) - {DDPMPolicy}:  # what upstream's configurations carry is accepted
        make(policy_class, noise_scheduler=scheduler(), num_inference_steps=100)


@pytest.mark.parametrize("policy_class", ALL)
@pytest.mark.parametrize("network", NETWORKS)
def test_a_step_of_training(policy_class, network):
    policy = make(policy_class, network, **options(policy_class)).train()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    before = [p.detach().clone() for p in policy.model.parameters()]
    loss = policy.compute_loss(batch(8))
    loss.backward()
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    assert loss.isfinite() and all(g.isfinite().all() for g in gradients) and sum(g.abs().sum() for g in gradients) > 0
    if policy.obs_encoder is not None:
        assert all(p.grad is not None for p in policy.obs_encoder.parameters())
    optimizer.step()
    assert any(not torch.equal(p, q) for p, q in zip(policy.model.parameters(), before))
    assert act(policy.eval()).isfinite().all()


@pytest.mark.parametrize(
    "objective, policy_class",
    [
        ("mip", MIPPolicy),
        ("regression", RegressionPolicy),
        ("straight_flow", StraightFlowPolicy),
        ("tsd", TSDPolicy),
        ("flow", FlowMatchingPolicy),
        ("flow_policy", ConsistencyFlowPolicy),
        ("diffusion", DDPMPolicy),
        ("idp_m0", IDPPolicy),
        ("idp_multimodal", IDPMultimodalPolicy),
    ],
)
def test_one_word_of_a_configuration_chooses_the_objective(objective, policy_class):
    """One word changes the objective on a shared generator; the options written are the defaults."""
    by_word = load_config("train_regression_transformer_lowdim", f"objective={objective}", "preset=debug").policy
    assert by_word == load_config(f"train_{objective}_transformer_lowdim", "preset=debug").policy
    policy = hydra.utils.instantiate(by_word)
    assert type(policy) is policy_class
    if policy_class is DDPMPolicy:
        assert policy.noise_scheduler.config.num_train_timesteps == 100 and policy.nfe == 2
    else:
        assert policy.options == policy_class.Options(**({"geometry": False} if objective == "idp_m0" else {}))


# ---------------------------------------------------------------------- a known target
def ring(n):
    """o ~ U(-1, 1) and its expert, a point of a circle: a = 0.8 (cos 3o, sin 3o)."""
    o = torch.rand(n, 1, 1) * 2 - 1
    return {"obs": o, "action": 0.8 * torch.cat([(3 * o).cos(), (3 * o).sin()], dim=-1)}


@pytest.mark.parametrize(
    "policy_class, limit, arguments",
    [
        (RegressionPolicy, 0.04, {}),
        (StraightFlowPolicy, 0.05, {}),
        (MIPPolicy, 0.03, {}),
        (TSDPolicy, 0.03, {}),
        (FlowMatchingPolicy, 0.04, {}),
        (FlowMatchingPolicy, 0.06, {"start": "gaussian"}),
        (ConsistencyFlowPolicy, 0.15, {"time_scale": 0.05}),  # as train_flow_policy_mlp_lowdim has it
        (DDPMPolicy, 0.06, {"noise_scheduler": scheduler("sample"), "time_scale": 0.01, "num_inference_steps": 20}),
        (DDPMPolicy, 0.30, {"noise_scheduler": scheduler("epsilon"), "time_scale": 0.01, "num_inference_steps": 20}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_finds_a_known_target(policy_class, limit, arguments):
    """Root mean square distance to the expert after 300 steps; the circle's points are 0.8 from its centre."""
    torch.manual_seed(0)
    model, encoder = ResidualMLP(2, 2, 1, 1, n_layer=1, n_emb=64, p_drop=0.0, time_embed_dim=32), StateEncoder(1, 1, 64)
    policy = policy_class(
        model=model,
        obs_encoder=encoder,
        obs_as_cond=True,
        horizon=1,
        obs_dim=1,
        action_dim=2,
        n_obs_steps=1,
        n_action_steps=1,
        **arguments,
    )
    policy.set_normalizer(unit_normalizer(1, 2))
    steps = 300
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        policy.compute_loss(ring(256)).backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
        optimizer.step()
        schedule.step()
    data = ring(500)
    error = (
        (policy.eval().predict_action({"obs": data["obs"]})["action_pred"] - data["action"])
        .square()
        .sum(-1)
        .mean()
        .sqrt()
        .item()
    )
    print(f"{policy_class.__name__}: {error:.4f}")
    assert error < limit
