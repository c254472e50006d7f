"""MeanFlow, OFP, consistency models and One-Step Diffusion: closed forms on networks given by a formula, teachers,
chained runs.
"""

import copy
import json
import shutil

import hydra
import pytest
import torch
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from torch import nn

from diffusion_policy.model.diffusion.mip_networks import ChiTransformer, ChiUnet, ResidualMLP, StateEncoder
from diffusion_policy.scripts import eval as eval_script
from diffusion_policy.storage import checkpoint_io
from idp_workspace import edm
from idp_workspace.policy import (
    ConsistencyPolicy,
    ConsistencyTrainingPolicy,
    DDPMPolicy,
    EDMTeacherPolicy,
    IDPPolicy,
    MeanFlowPolicy,
    OFPPolicy,
    OneStepDiffusionPolicy,
    distilled,
)
from idp_workspace.policy.mean_flow import block_features, blocks, dispersion
from idp_workspace.policy.ofp import moved_up
from idp_workspace.teacher import TeacherError
from tests import util
from tests.util import load_config, train_here, unit_normalizer, write_pusht

H, D, DO, TO, TA = 16, 3, 5, 2, 8
SIZES = dict(horizon=H, obs_dim=DO, action_dim=D, n_obs_steps=TO, n_action_steps=TA)


def scheduler(**changes):
    return DDPMScheduler(
        **{
            **dict(
                num_train_timesteps=100, beta_schedule="squaredcos_cap_v2", clip_sample=True, prediction_type="epsilon"
            ),
            **changes,
        }
    )


class Stub(nn.Module):
    """A network given by a formula in (x, s, t, condition); s = t unless there are two times."""

    def __init__(self, formula):
        super().__init__()
        self.formula = formula
        self.calls = 0
        self.cond_obs_emb = nn.Identity()

    def forward(self, sample, timestep, cond=None, start_time=None):
        self.calls += 1
        start = timestep if start_time is None else start_time
        return self.formula(sample, start[:, None, None], timestep[:, None, None], cond)


def stub_policy(policy_class, formula, teacher=None, monkeypatch=None, **options):
    policy = policy_class(**SIZES, model=Stub(formula), obs_as_cond=True, **options)
    if teacher is not None:
        monkeypatch.setattr(distilled, "load_teacher", lambda *_: teacher.requires_grad_(False))
    policy.set_normalizer(unit_normalizer(DO, D))
    policy.on_train_start()
    policy.model.calls = 0
    return policy


def data(b=8, value=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    action = torch.rand(b, H, D, generator=g) * 2 - 1 if value is None else torch.full((b, H, D), value)
    return {"obs": torch.rand(b, H, DO, generator=g) * 2 - 1, "action": action}


def network(kind):
    encoder = StateEncoder(DO, TO, 16)
    if kind == "transformer":
        return dict(
            model=ChiTransformer(D, D, H, TO, n_layer=2, n_head=2, n_emb=16, p_drop_attn=0.1),
            obs_encoder=encoder,
            obs_as_cond=True,
        )
    if kind == "unet":
        return dict(model=ChiUnet(D, 2 * 16, 16, 16, (8, 16)), obs_encoder=encoder, obs_as_global_cond=True)
    return dict(model=ResidualMLP(D, D, H, TO, n_layer=2, n_emb=16, p_drop=0.1), obs_encoder=encoder, obs_as_cond=True)


def make(policy_class, kind, monkeypatch=None, seed=0, **options):
    """A policy on a small network; a student gets an untrained teacher with the same sizes."""
    torch.manual_seed(seed)
    options = {
        **({"noise_scheduler": scheduler()} if policy_class in (DDPMPolicy, OneStepDiffusionPolicy) else {}),
        **options,
    }
    policy = policy_class(**SIZES, **network(kind), **options)
    if hasattr(policy_class, "teacher_kind"):
        teacher = make(policy_class.teacher_kind, kind, seed=seed + 1).eval().requires_grad_(False)
        monkeypatch.setattr(distilled, "load_teacher", lambda *_: teacher)
    policy.set_normalizer(unit_normalizer(DO, D))
    policy.on_train_start()
    return policy


# ---------------------------------------------------------------------- EDM
def test_boundary_of_the_preconditioning():
    c_skip, c_out, c_in = edm.coefficients(torch.tensor([0.02, 0.52]))
    assert c_skip[0] == 1 and c_out[0] == 0 and c_in[0].item() == pytest.approx((0.02**2 + 0.25) ** -0.5)
    assert c_skip[1].item() == pytest.approx(0.5) and c_out[1].item() == pytest.approx(0.25 / (0.52**2 + 0.25) ** 0.5)
    x = torch.randn(2, H, D)
    assert torch.equal(edm.precondition(lambda v: v + 7, x, torch.tensor([0.02, 0.02])), x)


def test_noise_levels():
    levels = edm.edges()
    assert len(levels) == 81 and levels[0] == 80 and levels[-1] == torch.tensor(0.02) and (levels.diff() < 0).all()
    assert levels[40].item() == pytest.approx(((80 ** (1 / 7) + 0.02 ** (1 / 7)) / 2) ** 7, rel=1e-5)
    torch.manual_seed(0)
    logs = edm.log_normal(20000, torch.zeros(())).log()
    assert logs.mean().item() == pytest.approx(-1.2, abs=0.03) and logs.std().item() == pytest.approx(1.2, abs=0.03)
    assert logs.min() >= torch.tensor(0.02).log() - 1e-6


def test_losses_of_edm():
    e = torch.tensor([[[0.3, 0.0]]])
    delta = 0.00054 * 2**0.5
    assert edm.pseudo_huber(e)[0, 0].tolist() == pytest.approx([(0.09 + delta**2) ** 0.5 - delta, 0], abs=1e-7)
    assert edm.pseudo_huber(e, "squared")[0, 0, 0].item() == pytest.approx((0.3**4 + delta**2) ** 0.5 - delta, rel=1e-5)
    assert edm.loss_weight(torch.tensor(2.0)).item() == pytest.approx((4 + 0.25) / 1.0)


def test_heun_on_the_ode_of_gaussian_data():
    """Data N(0, sd^2): D = x sd^2 / (sd^2 + sigma^2), and x follows sqrt(sigma^2 + sd^2). The error falls with the
    square of the step.
    """
    sd, x = 0.5, torch.ones(1, 1, 1, dtype=torch.float64)
    ideal = lambda x, sigma: x * (sd**2 / (sd**2 + sigma**2)).reshape(-1, 1, 1)
    exact = ((0.1**2 + sd**2) / (2.0**2 + sd**2)) ** 0.5
    errors = [
        abs(edm.heun(ideal, x, edm.edges(n, 0.1, 2.0).double(), sigma_min=0.0).item() - exact) for n in (10, 20, 40)
    ]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.25) and errors[1] / errors[2] == pytest.approx(4, rel=0.15)
    # A denoiser with one answer has straight paths: exact in one step.
    out = edm.heun_step(
        lambda x, sigma: torch.full_like(x, 0.3), 4 * x, torch.tensor([2.0]).double(), torch.tensor([0.5]).double()
    )
    assert out.item() == pytest.approx(0.3 + 0.25 * 3.7)


