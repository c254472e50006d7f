"""Beyond the paper: proposals from noise, weighted positives, and whether both modes of experts who disagree are
reached.
"""

import json

import pytest
import torch
from omegaconf import OmegaConf

from benchmarks import toy
from idp_workspace.drifting import drifting_field, drifting_loss
from idp_workspace.geometry import geometry_excess
from idp_workspace.geometry_variants import Geometry, neighbor_weights
from idp_workspace.policy import NaiveDriftingPolicy
from idp_workspace.policy.idp import potential
from idp_workspace.proposals import HOT_TEMPERATURES, Proposal, assignment
from tests.unit.test_idp_policy import D, H, batch, make
from tests.util import load_config

G = 4


def several(assign, **options):
    return make(proposal={"noise": "gaussian", "samples": G, "assign": assign}, **options)


def samples_of(policy, data, seed):
    """The proposals (B, G, H, D) that the loss draws first after this seed, with gradient, and the condition."""
    cond = policy.generator.encode(data["obs"])
    torch.manual_seed(seed)
    noise = torch.randn(len(data["obs"]) * G, H, D)
    return policy.generator(cond.repeat_interleave(G, dim=0), noise, 0.0).view(-1, G, H, D), cond


# ---------------------------------------------------------------------- the proposal of IDP
@pytest.mark.parametrize("geometry", [True, False])
def test_the_default_proposal_is_the_paper_to_the_last_bit(geometry):
    data = batch()
    policies = [
        make(geometry=geometry),
        make(geometry=geometry, proposal={"noise": "zero", "samples": 1, "assign": "all"}),
        make(geometry=geometry, proposal={"assign": "wta"}),
    ]  # one sample always wins
    found = []
    for policy in policies:
        torch.manual_seed(7)
        loss = policy.compute_loss(data)
        found.append((loss, torch.get_rng_state(), *torch.autograd.grad(loss, list(policy.model.parameters()))))
    policy = policies[0]
    cond = policy.generator.encode(data["obs"])
    m = geometry_excess(cond.flatten(1), data["action"]) if geometry else torch.zeros(())
    torch.manual_seed(7)
    y = policy.generator(cond, torch.zeros(32, H, D), 0.0)
    z = policy.generator(cond, data["action"] + (1 - 0.9) * torch.randn(32, H, D), 0.9)
    loss = 0.1 * (potential((y - data["action"]) / 0.9, m) + potential((z - data["action"]) / (1 - 0.9), m)).mean()
    found.append((loss, torch.get_rng_state(), *torch.autograd.grad(loss, list(policy.model.parameters()))))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other))


def test_acting_without_noise_draws_none():
    policy = make(nfe=2)
    before = torch.get_rng_state()
    actions = [policy.predict_action({"obs": batch()["obs"]})["action_pred"] for _ in range(2)]
    assert torch.equal(*actions) and torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("nfe", [1, 2])
def test_acting_from_noise_is_as_many_calls_and_the_formula(nfe):
    policy, obs = several("wta", nfe=nfe), batch()["obs"]
    calls = []
    hook = policy.model.register_forward_hook(lambda *_: calls.append(1))
    torch.manual_seed(2)
    action = policy.predict_action({"obs": obs})["action_pred"]
    hook.remove()
    assert len(calls) == nfe
    with torch.no_grad():
        cond = policy.generator.encode(obs)
        torch.manual_seed(2)
        expected = policy.generator(cond, torch.randn(32, H, D), 0.0)
        if nfe == 2:
            expected = policy.generator(cond, expected, 0.9)
    assert torch.equal(action, expected) and not torch.equal(action, policy.predict_action({"obs": obs})["action_pred"])


@pytest.mark.parametrize("assign", ["all", "wta", "relaxed_wta"])
@pytest.mark.parametrize("matrix", ["diag", "full"])
def test_assignments_weigh_the_energies_of_the_samples(assign, matrix):
    data = batch(b=8)
    policy = several(assign, lambda_prox=0.0, loss_scale=1.0, t_star=0.9, matrix=matrix)
    torch.manual_seed(1)
    loss = policy.compute_loss(data)
    y, cond = samples_of(policy, data, 1)
    m = geometry_excess(cond.flatten(1), data["action"], matrix=matrix)
    energy = torch.stack([potential((y[:, g] - data["action"]) / 0.9, m).mean(-1) for g in range(G)], dim=1)  # (B, G)
    best = energy.min(dim=1).values
    expected = {
        "all": energy.mean(1),
        "wta": best,
        "relaxed_wta": 0.95 * best + 0.05 * (energy.sum(1) - best) / (G - 1),
    }[assign]
    torch.testing.assert_close(loss, expected.mean())


