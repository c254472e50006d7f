"""IDP and Naive Drifting as policies: losses in closed form, MIP equality, calls, arguments, gradients."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from diffusion_policy.model.diffusion.conditional_unet1d import ConditionalUnet1D
from diffusion_policy.model.diffusion.mip_networks import ChiTransformer, ChiUnet, ResidualMLP, StateEncoder
from diffusion_policy.model.diffusion.transformer_for_diffusion import TransformerForDiffusion
from idp_workspace.geometry import geometry_excess
from idp_workspace.paths import raised
from idp_workspace.policy import IDPPolicy, MIPPolicy, NaiveDriftingPolicy, RegressionPolicy, TSDPolicy
from idp_workspace.policy.idp import potential
from idp_workspace.policy.idp_options import IDPOptions
from tests.util import unit_normalizer

H, D, DO, TO, TA = 16, 10, 6, 2, 8
SIZES = dict(horizon=H, obs_dim=DO, action_dim=D, n_obs_steps=TO, n_action_steps=TA)


class Stub(nn.Module):
    """A network given by a formula in its input x and time t."""

    def __init__(self, formula):
        super().__init__()
        self.formula = formula
        self.calls = 0

    def forward(self, sample, timestep, cond=None, global_cond=None, local_cond=None):
        self.calls += 1
        return self.formula(sample, timestep[:, None, None].expand_as(sample))


class CondStub(Stub):
    """Its observation tokens are the observations: what upstream's transformer calls cond_obs_emb."""

    def __init__(self, formula):
        super().__init__(formula)
        self.cond_obs_emb = nn.Identity()


def small_network(kind):
    if kind == "transformer":
        return dict(
            model=TransformerForDiffusion(
                D, D, H, TO, DO, n_layer=1, n_head=2, n_emb=16, p_drop_emb=0.0, p_drop_attn=0.0, causal_attn=True
            ),
            obs_as_cond=True,
        )
    if kind == "unet":
        return dict(
            model=ConditionalUnet1D(D, global_cond_dim=TO * DO, diffusion_step_embed_dim=16, down_dims=[16, 32]),
            obs_as_global_cond=True,
        )
    if kind == "unet_local":
        return dict(
            model=ConditionalUnet1D(D, local_cond_dim=DO, diffusion_step_embed_dim=16, down_dims=[16, 32]),
            obs_as_local_cond=True,
        )
    encoder = StateEncoder(DO, TO, 16)
    if kind == "chi_transformer":
        return dict(
            model=ChiTransformer(D, D, H, TO, n_layer=1, n_head=2, n_emb=16, p_drop_attn=0.0),
            obs_encoder=encoder,
            obs_as_cond=True,
        )
    if kind == "chi_unet":
        return dict(model=ChiUnet(D, 2 * 16, 16, 16, (16, 32)), obs_encoder=encoder, obs_as_global_cond=True)
    return dict(model=ResidualMLP(D, D, H, TO, n_layer=1, n_emb=16, p_drop=0.0), obs_encoder=encoder, obs_as_cond=True)


NETWORKS = ("transformer", "unet", "unet_local", "chi_transformer", "chi_unet", "mlp")


def make(policy_class=IDPPolicy, network="mlp", seed=0, **options):
    torch.manual_seed(seed)
    policy = policy_class(**SIZES, **small_network(network), **options)
    policy.set_normalizer(unit_normalizer(DO, D))
    return policy


def stub_policy(formula, policy_class=IDPPolicy, **options):
    policy = policy_class(**SIZES, model=CondStub(formula), obs_as_cond=True, **options)
    policy.set_normalizer(unit_normalizer(DO, D))
    return policy


def batch(b=32, seed=0, value=None):
    g = torch.Generator().manual_seed(seed)
    action = torch.rand(b, H, D, generator=g) * 2 - 1 if value is None else torch.full((b, H, D), value)
    return {"obs": torch.rand(b, H, DO, generator=g) * 2 - 1, "action": action}