def perfect_denoiser(a, scale=250.0, low=0.02, sd=0.5):
    """The network F with which g is the constant a: (a - c_skip x) / c_out, from the scaled input."""

    def formula(scaled, s, t, cond):
        sigma = (s.double() / scale).exp()
        c_skip, c_out, c_in = edm.coefficients(sigma, low, sd)
        return ((a - c_skip * scaled.double() / c_in) / c_out.clamp(min=1e-12)).float()

    return formula


def test_a_perfect_denoiser_has_no_loss_and_acts_perfectly():
    policy = stub_policy(EDMTeacherPolicy, perfect_denoiser(0.5))
    torch.manual_seed(0)
    assert policy.compute_loss(data(64, value=0.5)).item() < 1e-3
    for nfe in (1, 7, 159):
        policy.nfe, policy.model.calls = nfe, 0
        # Straight paths from 80 eps end at a + 0.02 eps.
        assert (policy.predict_action(data())["action_pred"] - 0.5).abs().max() < 0.1
        assert policy.model.calls == nfe
    with pytest.raises(ValueError, match="odd"):
        policy.nfe = 2


def test_the_loss_of_the_denoiser_from_its_definition():
    policy = stub_policy(EDMTeacherPolicy, lambda x, s, t, c: 0.1 * x + 0.01 * s)
    batch = data()
    torch.manual_seed(5)
    ours = policy.compute_loss(batch).item()
    torch.manual_seed(5)
    sigma = (-1.2 + 1.2 * torch.randn(8)).exp()[:, None, None]
    x = batch["action"] + sigma * torch.randn_like(batch["action"])
    c_skip, c_out = 0.25 / ((sigma - 0.02) ** 2 + 0.25), (sigma - 0.02) * 0.5 / (sigma**2 + 0.25).sqrt()
    error = c_skip * x + c_out * (0.1 * x / (sigma**2 + 0.25).sqrt() + 2.5 * sigma.log()) - batch["action"]
    delta = 0.00054 * (H * D) ** 0.5
    assert ours == pytest.approx(
        ((sigma**2 + 0.25) / (0.5 * sigma) ** 2 * ((error**2 + delta**2).sqrt() - delta)).mean().item(), rel=1e-4
    )


# ---------------------------------------------------------------------- consistency
def test_a_jump_to_where_it_starts_is_the_identity():
    policy = make(ConsistencyTrainingPolicy, "mlp")
    x, sigma = torch.randn(4, H, D), torch.tensor([0.02, 0.3, 5.0, 80.0])
    cond = policy.generator.encode(torch.randn(4, TO, DO))
    assert torch.allclose(policy.jump(cond, x, sigma, sigma), x)


def test_a_jump_in_closed_form():
    policy = stub_policy(ConsistencyTrainingPolicy, lambda x, s, t, c: 0 * x + s - t)
    x, sigma, stop = torch.ones(1, H, D), torch.tensor([1.0]), torch.tensor([0.25])
    c_skip, c_out = 0.25 / (0.98**2 + 0.25), 0.98 * 0.5 / 1.25**0.5
    g = c_skip + c_out * 250 * torch.tensor(4.0).log().item()
    assert policy.jump(None, x, sigma, stop).unique().item() == pytest.approx(0.25 + 0.75 * g, rel=1e-5)


def test_edges_of_the_trajectory_term():
    policy = stub_policy(ConsistencyTrainingPolicy, lambda x, s, t, c: 0 * x, bins=4)
    t, u, s = policy.draw_edges(4000, torch.device("cpu"))
    levels = policy.sigmas
    index = {value: i for i, value in enumerate(levels.tolist())}
    drawn = [(index[a], index[b], index[c]) for a, b, c in zip(t.tolist(), u.tolist(), s.tolist())]
    assert all(b == a + 1 and b <= c <= 4 for a, b, c in drawn) and {a for a, _, _ in drawn} == {0, 1, 2, 3}
    assert {c for a, _, c in drawn if a == 0} == {1, 2, 3, 4}


@pytest.mark.parametrize("nfe", [1, 3])
def test_a_perfect_consistency_model(nfe):
    """With g = a every jump leads from a + t eps to a + s eps: no trajectory loss, and acting needs `nfe` calls."""
    policy = stub_policy(ConsistencyTrainingPolicy, perfect_denoiser(0.5), nfe=nfe)
    cond = torch.zeros(64, TO, DO)
    assert policy.trajectory_term(cond, cond, data(64, value=0.5)["action"]).item() < 1e-3
    policy.model.calls = 0
    assert (policy.predict_action(data())["action_pred"] - 0.5).abs().max() < 0.1
    assert policy.model.calls == nfe