def test_wta_gradient_touches_only_the_best_sample():
    data = batch(b=8)
    policy = several("wta", lambda_prox=0.0)
    outputs = []

    def keep(module, inputs, output):
        output.retain_grad()
        outputs.append(output)

    policy.model.register_forward_hook(keep)
    policy.compute_loss(data).backward()
    y = outputs[0].detach().view(8, G, H, D)
    moved = outputs[0].grad.view(8, G, -1).abs().sum(-1) > 0
    m = policy._last[1][:, None]
    best = ((1 + m) * (y - data["action"][:, None]).square()).sum((-1, -2)).argmin(1)
    assert torch.equal(moved, torch.nn.functional.one_hot(best, G).bool())


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("assign", ["all", "wta", "relaxed_wta"])
def test_weights_of_an_assignment_sum_to_one(assign, count):
    energy = torch.rand(5, count, requires_grad=True)
    weights = assignment(energy, assign)
    torch.testing.assert_close(weights.sum(1), torch.ones(5))
    assert not weights.requires_grad
    if count > 1 and assign != "all":
        assert torch.equal(weights.argmax(1), energy.argmin(1))
        assert weights.max() == pytest.approx(1.0 if assign == "wta" else 0.95)
        assert weights.min() == pytest.approx(0.0 if assign == "wta" else 0.05 / (count - 1))


def test_drift_is_the_drifting_loss_of_the_samples():
    data = batch(b=8)
    policy = several("drift", lambda_prox=0.0, loss_scale=1.0)
    torch.manual_seed(1)
    loss = policy.compute_loss(data)
    y, _ = samples_of(policy, data, 1)
    expected = drifting_loss(
        y.permute(2, 0, 1, 3), data["action"][:, None].permute(2, 0, 1, 3), temperatures=HOT_TEMPERATURES
    )
    assert torch.equal(loss, expected)
    gradients = [torch.autograd.grad(value, list(policy.model.parameters())) for value in (loss, expected)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_drift_keeps_the_probe_and_takes_its_temperatures():
    data = batch(b=8)
    losses = {}
    for name, options in {"drift": {}, "with probe": {"lambda_prox": None}, "cold": {"temperatures": [0.02]}}.items():
        section = {"noise": "gaussian", "samples": G, "assign": "drift"} | {
            k: v for k, v in options.items() if k == "temperatures"
        }
        torch.manual_seed(1)
        policy = make(proposal=section, lambda_prox=options.get("lambda_prox", 0.0))
        torch.manual_seed(1)
        losses[name] = policy.compute_loss(data).item()
    assert losses["with probe"] > losses["drift"] != losses["cold"]


@pytest.mark.parametrize(
    "section, message",
    [
        ({"nois": "gaussian"}, "did you mean 'noise'"),
        ({"completely_else": 1}, "it takes: assign, noise, samples, temperatures"),
        ({"noise": "uniform"}, "zero, gaussian"),
        ({"assign": "best"}, "all, wta, relaxed_wta, drift"),
        ({"noise": "gaussian", "samples": 0}, "samples=0"),
        ({"samples": 4}, "noise='gaussian'"),
        ({"temperatures": [0.0]}, "temperatures"),
        ("wta", "must be a section"),
    ],
)
def test_wrong_proposals_are_named(section, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make(proposal=section)


def test_a_proposal_comes_from_a_configuration():
    section = OmegaConf.create({"noise": "gaussian", "samples": 8, "assign": "wta", "temperatures": [0.5]})
    assert make(proposal=section).options.proposal == Proposal(
        noise="gaussian", samples=8, assign="wta", temperatures=(0.5,)
    )
    cfg = load_config("train_idp_mlp_lowdim")
    assert Proposal.of(cfg.policy.proposal) == Proposal()
    cfg = load_config(
        "train_idp_mlp_lowdim",
        "policy.proposal.noise=gaussian",
        "policy.proposal.samples=8",
        "policy.proposal.assign=drift",
    )
    assert Proposal.of(cfg.policy.proposal).assign == "drift"


# ---------------------------------------------------------------------- weighted positives
def points(b=5, g=4, p=3, s=2, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(b, g, s, generator=gen), torch.randn(b, p, s, generator=gen)


def test_weights_of_one_are_no_weights():
    x, y = points()
    torch.testing.assert_close(drifting_field(x, y, torch.ones(5, 3)), drifting_field(x, y))
    torch.testing.assert_close(drifting_loss(x[None], y[None], torch.ones(1, 5, 3)), drifting_loss(x[None], y[None]))


def test_weight_zero_removes_a_positive():
    """Exactly with the plain kernel; with the softmaxes, whose denominators still see it, up to the length of each
    sample's field.
    """
    x, y = points()
    w = torch.tensor([1.0, 1.0, 0.0]).expand(5, 3)
    torch.testing.assert_close(
        drifting_field(x, y, w, normalise_axes="none"), drifting_field(x, y[:, :2], normalise_axes="none")
    )
    switches = dict(affinity_floor=0.0, drift_norm=False, temperatures=[1.0])
    cosine = torch.nn.functional.cosine_similarity(
        drifting_field(x, y, w, **switches), drifting_field(x, y[:, :2], **switches), dim=-1
    )
    torch.testing.assert_close(cosine, torch.ones_like(cosine), atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="positive_weights"):
        drifting_field(x, y, torch.ones(5, 2))


def test_a_larger_weight_attracts_more():
    x = torch.tensor([[[0.0, 0.1], [0.0, -0.1]]])
    y = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])
    field = drifting_field(x, y, torch.tensor([[3.0, 1.0]]), temperatures=[1.0])
    assert (field[0, :, 0] > 0).all()


def test_uniform_weights_equal_the_batch_as_positives():
    """At a high temperature every neighbour weighs the same."""
    data = batch(b=16)
    losses = []
    for options in ({"positives": "batch"}, {"positives": "weighted", "tau": 1e6}):
        policy = make(NaiveDriftingPolicy, **options)
        torch.manual_seed(0)
        losses.append(policy.compute_loss(data))
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)