# ---------------------------------------------------------------------- closed-form values of MIP's loss
@pytest.mark.parametrize(
    "formula, expected", [(lambda x, t: 0 * x, 25.3086), (lambda x, t: x, 1.3086), (lambda x, t: 0 * x + 0.5, 0.0)]
)
def test_closed_form_values_of_the_mip_loss(formula, expected):
    """Constant action 0.5, H = 16, D = 10, scale 0.1, t* = 0.9. A constant action has no geometry, so m = 0 with and
    without it.
    """
    torch.manual_seed(0)
    for geometry in (True, False):
        loss = stub_policy(formula, geometry=geometry).compute_loss(batch(b=4096, value=0.5))
        assert loss.item() == pytest.approx(expected, abs=5e-3 if expected == 1.3086 else 1e-4)


def test_regression_is_the_loss_without_probe():
    policy = stub_policy(lambda x, t: 0 * x, lambda_prox=0.0, geometry=False)
    assert policy.compute_loss(batch(value=0.5)).item() == pytest.approx(0.25 / 0.81, rel=1e-5)
    assert policy.model.calls == 2  # one when the policy checked its sizes, one here: no probe


@pytest.mark.parametrize("nfe, expected", [(1, 1.0), (2, 2.0)])
def test_acting_with_f_equal_x_plus_1(nfe, expected):
    """One call: f(0, 0) = 1. Two calls, MIP's sampler: f(f(0, 0), t*) = 2."""
    policy = stub_policy(lambda x, t: x + 1, nfe=nfe)
    out = policy.predict_action({"obs": batch()["obs"]})
    assert out["action"].shape == (32, TA, D) and out["action_pred"].shape == (32, H, D)
    assert torch.allclose(out["action_pred"], torch.tensor(expected))


def test_second_call_is_at_t_star():
    assert stub_policy(lambda x, t: x + t, nfe=2).predict_action({"obs": batch()["obs"]})[
        "action"
    ].unique().item() == pytest.approx(0.9)


@pytest.mark.parametrize(
    "policy_class, nfe, calls", [(IDPPolicy, 1, 1), (IDPPolicy, 2, 2), (NaiveDriftingPolicy, None, 1)]
)
def test_inference_is_one_network_call(policy_class, nfe, calls):
    policy = make(policy_class)
    if nfe:
        policy.nfe = nfe
    seen = []
    policy.model.register_forward_hook(lambda *_: seen.append("model"))
    policy.obs_encoder.register_forward_hook(lambda *_: seen.append("encoder"))
    policy.predict_action({"obs": batch()["obs"]})
    assert seen == ["encoder"] + ["model"] * calls


# ---------------------------------------------------------------------- the loss of the paper
def mip_loss(policy, data, t_star=0.9, scale=0.1):
    """MIP's training loss, written from its definition."""
    nobs, a = policy.normalizer["obs"].normalize(data["obs"]), policy.normalizer["action"].normalize(data["action"])
    cond = policy.obs_encoder(nobs[:, :TO])
    noise = torch.randn_like(a)
    zero, one = torch.zeros(len(a)), torch.full((len(a),), t_star)
    first = policy.model(torch.zeros_like(a), zero, cond=cond)
    second = policy.model(a + (1 - t_star) * noise, one, cond=cond)
    return scale * (((first - a) / t_star).square().sum(-1) + ((second - a) / (1 - t_star)).square().sum(-1)).mean()


def test_acting_makes_no_modules(monkeypatch):
    """Making the normaliser's fields anew took as long as half of a small network."""
    policy, obs = make().eval(), {"obs": torch.zeros(1, TO, DO)}
    policy.predict_action(obs)
    made = []
    monkeypatch.setattr(torch.nn.Module, "__init__", lambda *_, **__: made.append(1))
    policy.predict_action(obs)
    assert not made