def test_a_student_follows_its_teacher(monkeypatch):
    """Data at 0.5, but a teacher who says 0.2: one Heun step leads toward 0.2, and the trajectory loss sees it."""
    teacher = stub_policy(EDMTeacherPolicy, perfect_denoiser(0.2))
    student = stub_policy(ConsistencyPolicy, perfect_denoiser(0.5), teacher, monkeypatch)
    x, noise = torch.full((1, H, D), 1.0), torch.full((1, H, D), 0.5)
    sigma, to = torch.tensor([1.0]), torch.tensor([0.5])
    out = student.lower_neighbour(x, sigma, to, x, noise, torch.zeros(1, TO, DO))
    assert torch.allclose(out, torch.tensor(0.2 + 0.5 * 0.8), atol=1e-4)
    assert student.distill(torch.zeros(8, TO, DO), torch.zeros(8, TO, DO), torch.full((8, H, D), 0.5)) > 0.1


def test_the_map_to_the_end_passes_gradient_but_takes_none():
    """Against the definition, with a copy of the network in the place of G-."""
    policy = make(ConsistencyTrainingPolicy, "mlp").eval()
    batch = data()
    cond, a = policy.generator.encode(batch["obs"]).detach(), batch["action"]
    torch.manual_seed(1)
    grads = torch.autograd.grad(policy.trajectory_term(cond, cond, a), list(policy.model.parameters()))
    fixed = copy.deepcopy(policy)
    torch.manual_seed(1)
    t, u, s = policy.draw_edges(len(a), a.device)
    noise = torch.randn_like(a)
    low = torch.full_like(s, 0.02)
    end = fixed.jump(cond, policy.jump(cond, a + t[:, None, None] * noise, t, s), s, low)
    target = fixed.jump(cond, fixed.jump(cond, a + u[:, None, None] * noise, u, s), s, low).detach()
    expected = torch.autograd.grad(edm.pseudo_huber(end - target).mean(), list(policy.model.parameters()))
    assert all(torch.allclose(g, e, atol=1e-5) for g, e in zip(grads, expected)) and all(
        p.requires_grad for p in policy.model.parameters()
    )


# ---------------------------------------------------------------------- MeanFlow
def straight(a):
    """Average velocity of straight paths to one point: (a - x) / (1 - s), whatever the end."""
    return lambda x, s, t, cond: (a - x) / (1 - s)


def test_mean_flow_of_one_point():
    policy = stub_policy(MeanFlowPolicy, straight(0.5), dispersive=0.0)
    assert policy.compute_loss(data(64, value=0.5)).item() < 1e-4
    policy.model.calls = 0
    assert torch.allclose(policy.predict_action(data())["action_pred"], torch.tensor(0.5), atol=1e-5)
    assert policy.model.calls == 1


def test_mean_flow_on_empty_intervals_is_flow_matching():
    policy = stub_policy(
        MeanFlowPolicy,
        lambda x, s, t, c: 0.3 * x + s + 2 * t,
        flow_ratio=1.0,
        guidance=1.0,
        adaptive_p=0.0,
        dispersive=0.0,
    )
    batch = data()
    torch.manual_seed(2)
    ours = policy.compute_loss(batch).item()
    torch.manual_seed(2)
    s = torch.minimum(*(1 - torch.sigmoid(-0.4 + torch.randn(8)) for _ in range(2)))[:, None, None]
    noise = torch.randn_like(batch["action"])
    error = 0.3 * ((1 - s) * noise + s * batch["action"]) + 3 * s - (batch["action"] - noise)
    assert ours == pytest.approx(error.square().mean().item(), rel=1e-5)


@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_target_of_mean_flow_on_a_linear_network(scale):
    """u = 0.3 x + 0.7 s + 0.2 t: du/ds along v is 0.3 v + 0.7, in the times that the network is told."""
    policy = stub_policy(MeanFlowPolicy, lambda x, s, t, c: 0.3 * x + 0.7 * s + 0.2 * t, guidance=1.0, time_scale=scale)
    x, v = torch.randn(4, H, D), torch.randn(4, H, D)
    s, t = torch.tensor([0.1, 0.2, 0.5, 0.5]), torch.tensor([0.9, 0.3, 0.5, 1.0])
    gap = (t - s)[:, None, None]
    assert torch.allclose(
        policy.target(torch.zeros(4, TO, DO), x, v, s, t), v + gap * (0.3 * v + 0.7 * scale), atol=1e-5
    )


def test_guidance_of_mean_flow():
    policy = stub_policy(MeanFlowPolicy, lambda x, s, t, c: 0 * x + s, guidance=2.0)
    x, v, s = torch.zeros(1, H, D), torch.ones(1, H, D), torch.tensor([0.25])
    assert policy.target(torch.zeros(1, TO, DO), x, v, s, s).unique().item() == pytest.approx(2 - 0.25)


def test_intervals_and_weights_of_mean_flow():
    policy = stub_policy(MeanFlowPolicy, lambda x, s, t, c: 0 * x, flow_ratio=0.25, guidance=1.0, dispersive=0.0)
    torch.manual_seed(0)
    s, t = policy.draw_interval(torch.zeros(8000, H, D))
    assert (s <= t).all() and (s == t).float().mean().item() == pytest.approx(0.25)
    assert torch.logit(1 - torch.cat([s[2000:], t[2000:]])).mean().item() == pytest.approx(-0.4, abs=0.05)
    # u = 0 on one action and no noise to speak of: L = d2 (d2 + c)^-1/2.
    torch.manual_seed(3)
    loss = policy.compute_loss(data(8))
    torch.manual_seed(3)
    policy.draw_interval(torch.zeros(8, H, D))
    d2 = (data(8)["action"] - torch.randn(8, H, D)).square().mean(dim=(1, 2))
    assert loss.item() == pytest.approx((d2 * (d2 + 1e-3) ** -0.5).mean().item(), rel=1e-5)