def test_weighted_positives_are_the_neighbours_of_the_geometry():
    data = batch(b=16)
    cond = make().generator.encode(data["obs"])
    policy = make(NaiveDriftingPolicy, positives="weighted", tau=0.5)
    positives, weights = policy.positives(cond, data["action"])
    assert positives.shape == (16, 16, H, D)
    torch.testing.assert_close(weights, 16 * neighbor_weights(cond.flatten(1), Geometry(tau=0.5)))
    few = make(NaiveDriftingPolicy, positives="weighted", tau=0.5, topk=3)
    positives, weights = few.positives(cond, data["action"])
    assert positives.shape == (16, 3, H, D)
    torch.testing.assert_close(weights.mean(1), torch.ones(16))
    w = 3 * neighbor_weights(cond.flatten(1), Geometry(tau=0.5, topk=3))
    torch.testing.assert_close(
        (weights[..., None, None] * positives).sum(1), torch.einsum("ij,jhd->ihd", w, data["action"])
    )


# ---------------------------------------------------------------------- the toy
def outcome(name, steps):
    policy = toy.train(toy.METHODS[name], steps, seed=0)
    torch.manual_seed(0)
    return toy.evaluate(policy, count=1000)


@pytest.mark.parametrize("name", ["idp", "naive_drifting"])
def test_one_expert_per_observation_collapses_to_the_mean(name):
    numbers, _, action, _ = outcome(name, 200)
    assert numbers["nfe"] == 1 and numbers["valid"] < 0.01 and numbers["at_mean"] > 0.8
    assert action.mean(0).abs().max() < 0.05


def test_wide_kernels_reach_both_modes():
    """The same objective, from the same noise, with other temperatures."""
    numbers, *_ = outcome("drifting_hot", 300)
    assert numbers["nfe"] == 1 and numbers["valid"] > 0.2 and 0.2 < numbers["plus"] < 0.8


def test_samples_are_measured_against_both_modes():
    class Fixed:
        model = torch.nn.Identity()

        def predict_action(self, obs):
            action = toy.modes(obs["obs"])
            action[1::2] *= -1
            action[:10] = 0
            return {"action_pred": action}

    numbers, obs, action, valid = toy.evaluate(Fixed(), count=100)
    assert numbers == {"nfe": 0, "valid": 0.9, "plus": 0.5, "at_mean": pytest.approx(0.1)}
    assert obs.shape == (100,) and action.shape == (100, 2) and not valid[:10].any() and valid[10:].all()


def test_the_command_writes_a_table_a_figure_and_does_nothing_twice(tmp_path, capsys, monkeypatch):
    arguments = ["--methods", "idp", "naive_drifting", "--steps", "2", "--seeds", "2", "--output", str(tmp_path)]
    toy.main(arguments)
    assert "| IDP | `idp` | 2 |" in capsys.readouterr().out
    data = json.loads((tmp_path / "toy.json").read_text())
    assert [(row["method"], row["nfe"], row["seeds"]) for row in data["rows"]] == [
        ("idp", 1, 2),
        ("idp", 2, 2),
        ("naive_drifting", 1, 2),
    ]
    assert (tmp_path / "toy.png").stat().st_size > 1000 and "2 seeds" in (tmp_path / "README.md").read_text()
    assert len(list((tmp_path / "runs").iterdir())) == 4
    monkeypatch.setattr(toy, "train", lambda *_: pytest.fail("trained again"))
    toy.main(arguments)
    with pytest.raises(pytest.fail.Exception, match="trained again"):  # another number of steps is another run
        toy.main([*arguments, "--steps", "3"])
    with pytest.raises(SystemExit):
        toy.main(["--methods", "idq"])


@pytest.mark.parametrize("name", toy.available())
def test_every_method_of_the_toy_trains_and_acts(name):
    policy = toy.train(toy.METHODS[name], 1, seed=0)
    for nfe in toy.METHODS[name].nfe or (None,):
        numbers, _, action, _ = toy.evaluate(policy, nfe, count=10)
        assert torch.isfinite(action).all() and numbers["nfe"] == (nfe or numbers["nfe"]) >= 1