def test_without_geometry_it_is_mip_to_the_last_bit():
    data = batch()
    policy = make(geometry=False)
    torch.manual_seed(3)
    ours = policy.compute_loss(data)
    torch.manual_seed(3)
    theirs = mip_loss(policy, data)
    assert torch.equal(ours, theirs)
    gradients = [torch.autograd.grad(loss, list(policy.model.parameters())) for loss in (ours, theirs)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_zero_excess_is_mip_to_the_last_bit_too():
    """m computed, but zero: a batch of one has no neighbourhood."""
    data = batch(b=1)
    policy = make()
    torch.manual_seed(3)
    ours = policy.compute_loss(data)
    torch.manual_seed(3)
    assert torch.equal(ours, mip_loss(policy, data))


def test_loss_is_the_weighted_potential():
    data = batch()
    policy = make()
    torch.manual_seed(5)
    loss = policy.compute_loss(data)
    cond = policy.generator.encode(data["obs"])
    m = geometry_excess(cond.flatten(1), data["action"])
    assert m.max() > 0.1
    torch.manual_seed(5)
    noise = torch.randn_like(data["action"])
    y = policy.generator(cond, torch.zeros_like(noise), 0.0)
    z = policy.generator(cond, data["action"] + 0.1 * noise, 0.9)
    energy = lambda x: 0.5 * ((1 + m) * (x - data["action"]) ** 2).sum(-1).mean()
    # E(y) + 81 E(z), in MIP's overall scale: 2 * 0.1 / 0.81.
    torch.testing.assert_close(loss, 0.2 / 0.81 * (energy(y) + 81 * energy(z)), rtol=1e-4, atol=1e-4)


def test_potential_gradient_is_the_geometry_induced_correction():
    """Proposition 4.1: -grad E = (I + M)(a* - a), for a diagonal and for a full M."""
    torch.manual_seed(0)
    a, target = torch.randn(3, 2, 4, requires_grad=True), torch.randn(3, 2, 4)
    root = torch.randn(3, 2, 4, 4)
    for m in (torch.rand(3, 2, 4), root @ root.mT):
        (grad,) = torch.autograd.grad(potential(a - target, m).sum() / 2, a)
        matrix = m if m.ndim == 4 else torch.diag_embed(m)
        expected = (target - a) + (matrix @ (target - a).unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(-grad, expected)
    assert torch.equal(potential(a, torch.diag_embed(torch.zeros(3, 2, 4))), potential(a, torch.zeros(())))


def test_no_gradient_reaches_the_encoder_through_the_geometry():
    """With the backbone's weights at zero the residual does not depend on the encoder; only the geometry could pass a
    gradient.
    """
    policy = make()
    for p in policy.model.parameters():
        p.data.zero_()
    policy.compute_loss(batch()).backward()
    assert policy._last[1].max() > 0
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in policy.obs_encoder.parameters())


def test_probe_can_be_left_isotropic():
    data = batch()
    values = []
    for on_probe in (True, False):
        policy = make(geometry_on_probe=on_probe)
        torch.manual_seed(0)
        values.append(policy.compute_loss(data).item())
    assert values[0] > values[1]


def test_in_place_of_an_in_painting_unet_the_observation_is_a_condition(caplog):
    model = ConditionalUnet1D(
        D + DO, diffusion_step_embed_dim=16, down_dims=[16, 32], kernel_size=5, n_groups=4, cond_predict_scale=True
    )
    with caplog.at_level("INFO"):
        policy = IDPPolicy(**SIZES, model=model, obs_as_local_cond=False, obs_as_global_cond=False)
    assert [record.message for record in caplog.records] == [
        "IDPPolicy does not in-paint: its UNet is built again with the observation as a condition (obs_as_global_cond)"
    ]
    expected = ConditionalUnet1D(
        D, None, TO * DO, diffusion_step_embed_dim=16, down_dims=[16, 32], kernel_size=5, n_groups=4,
        cond_predict_scale=True,
    )  # fmt: skip
    assert {key: value.shape for key, value in policy.model.state_dict().items()} == {
        key: value.shape for key, value in expected.state_dict().items()
    }
    norms = [[m.num_groups for m in net.modules() if isinstance(m, nn.GroupNorm)] for net in (policy.model, expected)]
    assert norms[0] == norms[1]
    policy.set_normalizer(unit_normalizer(DO, D))
    policy.compute_loss(batch(4)).backward()
    assert policy.predict_action({"obs": torch.zeros(2, TO, DO)})["action"].shape == (2, TA, D)


@pytest.mark.parametrize("policy_class", [IDPPolicy, MIPPolicy, TSDPolicy])
def test_the_root_of_the_potential_at_each_step(policy_class):
    data = batch()
    policy = make(policy_class, energy_power=0.5, lambda_prox=2.0)
    torch.manual_seed(5)
    loss = policy.compute_loss(data)
    cond, a = policy.generator.encode(data["obs"]), data["action"]
    m = geometry_excess(cond.flatten(1), a) if policy_class is IDPPolicy else torch.zeros(())
    root = lambda x, target: ((1 + m) * (x - target) ** 2).sum(-1).sqrt().mean()
    torch.manual_seed(5)
    noise = torch.randn_like(a)
    start, first = torch.zeros_like(a), a
    if policy_class is TSDPolicy:
        start, first = torch.randn_like(a), a + 0.1 * noise
    y = policy.generator(cond, start, 0.0)
    z = policy.generator(cond, a + 0.1 * noise, 0.9)
    # sqrt(2 E(y)) + 2 sqrt(2 E(z)), in the scale of the proposal: 0.1 / 0.9
    torch.testing.assert_close(loss, 0.1 / 0.9 * (root(y, first) + 2 * root(z, a)), rtol=1e-4, atol=1e-4)


def test_the_geometry_changes_the_best_action_under_the_root_only():
    """Two experts for one observation, m large in the first action dimension at one of them."""
    experts, m = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 1.0]]), torch.tensor([[9.0, 0.0]])
    best = {}
    for power in (1.0, 0.5):
        for name, weight in (("with", m), ("without", torch.zeros(()))):
            x = torch.full((1, 2), 0.4, requires_grad=True)
            optimizer = torch.optim.LBFGS([x], max_iter=200, line_search_fn="strong_wolfe")

            def closure(x=x, weight=weight, power=power, optimizer=optimizer):
                optimizer.zero_grad()
                loss = raised(potential(x - experts, weight), power).sum()
                loss.backward()
                return loss

            optimizer.step(closure)
            best[power, name] = x.detach()
    torch.testing.assert_close(best[1.0, "with"], best[1.0, "without"], atol=1e-4, rtol=0)
    assert (best[0.5, "with"] - best[0.5, "without"]).abs().max() > 0.02