@pytest.mark.parametrize("kind, count", [("transformer", 1), ("unet", 1), ("mlp", 1)])
def test_features_of_every_backbone(kind, count):
    policy = make(MeanFlowPolicy, kind)
    assert len(blocks(policy.model)) == 2
    with block_features(policy.model) as features:
        policy.generator(policy.generator.encode(data()["obs"]), data()["action"], 0.5, s=0.1)
    assert len(features) == count and len(features[0]) == 8
    assert not any(block._forward_hooks for block in blocks(policy.model))


def test_dispersion():
    assert dispersion(torch.ones(5, 7)).item() == pytest.approx(0, abs=1e-6)
    assert dispersion(torch.tensor([[0.0, 0.0], [3.0, 4.0]])).item() == pytest.approx(
        torch.tensor((1 + 0.36788) / 2).log().item(), abs=1e-4
    )
    with pytest.raises(ValueError, match="dispersive=0"):
        stub_policy(MeanFlowPolicy, straight(0.5)).compute_loss(data())


# MIP's variant of MeanFlow
def mf_policy(formula, **options):
    return stub_policy(MeanFlowPolicy, formula, variant="mf", **options)


@pytest.mark.parametrize("progress, delta", [(0.0, 0.0), (0.2, 0.0), (0.45, 0.5), (0.7, 1.0), (1.0, 1.0)])
@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_loss_of_mip_s_mean_flow_on_a_linear_network(progress, delta, scale):
    """u = 0.3 x + 0.7 s + 0.2 t: X = x + (t - s) u, dX/ds = -u + 0.7 (t - s), dX/dx v = v + 0.3 (t - s) v."""
    policy = mf_policy(lambda x, s, t, c: 0.3 * x + 0.7 * s + 0.2 * t, time_scale=scale)
    policy.set_progress(progress)
    assert policy.longest_interval() == pytest.approx(delta)
    batch = data()
    torch.manual_seed(5)
    ours = policy.compute_loss(batch).item()
    torch.manual_seed(5)
    a, z = batch["action"], torch.randn(8, H, D)
    r, first, second = (torch.rand(8)[:, None, None] for _ in range(3))
    t = torch.maximum(first, second)
    s = torch.maximum(torch.minimum(first, second), t - delta)
    flow = 0.3 * ((1 - r) * z + r * a) + 0.9 * scale * r - (a - z)
    u = 0.3 * ((1 - s) * z + s * a) + scale * (0.7 * s + 0.2 * t)
    residual = -u + (t - s) * 0.7 * scale + (a - z) * (1 + 0.3 * (t - s))
    assert ours == pytest.approx(0.1 * (flow.square().sum(-1) + residual.square().sum(-1)).mean().item(), rel=1e-4)


def test_gradient_of_mip_s_mean_flow_stops_at_the_derivative_in_x():
    """u = k x: the residual's gradient in k is that of dX/ds alone."""
    k = torch.nn.Parameter(torch.tensor(0.3))
    policy = mf_policy(lambda x, s, t, c: k * x)
    policy.set_progress(1.0)
    batch = data()
    torch.manual_seed(5)
    (grad,) = torch.autograd.grad(policy.compute_loss(batch), [k])
    torch.manual_seed(5)
    a, z = batch["action"], torch.randn(8, H, D)
    r, first, second = (torch.rand(8)[:, None, None] for _ in range(3))
    s, t = torch.minimum(first, second), torch.maximum(first, second)
    flow = k * ((1 - r) * z + r * a) - (a - z)
    residual = -k * ((1 - s) * z + s * a) + ((a - z) * (1 + k * (t - s))).detach()
    expected = 0.1 * (flow.square().sum(-1) + residual.square().sum(-1)).mean()
    assert torch.allclose(grad, torch.autograd.grad(expected, [k])[0], rtol=1e-4)


def test_sampler_of_mip_s_mean_flow():
    """MIP's numbers for f = t (the end of each step), from zero."""
    policy = mf_policy(lambda x, s, t, c: 0 * x + t)
    for steps, value in {1: 1, 3: 2 / 3, 9: 5 / 9}.items():
        policy.nfe, policy.model.calls = steps, 0
        assert policy.predict_action(data())["action_pred"].unique().tolist() == pytest.approx([value])
        assert policy.model.calls == steps
    with pytest.raises(ValueError, match="at least one step"):
        policy.nfe = 0
    with pytest.raises(ValueError, match="mp1 acts with one network call"):
        stub_policy(MeanFlowPolicy, straight(0.5), nfe=3)


@pytest.mark.parametrize("kind", ["transformer", "unet", "mlp"])
def test_mip_s_mean_flow_trains_with_every_backbone(kind):
    policy = make(MeanFlowPolicy, kind, variant="mf")
    policy.set_progress(0.6)
    policy.compute_loss(data()).backward()
    grads = [p.grad for p in policy.parameters() if p.grad is not None]
    assert all(g.isfinite().all() for g in grads) and sum(g.norm() for g in grads) > 0


# ---------------------------------------------------------------------- OFP
def test_ofp_of_one_point():
    policy = stub_policy(OFPPolicy, straight(0.5)).train()
    for policy.progress in (0.0, 0.5, 1.0):
        assert policy.compute_loss(data(64, value=0.5)).item() < 1e-4
    policy.model.calls = 0
    assert torch.allclose(policy.predict_action(data())["action_pred"], torch.tensor(0.5), atol=1e-5)
    assert policy.model.calls == 1


def test_consistency_of_ofp():
    """u = 0.7 and its average 0.2. At the end of training (rho = 0) the target is the average's own jump; at any time
    it is
    ((m - s)(a - eps) + 0.2 (t - m)) / (t - s)."""
    policy = stub_policy(OFPPolicy, lambda x, s, t, c: 0 * x + 0.7)
    policy.target.generator.model.formula = lambda x, s, t, c: 0 * x + 0.2
    batch, cond, noise = data()["action"], torch.zeros(8, TO, DO), torch.randn(8, H, D)
    policy.progress = 1.0
    assert policy.consistency_term(cond, cond, batch, noise).item() == pytest.approx(0.25, rel=1e-4)
    policy.progress = 0.4
    torch.manual_seed(4)
    ours = policy.consistency_term(cond, cond, batch, noise).item()
    torch.manual_seed(4)
    s = torch.rand(8) * 0.95
    t = s + 0.05 + (0.95 - s) * torch.rand(8)
    t = torch.where(torch.rand(8) < 0.5, torch.ones(8), t)
    m = s + 0.6 * (t - s) * torch.rand(8)
    s, t, m = (v[:, None, None] for v in (s, t, m))
    expected = (0.7 - ((m - s) * (batch - noise) + 0.2 * (t - m)) / (t - s)).square().mean().item()
    assert ours == pytest.approx(expected, rel=1e-3)


def test_guidance_of_ofp():
    """An average that returns the mean of the condition: g is that mean, the term its square, the gradient -2 g."""
    policy = stub_policy(OFPPolicy, lambda x, s, t, c: x)
    policy.target.generator.model.formula = lambda x, s, t, c: 0 * x + c.mean(dim=(1, 2), keepdim=True)
    y = torch.zeros(1, H, D, requires_grad=True)
    policy.velocity = lambda generator, *rest: (
        y if generator is policy.generator else type(policy).velocity(policy, generator, *rest)
    )
    cond = torch.full((1, TO, DO), 0.3)
    term = policy.guidance_term(cond, cond, torch.zeros(1, H, D), torch.zeros(1, H, D))
    assert term.item() == pytest.approx(0.09, rel=1e-5)
    assert torch.allclose(torch.autograd.grad(term, y)[0] * y.numel(), torch.tensor(-0.6))


def test_condition_dropout_of_ofp():
    seen = []
    policy = stub_policy(
        OFPPolicy,
        lambda x, s, t, c: (seen.append(c), 0 * x)[1],
        p_drop=0.25,
        lambda_consistency=0.0,
        lambda_guidance=0.0,
    )
    seen.clear()
    torch.manual_seed(0)
    policy.terms(torch.ones(4000, TO, DO), torch.ones(4000, TO, DO), torch.zeros(4000, H, D))
    assert (seen[0] == 0).flatten(1).all(1).float().mean().item() == pytest.approx(0.25, abs=0.03)


def test_average_of_ofp_follows_in_training_only():
    policy = make(OFPPolicy, "mlp")
    with torch.no_grad():
        next(policy.model.parameters()).add_(1.0)
    gap = lambda: (next(policy.model.parameters()) - next(policy.target_model.parameters())).mean().item()
    policy.eval().compute_loss(data())
    assert gap() == pytest.approx(1) and policy.updates == 0
    policy.train().compute_loss(data())
    assert gap() == pytest.approx(0.1, abs=1e-5) and policy.updates == 1  # the first rate is 1/10
    assert not any(p.requires_grad for p in policy.target_model.parameters())


def test_warm_start_of_ofp():
    policy = stub_policy(OFPPolicy, lambda x, s, t, c: 0 * x, warm_start=0.15)
    torch.manual_seed(0)
    first = policy.predict_action(data())["action_pred"]
    second = policy.predict_action(data())["action_pred"]
    torch.manual_seed(0)
    noise = [torch.randn(8, H, D) for _ in range(2)]
    shifted = torch.cat([first[:, TA:], first[:, -1:].expand(8, TA, D)], dim=1)
    assert torch.equal(moved_up(first, TA), shifted)
    assert torch.allclose(first, noise[0]) and torch.allclose(second, 0.85 * noise[1] + 0.15 * shifted, atol=1e-6)
    policy.reset()
    torch.manual_seed(0)
    assert torch.equal(policy.predict_action(data())["action_pred"], first)
    assert policy.predict_action({"obs": data(3)["obs"]})["action"].shape[0] == 3  # another batch has no previous chunk


# ---------------------------------------------------------------------- One-Step Diffusion
@pytest.mark.parametrize("mode", ["stochastic", "deterministic"])
def test_gradient_of_one_step_diffusion(mode, monkeypatch):
    """d loss / d A_k = sigma_k (eps_phi - eps_psi) / numel; psi is the true noise in the deterministic mode."""
    teacher = stub_policy(DDPMPolicy, lambda x, s, t, c: 0.3 * x + 0.01 * t, noise_scheduler=scheduler())
    policy = stub_policy(
        OneStepDiffusionPolicy, lambda x, s, t, c: 0.8 * x, teacher, monkeypatch, mode=mode, noise_scheduler=scheduler()
    )
    action = torch.randn(8, H, D, requires_grad=True)
    policy.generate = lambda cond, z: action
    policy.start = lambda batch: None
    torch.manual_seed(6)
    loss = policy.distill(None, torch.zeros(8, TO, DO), torch.zeros(8, H, D))
    torch.manual_seed(6)
    k = torch.randint(2, 96, (8,))
    noise = torch.randn(8, H, D)
    abar = scheduler().alphas_cumprod[k][:, None, None]
    alpha, sigma = abar.sqrt(), (1 - abar).sqrt()
    noisy = (alpha * action + sigma * noise).detach()
    psi = 0.8 * noisy if mode == "stochastic" else noise
    direction = sigma * (0.3 * noisy + 0.01 * k[:, None, None] - psi)
    gradient = torch.autograd.grad(loss, action)[0]
    assert torch.allclose(gradient * action.numel(), alpha * direction, atol=1e-5)
    score = (0.8 * noisy - noise).square().mean().item() if mode == "stochastic" else 0.0
    assert loss.item() == pytest.approx((direction * noisy).mean().item() + score, abs=1e-4)
    assert hasattr(policy, "score_model") == (mode == "stochastic")