def test_the_root_has_a_finite_gradient_at_the_expert():
    a = torch.randn(4, 3, 2)
    x = a.clone().requires_grad_()
    raised(potential(x - a, torch.zeros(())), 0.5).sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("fraction, n", [(0.25, 8), (1e-9, 1), (1.0, 32)])
def test_the_probe_on_part_of_the_batch(fraction, n):
    data = batch()
    a, policy = data["action"], make(probe_fraction=fraction)
    torch.manual_seed(0)
    loss = policy.compute_loss(data)
    torch.manual_seed(0)
    f, cond = policy.generator, policy.generator.encode(data["obs"])
    m = policy.excess(cond, a)
    y, z = f(cond, torch.zeros_like(a), 0.0), f(cond[:n], a[:n] + 0.1 * torch.randn_like(a[:n]), 0.9)
    expected = potential((y - a) / 0.9, m).mean() + potential((z - a[:n]) / 0.1, m[:n]).mean()
    torch.testing.assert_close(loss, 0.1 * expected)


def test_a_probe_on_more_than_the_batch_is_refused():
    with pytest.raises(ValueError, match="probe_fraction"):
        make(probe_fraction=1.5)


def test_regression_with_the_distance():
    data = batch()
    policy = make(RegressionPolicy, energy_power=0.5)
    error = (
        policy.generator(policy.generator.encode(data["obs"]), torch.zeros_like(data["action"]), 0.0) - data["action"]
    )
    torch.testing.assert_close(policy.compute_loss(data), 0.1 * error.norm(dim=-1).mean())


def test_lambda_schedule_grows_to_the_paper_s_value():
    policy = make(lambda_schedule="ramp", ramp_from=0.4, ramp_until=0.8)
    seen = []
    for progress in (0.0, 0.4, 0.6, 0.8, 1.0):
        policy.set_progress(progress)
        seen.append(policy.current_lambda())
    assert seen == pytest.approx([1.0, 1.0, 9.0, 81.0, 81.0])
    # A loop that does not report the progress, as upstream's, trains with the final weight.
    assert make(lambda_schedule="ramp").current_lambda() == pytest.approx(81.0)
    assert make().current_lambda() == pytest.approx(81.0)
    assert make(lambda_prox=5.0).current_lambda() == 5.0