def test_the_expert_is_the_fixed_point_of_one_step_diffusion(monkeypatch):
    """Data a: eps_phi = (x - alpha a) / sigma, and the deterministic direction is alpha (A - a)."""
    abar = scheduler().alphas_cumprod

    def formula(x, s, t, c):
        b = abar[t.long()]
        return (x - b.sqrt() * 0.5) / (1 - b).sqrt()

    teacher = stub_policy(DDPMPolicy, formula, noise_scheduler=scheduler())
    policy = stub_policy(
        OneStepDiffusionPolicy, formula, teacher, monkeypatch, mode="deterministic", noise_scheduler=scheduler()
    )
    policy.compute_loss(data())
    assert policy.metrics()["score_gap"] < 1e-8
    policy.model.calls = 0
    assert torch.allclose(
        policy.predict_action(data())["action_pred"], torch.tensor(0.5), atol=1e-5
    )  # the warm start recovers it
    assert policy.model.calls == 1


def test_each_term_of_one_step_diffusion_trains_its_own_network(monkeypatch):
    policy = make(OneStepDiffusionPolicy, "mlp", monkeypatch)
    policy.options.__dict__["score_weight"] = 0.0
    policy.compute_loss(data()).backward()
    assert all(p.grad is None or not p.grad.any() for p in policy.score_model.parameters())
    assert any(p.grad is not None and p.grad.any() for p in policy.model.parameters())
    policy.zero_grad()
    policy.options.__dict__["score_weight"] = 1.0
    policy.teacher.generator.model.forward = lambda sample, timestep, cond=None, start_time=None: policy.score_model(
        sample, timestep, cond=cond
    )
    policy.eval().compute_loss(data()).backward()
    assert all(
        not p.grad.any() for p in policy.model.parameters() if p.grad is not None
    )  # equal scores: nothing to correct
    assert any(p.grad is not None and p.grad.any() for p in policy.score_model.parameters())


# ---------------------------------------------------------------------- all of them
ALL = (
    MeanFlowPolicy,
    OFPPolicy,
    EDMTeacherPolicy,
    ConsistencyTrainingPolicy,
    ConsistencyPolicy,
    OneStepDiffusionPolicy,
)


@pytest.mark.parametrize("kind", ["transformer", "unet", "mlp"])
@pytest.mark.parametrize("policy_class", ALL)
def test_a_step_on_every_backbone(policy_class, kind, monkeypatch):
    policy = make(policy_class, kind, monkeypatch)
    for p in getattr(policy, "score_model", nn.Module()).parameters():
        nn.init.normal_(p, std=0.1)  # equal to the teacher's, as at the start, it would give the generator no gradient
    loss = policy.compute_loss(data())
    loss.backward()
    grads = [p.grad for p in policy.model.parameters() if p.grad is not None]
    assert (
        torch.isfinite(loss) and grads and all(torch.isfinite(g).all() for g in grads) and any(g.any() for g in grads)
    )
    torch.optim.AdamW(policy.parameters(), lr=1e-4).step()
    seen = []
    policy.model.register_forward_hook(lambda *_: seen.append(1))
    policy.nfe = 5 if policy_class is EDMTeacherPolicy else 1
    assert policy.eval().predict_action({"obs": data()["obs"]})["action"].shape == (8, TA, D)
    assert len(seen) == policy.nfe
    with torch.no_grad():
        assert torch.isfinite(policy.compute_loss(data()))


@pytest.mark.parametrize("policy_class", [ConsistencyPolicy, OneStepDiffusionPolicy])
def test_a_teacher_is_no_part_of_its_student(policy_class, monkeypatch):
    policy = make(policy_class, "mlp", monkeypatch)
    assert not any("teacher" in name for name, _ in [*policy.named_parameters(), *policy.named_modules()] if name)
    assert not any("teacher" in name for name in policy.state_dict())
    teacher = policy.teacher
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(policy.model.parameters(), teacher.model.parameters()))
    policy.compute_loss(data()).backward()
    assert all(p.grad is None for p in teacher.parameters())
    if policy_class is ConsistencyPolicy:
        assert not any(p.requires_grad for p in policy.obs_encoder.parameters())
    else:
        assert all(
            torch.equal(mine, theirs)
            for mine, theirs in zip(policy.score_model.parameters(), teacher.model.parameters())
        )


@pytest.mark.parametrize(
    "policy_class, arguments, message",
    [
        (MeanFlowPolicy, {"flow_ratio": 2.0}, "flow_ratio"),
        (MeanFlowPolicy, {"variant": "mp2"}, "variant"),
        (MeanFlowPolicy, {"variant": "mf", "interval_until": 0.1}, "interval_until"),
        (OFPPolicy, {"p_drop": 1.0}, "p_drop"),
        (OFPPolicy, {"min_interval": 0.0}, "min_interval"),
        (EDMTeacherPolicy, {"nfe": 4}, "odd"),
        (EDMTeacherPolicy, {"sigma_min": 90.0}, "sigma_min"),
        (ConsistencyTrainingPolicy, {"huber": "l1"}, "standard, squared"),
        (ConsistencyTrainingPolicy, {"start": "zero"}, "sigma_max, unit"),
        (ConsistencyPolicy, {"nfe": 81}, "nfe=81"),
        (OneStepDiffusionPolicy, {"mode": "random"}, "stochastic, deterministic"),
        (OneStepDiffusionPolicy, {"noise_scheduler": None}, "noise_scheduler"),
        (OneStepDiffusionPolicy, {"k_max": 100}, "k_max"),
        (ConsistencyPolicy, {"teacher_ckpt": "x"}, "teacher_checkpoint"),
    ],
)
def test_wrong_arguments_are_named(policy_class, arguments, message):
    options = {"noise_scheduler": scheduler()} if policy_class is OneStepDiffusionPolicy else {}
    with pytest.raises((ValueError, TypeError), match=message):
        policy_class(**{**SIZES, **network("mlp"), **options, **arguments})


# ---------------------------------------------------------------------- a known map
class Ring(nn.Module):
    """A small network that is smooth in its times, for observation o -> (cos pi o, sin pi o) twice."""

    def __init__(self, width=96):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6 + 16, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, 4),
        )

    def forward(self, sample, timestep, cond=None, start_time=None):
        start = timestep if start_time is None else start_time
        return self.net(
            torch.cat([sample.flatten(1), torch.stack([start, timestep], dim=1), cond.flatten(1)], dim=1)
        ).unflatten(1, (2, 2))


def ring(obs):
    return torch.cat([torch.cos(torch.pi * obs), torch.sin(torch.pi * obs)], -1).repeat(1, 2, 1)


def train_on_ring(policy_class, steps, lr=3e-3, betas=(0.9, 0.999), **options):
    """The trained policy and its root mean square error; a policy that knows nothing has 0.7 or more."""
    torch.manual_seed(0)
    policy = policy_class(
        horizon=2,
        obs_dim=1,
        action_dim=2,
        n_obs_steps=1,
        n_action_steps=2,
        obs_as_cond=True,
        **({"model": Ring(), "obs_encoder": StateEncoder(1, 1, 16)} | options),
    )
    policy.set_normalizer(unit_normalizer(1, 2))
    optimizer = torch.optim.Adam([p for p in policy.parameters() if p.requires_grad], lr=lr, betas=betas)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        obs = torch.rand(128, 1, 1) * 2 - 1
        policy.set_progress(step / steps)
        policy.compute_loss({"obs": obs, "action": ring(obs)}).backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    obs = torch.linspace(-1, 1, 200)[:, None, None]
    return policy.eval(), (policy.predict_action({"obs": obs})["action"] - ring(obs)).square().mean().sqrt().item()


def test_idp_learns_a_map():
    """To a stated error in seconds, with one of the backbones."""
    networks = dict(model=ResidualMLP(2, 2, 2, 1, n_layer=2, n_emb=64, p_drop=0.0), obs_encoder=StateEncoder(1, 1, 64))
    assert train_on_ring(IDPPolicy, 600, lr=2e-3, lambda_schedule="ramp", **networks)[1] < 0.05


def test_mean_flow_and_ofp_learn_a_map():
    assert train_on_ring(MeanFlowPolicy, 400, dispersive=0.0)[1] < 0.3
    assert train_on_ring(OFPPolicy, 400)[1] < 0.35


def test_consistency_learns_a_map(monkeypatch):
    teacher, error = train_on_ring(EDMTeacherPolicy, 400, time_scale=0.25, nfe=19)
    assert error < 0.25
    monkeypatch.setattr(distilled, "load_teacher", lambda *_: teacher.requires_grad_(False))
    assert train_on_ring(ConsistencyPolicy, 200, time_scale=0.25)[1] < 0.15
    assert train_on_ring(ConsistencyTrainingPolicy, 300, time_scale=0.25)[1] < 0.15


def test_one_step_diffusion_learns_a_map(monkeypatch):
    options = dict(noise_scheduler=scheduler(), time_scale=0.01)
    teacher, error = train_on_ring(DDPMPolicy, 400, num_inference_steps=100, **options)
    assert error < 0.25
    monkeypatch.setattr(distilled, "load_teacher", lambda *_: teacher.requires_grad_(False))
    assert train_on_ring(OneStepDiffusionPolicy, 300, lr=3e-4, betas=(0.0, 0.999), **options)[1] < 0.3


# ---------------------------------------------------------------------- runs
SHORT = ("preset=debug", "task.env_runner.max_steps=8", "task.env_runner.n_test=1", "task.env_runner.n_test_vis=0")


@pytest.fixture(scope="module")
def zarr(tmp_path_factory):
    return write_pusht(tmp_path_factory.mktemp("data") / "pusht.zarr")


def train(name, run, zarr, *overrides):
    return train_here(run, name, *SHORT, f"task.dataset.zarr_path={zarr}", *overrides)


def command(name, run, zarr, *overrides):
    words = (f"--config-name={name}", *SHORT, f"task.dataset.zarr_path={zarr}", f"hydra.run.dir={run}")
    return util.command("train.py", *words, *overrides)


def weights(run):
    return checkpoint_io.load(run / "checkpoints/latest.ckpt")["state_dicts"]["ema_model"]


@pytest.fixture(scope="module")
def chained(tmp_path_factory, zarr):
    """Both stages by one command."""
    run = tmp_path_factory.mktemp("runs") / "chained"
    done = command("train_consistency_mlp_lowdim", run, zarr)
    assert done.returncode == 0, done.stdout + done.stderr
    return run


def test_one_command_trains_teacher_and_student(chained):
    payload = checkpoint_io.load(chained / "checkpoints/latest.ckpt")
    teacher = checkpoint_io.load(chained / "teacher/checkpoints/latest.ckpt")
    assert payload["cfg"]["policy"]["teacher_checkpoint"] == str(chained / "teacher/checkpoints/latest.ckpt")
    assert teacher["cfg"]["policy"]["_target_"].endswith("EDMTeacherPolicy") and "teacher" not in teacher["cfg"]
    assert teacher["cfg"]["policy"]["model"] == payload["cfg"]["policy"]["model"]
    assert json.loads((chained / "teacher/summary.json").read_text())["steps"] == 8
    assert not any("teacher" in name for name in payload["state_dicts"]["model"])