@pytest.mark.parametrize(
    "switches",
    [
        {"granularity": "flat"},
        {"granularity": "dim"},
        {"self_neighbor": False},
        {"tau": 0.5, "rel_floor": 0.03, "m_clip": 5.0},
        {"topk": 8, "rel_floor": 0.01},
        {"center": "weighted_mean"},
        {"reference": "ema"},
        {"reference": "dataset"},
        {"reference": "none"},
        {"excess": "absolute"},
        {"weights": "uniform"},
        {"weights": "shuffled"},
        {"matrix": "full"},
        {"geometry_on_probe": False},
        {"lambda_prox": 0.0},
    ],
    ids=str,
)
def test_every_switch_trains_and_reports(switches):
    policy = make(**switches)
    default = make()
    policy.compute_loss(batch(seed=1))  # a running reference starts as the batch's own
    torch.manual_seed(1)
    loss = policy.compute_loss(batch())
    loss.backward()
    torch.manual_seed(1)
    assert torch.isfinite(loss) and all(
        torch.isfinite(p.grad).all() for p in policy.model.parameters() if p.grad is not None
    )
    if "self_neighbor" not in switches:  # that one is meant to change nothing
        assert loss.item() != default.compute_loss(batch()).item()
    metrics = policy.metrics()
    assert {"m_mean", "m_p99", "m_max", "m_positive", "effective_neighbors", "lambda_prox"} <= metrics.keys()
    assert 0 <= metrics["m_mean"] <= metrics["m_p99"] <= metrics["m_max"] and 1 <= metrics["effective_neighbors"] <= 32


def test_reference_from_the_dataset_and_from_an_average():
    data = batch(b=512)
    policy = make(reference="dataset")
    policy.set_normalizer(unit_normalizer(DO, D))
    fitted = torch.tensor([-1.0, 1.0]).var()  # the two rows the normaliser was fitted on
    torch.testing.assert_close(policy.reference_variance, fitted.expand(H, D))
    policy = make(reference="ema")
    policy.compute_loss(data)
    first = policy.reference_variance.clone()
    torch.testing.assert_close(first, data["action"].var(0, correction=0))
    policy.compute_loss(batch(b=512, seed=1))
    torch.testing.assert_close(
        policy.reference_variance, 0.99 * first + 0.01 * batch(b=512, seed=1)["action"].var(0, correction=0)
    )
    assert "reference_variance" in policy.state_dict()


# ---------------------------------------------------------------------- generators
@pytest.mark.parametrize("policy_class", [IDPPolicy, NaiveDriftingPolicy])
@pytest.mark.parametrize("network", NETWORKS)
def test_every_objective_works_with_every_generator(policy_class, network):
    policy = make(policy_class, network)
    before = policy.compute_loss(batch())
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    before.backward()
    optimizer.step()
    out = policy.predict_action({"obs": batch()["obs"][:, :TO]})
    assert out["action"].shape == (32, TA, D)
    torch.testing.assert_close(out["action"], out["action_pred"][:, TO - 1 : TO - 1 + TA])
    prefixes = {key.split(".")[0] for key in policy.state_dict()}
    assert prefixes <= {"_dummy_variable", "model", "obs_encoder", "normalizer"}


@pytest.mark.parametrize(
    "network, width", [("transformer", TO * 16), ("unet", TO * DO), ("chi_transformer", TO * 16), ("mlp", TO * 16)]
)
def test_embedding_is_what_the_design_says(network, width):
    policy = make(network=network)
    obs = batch()["obs"]
    cond = policy.generator.encode(obs)
    phi = policy.generator.embedding(cond)
    assert phi.shape == (32, width) and not phi.requires_grad
    if network == "unet":
        assert torch.equal(phi, obs[:, :TO].flatten(1))
    elif network == "transformer":
        assert torch.equal(phi, policy.model.cond_obs_emb(obs[:, :TO]).detach().flatten(1))
    else:
        assert torch.equal(phi, policy.obs_encoder(obs[:, :TO]).detach().flatten(1))


def test_time_enters_raw():
    seen = []
    policy = stub_policy(lambda x, t: seen.append(t.unique().tolist()) or 0 * x)
    seen.clear()
    policy.compute_loss(batch())
    assert seen == [[0.0], [pytest.approx(0.9)]]