def test_a_finished_teacher_is_used_again_and_the_student_is_the_same(chained, zarr, tmp_path):
    """Only the teacher's folder is left: the student comes out the same to the bit, in this process or in its own."""
    run = tmp_path / "again"
    shutil.copytree(chained / "teacher", run / "teacher")
    before = (run / "teacher/checkpoints/latest.ckpt").stat().st_mtime_ns
    train("train_consistency_mlp_lowdim", run, zarr)
    assert (run / "teacher/checkpoints/latest.ckpt").stat().st_mtime_ns == before
    assert all(torch.equal(a, b) for a, b in zip(weights(run).values(), weights(chained).values(), strict=True))


def test_an_unfinished_stage_is_continued(zarr, tmp_path):
    name, run = "train_one_step_diffusion_mlp_lowdim", tmp_path / "run"
    train(name, run, zarr, "teacher.training.num_epochs=1", "training.num_epochs=1")
    (run / "teacher/summary.json").unlink()  # as if it had been stopped after its first epoch
    (run / "summary.json").unlink()
    _, summary = train(name, run, zarr, "teacher.training.num_epochs=2")
    teacher = [json.loads(line)["global_step"] for line in (run / "teacher/logs.json.txt").read_text().splitlines()]
    student = [json.loads(line)["global_step"] for line in (run / "logs.json.txt").read_text().splitlines()]
    assert teacher == student == list(range(8)) and summary["steps"] == 8


def test_a_student_is_evaluated_without_its_teacher(chained, tmp_path):
    run = tmp_path / "moved"
    shutil.copytree(chained, run)
    shutil.rmtree(run / "teacher")
    payload = checkpoint_io.load(run / "checkpoints/latest.ckpt")
    payload["cfg"]["policy"]["teacher_checkpoint"] = str(run / "teacher/checkpoints/latest.ckpt")
    checkpoint_io.save(payload, run / "checkpoints/latest.ckpt")
    eval_script.main(["--checkpoint", str(run / "checkpoints/latest.ckpt"), "--n_episodes", "1"])
    assert json.loads((run / "eval_latest_n1/eval_log.json").read_text())["nfe"] == 1


def student_of(checkpoint, **changes):
    cfg = load_config("train_consistency_mlp_lowdim", "preset=debug").policy
    policy = hydra.utils.instantiate({**cfg, "teacher_checkpoint": checkpoint, **changes})
    policy.set_normalizer(unit_normalizer(policy.obs_dim, policy.action_dim))
    policy.on_train_start()
    return policy


def test_a_student_takes_over_its_teacher(chained):
    checkpoint = chained / "teacher/checkpoints/latest.ckpt"
    policy = student_of(str(checkpoint))
    taught = checkpoint_io.load(checkpoint)["state_dicts"]["ema_model"]
    mine = policy.state_dict()
    assert all(torch.equal(mine[key], value) for key, value in taught.items() if key in mine)  # networks and normaliser
    # Loading it leaves the global random numbers alone, though the teacher's workspace seeds them.
    torch.manual_seed(123)
    state = torch.get_rng_state()
    policy.on_train_start()
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_wrong_with_a_teacher_is_reported(chained, zarr, tmp_path):
    checkpoint = str(chained / "teacher/checkpoints/latest.ckpt")
    with pytest.raises(TeacherError, match="set policy.sigma_data=0.5"):
        student_of(checkpoint, sigma_data=1.0)
    with pytest.raises(TeacherError, match="its horizon is 16, the student's is 9"):
        student_of(
            checkpoint,
            horizon=9,
            model=load_config("train_consistency_mlp_lowdim", "preset=debug", "horizon=9").policy.model,
        )
    wide = load_config("train_consistency_mlp_lowdim", "preset=debug", "size.mlp.n_emb=32").policy
    with pytest.raises(TeacherError, match="its model.* has shape"):
        student_of(checkpoint, model=wide.model, obs_encoder=wide.obs_encoder)
    with pytest.raises(TeacherError, match="it holds a ConsistencyPolicy, not a EDMTeacherPolicy"):
        student_of(str(chained / "checkpoints/latest.ckpt"))
    with pytest.raises(TeacherError, match="not given.*\n.*train.py --config-name"):
        student_of(None)
    (tmp_path / "broken.ckpt").write_bytes(b"no checkpoint")
    with pytest.raises(TeacherError, match="cannot be loaded"):
        student_of(str(tmp_path / "broken.ckpt"))
    with pytest.raises(TeacherError, match="on_train_start loads it"):
        hydra.utils.instantiate(load_config("train_consistency_mlp_lowdim", "preset=debug").policy).teacher


def test_the_command_says_what_is_wrong_without_a_traceback(zarr, tmp_path):
    done = command(
        "train_one_step_diffusion_mlp_lowdim", tmp_path / "run", zarr, "policy.teacher_checkpoint=/nowhere.ckpt"
    )
    assert done.returncode == 2 and "no checkpoint at policy.teacher_checkpoint=/nowhere.ckpt" in done.stderr
    assert "--config-name=train_diffusion_transformer_lowdim" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "prediction, message",
    [
        ({"prediction_type": "sample"}, "prediction_type=epsilon"),
        ({"beta_schedule": "linear"}, "different noise levels"),
        ({}, "time_scale=0.5"),
    ],
)
def test_noise_of_teacher_and_student_must_agree(prediction, message, monkeypatch):
    teacher = make(DDPMPolicy, "mlp", noise_scheduler=scheduler(**prediction), time_scale=1.0 if prediction else 0.5)
    monkeypatch.setattr(distilled, "load_teacher", lambda *_: teacher)
    policy = OneStepDiffusionPolicy(**SIZES, **network("mlp"), noise_scheduler=scheduler())
    with pytest.raises(TeacherError, match=message):
        policy.on_train_start()