def test_a_deep_copy_is_independent():
    """The averaged policy is a deep copy; its generator must use its own network."""
    policy = make()
    other = copy.deepcopy(policy)
    assert other.generator.model is other.model and other.model is not policy.model
    for p in other.model.parameters():
        p.data.zero_()
    obs = {"obs": batch()["obs"]}
    assert (
        other.predict_action(obs)["action_pred"].abs().max()
        == 0
        < policy.predict_action(obs)["action_pred"].abs().max()
    )


def test_pred_action_steps_only_predicts_just_the_executed_steps():
    model = ResidualMLP(D, D, TA, TO, n_layer=1, n_emb=16, p_drop=0.0)
    policy = IDPPolicy(
        **SIZES, model=model, obs_encoder=StateEncoder(DO, TO, 16), obs_as_cond=True, pred_action_steps_only=True
    )
    policy.set_normalizer(unit_normalizer(DO, D))
    data = batch()
    changed = {**data, "action": data["action"].clone()}
    changed["action"][:, 0] += 1
    changed["action"][:, 1 + TA :] += 1
    losses = []
    for d in (data, changed):
        torch.manual_seed(0)
        losses.append(policy.compute_loss(d))
    assert torch.equal(*losses)  # steps outside 1..8 are not looked at
    assert policy.predict_action({"obs": data["obs"]})["action"].shape == (32, TA, D)


def test_executed_slice_without_the_oa_convention_starts_one_later():
    policy = stub_policy(lambda x, t: torch.arange(H).float()[None, :, None].expand_as(x), oa_step_convention=False)
    assert policy.predict_action({"obs": batch()["obs"]})["action"][0, :, 0].tolist() == list(range(TO, TO + TA))


def test_get_optimizer_as_upstream_s_transformer_workspaces_call_it():
    policy = make(network="chi_transformer")
    optimizer = policy.get_optimizer(learning_rate=1e-4, weight_decay=0.1, betas=[0.9, 0.95])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0, 0.1]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert {id(p) for p in [*policy.model.parameters(), *policy.obs_encoder.parameters()]} <= held


# ---------------------------------------------------------------------- what a user can get wrong
def test_arguments_of_a_denoiser_are_accepted_and_said_once(caplog):
    with caplog.at_level("INFO"):
        policy = make(noise_scheduler=object(), num_inference_steps=100)
    assert caplog.text.count("noise_scheduler") == 1 and "num_inference_steps" in caplog.text
    policy.num_inference_steps = 16  # upstream's robot script writes these two
    policy.n_action_steps = H - TO + 1
    assert policy.predict_action({"obs": batch()["obs"]})["action"].shape == (32, H - TO + 1, D)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"granularty": "flat"}, "granularity"),
        ({"granularity": "chunk"}, "per_step, flat, dim"),
        ({"lambda_schedule": "rampp"}, "constant, ramp"),
        ({"t_star": 1.0}, "t_star"),
        ({"ramp_from": 0.9, "ramp_until": 0.5}, "ramp_from"),
        ({"nfe": 3}, "nfe=3"),
        ({"obs_as_global_cond": True}, "exactly one"),
        ({"obs_as_cond": False}, "exactly one"),
        ({"n_action_steps": 16}, "horizon"),
        ({"obs_dim": 7}, "obs_dim 7"),
        ({"action_dim": 3}, "action_dim 3"),
        ({"model": None}, "model"),
        ({"completely_else": 1}, "it takes"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        IDPPolicy(**{**SIZES, **small_network("mlp"), **arguments})


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"gens_per_obs": 0}, "gens_per_obs"),
        ({"positives": "all"}, "own, knn, batch"),
        ({"space": "chunk"}, "per_step, flat"),
        ({"temperatures": [-1]}, "temperatures"),
        ({"tau": 0.0}, "tau"),
    ],
)
def test_wrong_arguments_of_naive_drifting_are_named(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make(NaiveDriftingPolicy, **arguments)


def test_a_horizon_the_unet_cannot_halve_is_found_at_construction():
    with pytest.raises(ValueError, match="horizon 10"):
        IDPPolicy(
            **{**SIZES, "horizon": 10},
            model=ConditionalUnet1D(D, global_cond_dim=TO * DO, diffusion_step_embed_dim=16, down_dims=[16, 32, 64]),
            obs_as_global_cond=True,
        )


@pytest.mark.parametrize(
    "obs, message",
    [
        ({}, "no entry 'obs'"),
        ({"obs": torch.zeros(1, TO, DO + 1)}, r"6 numbers.*\(1, 2, 7\)"),
        ({"obs": torch.zeros(1, 1, DO)}, "at least 2 steps"),
        ({"obs": torch.zeros(TO, DO)}, "must have shape"),
        ({"obs": [[0.0]]}, "got list"),
    ],
)
def test_wrong_observations_are_named(obs, message):
    with pytest.raises(ValueError, match=message):
        make().predict_action(obs)


def test_wrong_action_chunks_are_named():
    with pytest.raises(ValueError, match="action chunks"):
        make().compute_loss({**batch(), "action": torch.zeros(32, H - 1, D)})


def test_an_unfitted_normaliser_is_reported_clearly():
    policy = IDPPolicy(**SIZES, **small_network("mlp"))
    with pytest.raises(Exception, match="(?i)normali[sz]er"):
        policy.predict_action({"obs": batch()["obs"]})


# ---------------------------------------------------------------------- naive drifting
def test_one_sample_per_observation_has_the_direction_of_the_squared_error():
    """Proposition 3.1 through the whole policy: parameter gradients are parallel."""
    data = batch()
    policy = make(NaiveDriftingPolicy, gens_per_obs=1, space="flat")
    torch.manual_seed(0)
    drift = torch.autograd.grad(policy.compute_loss(data), list(policy.model.parameters()))
    torch.manual_seed(0)
    x = policy.generator(policy.generator.encode(data["obs"]), policy.start_noise(32), 0.0)
    mse = torch.autograd.grad((x - data["action"]).square().mean(), list(policy.model.parameters()))
    a, b = (torch.cat([g.flatten() for g in grads]) for grads in (drift, mse))
    assert torch.nn.functional.cosine_similarity(a, b, dim=0).item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"positives": "knn", "knn_k": 4},
        {"positives": "batch"},
        {"positives": "weighted"},
        {"positives": "weighted", "topk": 4, "space": "flat"},
        {"space": "flat"},
        {"noise": "zero"},
        {"mse_coeff": 1.0},
        {"probe_coeff": 81.0},
        {"kernel": "gaussian"},
        {"gens_per_obs": 1},
    ],
    ids=str,
)
def test_every_option_of_naive_drifting_trains(options):
    policy = make(NaiveDriftingPolicy, **options)
    loss = policy.compute_loss(batch())
    loss.backward()
    assert torch.isfinite(loss) and policy.metrics()["sample_mse"] > 0


def test_knn_positives_are_the_nearest_observations():
    policy = make(NaiveDriftingPolicy, network="unet", positives="knn", knn_k=2)
    data = batch(b=8)
    data["obs"][1] = data["obs"][0] + 1e-4
    positives, _ = policy.positives(policy.generator.encode(data["obs"]), data["action"])
    assert positives.shape == (8, 2, H, D)
    chosen = {tuple(p[0].tolist()) for p in positives[0]}
    assert chosen == {tuple(data["action"][0, 0].tolist()), tuple(data["action"][1, 0].tolist())}


def test_options_as_an_object_equal_options_as_keywords():
    keywords, thing = make(tau=0.5, m_clip=2.0), make(options=IDPOptions(tau=0.5, m_clip=2.0))
    assert keywords.options == thing.options
    assert IDPPolicy(IDPOptions(tau=0.5), **SIZES, **small_network("mlp")).options.tau == 0.5
    with pytest.raises(TypeError, match="no argument 'tau'"):
        make(options=IDPOptions(), tau=0.5)


def test_options_are_plain_data():
    """They go into logs and images."""
    for policy in (make(), make(NaiveDriftingPolicy)):
        options = dataclasses.asdict(policy.options)
        options |= options.pop("proposal", {})
        assert all(isinstance(v, (int, float, str, bool, tuple, type(None))) for v in options.values())
