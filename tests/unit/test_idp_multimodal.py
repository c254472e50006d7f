"""IDP with several modes: closed forms, one network call, both modes, commitment, exports."""

import copy
import math

import pytest
import torch
from torch import nn

from benchmarks import toy
from diffusion_policy.model.common.muon import hidden_matrices
from idp_workspace.geometry import geometry_excess, unit
from idp_workspace.policy import IDPMultimodalPolicy, IDPPolicy
from idp_workspace.policy.idp import potential
from idp_workspace.policy.idp_multimodal import gumbel, responsibilities
from tests.unit.test_idp_policy import DO, NETWORKS, TO, D, H, batch, make, stub_policy

K = 4


def multimodal(network="mlp", seed=0, **options):
    return make(IDPMultimodalPolicy, network, seed, **{"modes": K, "draw": "episode"} | options)


def opened(policy, scale=3.0):
    """The policy with a head that prefers other codes at other observations."""
    for parameter in policy.head.parameters():
        nn.init.normal_(parameter, std=scale)
    return policy.eval()


def observation(b, seed=1):
    return {"obs": torch.rand(b, TO, DO, generator=torch.Generator().manual_seed(seed)) * 2 - 1}


# ---------------------------------------------------------------------- closed forms
def test_responsibilities_in_closed_form():
    r = torch.tensor([[[[0.3, 0.0]], [[0.0, 0.4]]]])  # one sample, two codes, squared distances 0.09 and 0.16
    expected = 1 / (1 + math.exp(-0.07 / (2 * 0.2**2)))
    assert responsibilities(r, 0.2)[0].tolist() == pytest.approx([expected, 1 - expected])
    chunk = torch.zeros(1, 2, 4, 3).index_fill(1, torch.tensor([1]), 0.5)  # means over the chunk, sums over actions
    assert responsibilities(chunk, 1.0)[0, 0].item() == pytest.approx(1 / (1 + math.exp(-0.75 / 2)))
    assert responsibilities(r, 1e-3)[0].tolist() == [1.0, 0.0]  # the winner takes all


def test_a_step_of_the_loss_is_that_of_a_potential_with_wells():
    """The gradient of sum_k q_k |r_k|^2 / (2 w^2) is that of -log sum_k exp(-|r_k|^2 / (2 w^2))."""
    r = torch.randn(5, K, H, D, requires_grad=True)
    d = r.square().sum(-1).mean(-1) / (2 * 0.7**2)
    ours = (responsibilities(r.detach(), 0.7) * d).sum(1).mean()
    theirs = -d.neg().logsumexp(1).mean()
    (a,), (b,) = torch.autograd.grad(ours, r, retain_graph=True), torch.autograd.grad(theirs, r)
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("same_mode", [True, False])
def test_the_loss_is_the_equations_of_the_docstring(same_mode):
    policy, data = multimodal(same_mode=same_mode, mode_width=1.0), batch()
    nn.init.normal_(policy.head.net[-1].weight)
    torch.manual_seed(7)
    found = policy.compute_loss(data)
    torch.manual_seed(7)
    a, phi = data["action"], policy.generator.encode(data["obs"]).flatten(1)
    cond = policy.generator.encode(data["obs"])
    z = policy.generator(cond, a + (1 - 0.9) * torch.randn_like(a), 0.9)
    r = torch.stack([policy.generator(cond, c.expand_as(a), 0.0) - a for c in policy.codes], dim=1)
    q = (-r.square().sum(-1).mean(-1) / 2).softmax(1).detach()
    m = geometry_excess(torch.cat([unit(phi), q], dim=1) if same_mode else phi, a)
    e_y = sum(q[:, k] * potential(r[:, k] / 0.9, m).mean(-1) for k in range(K)).mean()
    choice = -(q * policy.head(phi.detach())).sum(1).mean()
    expected = 0.1 * (e_y + potential((z - a) / (1 - 0.9), m).mean() + choice)
    torch.testing.assert_close(found, expected)
    terms = policy.metrics()
    assert terms["loss/choice"] == pytest.approx(0.1 * choice.item(), rel=1e-4)
    assert 1 <= terms["modes/used"] <= K and 1 <= terms["modes/per_observation"] <= K


@pytest.mark.parametrize("geometry", [True, False])
def test_one_mode_is_idp_to_the_last_bit(geometry):
    data, found = batch(), []
    for kind, options in ((IDPPolicy, {}), (IDPMultimodalPolicy, {"modes": 1})):
        policy = make(kind, geometry=geometry, **options)
        torch.manual_seed(7)
        loss = policy.compute_loss(data)
        found.append((loss, *torch.autograd.grad(loss, list(policy.model.parameters()))))
        found[-1] += (policy.eval().predict_action(observation(3))["action_pred"],)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_neighbours_of_the_same_mode_count_more():
    """Two modes that disagree in the first action, and experts that agree in it within a mode: m sees that."""
    n = 64
    torch.manual_seed(0)
    side = torch.arange(n) % 2
    a = torch.stack([2.0 * side - 1 + 0.02 * torch.randn(n), torch.randn(n)], dim=-1)[:, None]
    phi = torch.randn(n, 3)
    q = nn.functional.one_hot(side, 2).float()
    plain, same = geometry_excess(phi, a), geometry_excess(torch.cat([unit(phi), q], dim=1), a)
    assert same[..., 0].mean() > 2 * plain[..., 0].mean()


# ---------------------------------------------------------------------- acting
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("draw", ["episode", "chunk", "likeliest"])
def test_it_trains_and_acts_with_one_call_of_every_network(network, draw):
    policy = multimodal(network, draw=draw)
    loss = policy.compute_loss(batch(8))
    loss.backward()
    assert all(p.grad is not None for p in policy.head.parameters())
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in policy.model.parameters())
    calls = []
    policy.model.register_forward_hook(lambda *_: calls.append(1))
    policy.eval().reset()
    for count in (3, 3, 1):
        action = policy.predict_action(observation(count))["action_pred"]
        assert action.shape == (count, H, D) and action.isfinite().all()
    assert len(calls) == 3
    policy.nfe = 2
    policy.predict_action(observation(2))
    assert len(calls) == 5


def test_training_calls_the_network_once_for_all_codes():
    policy = multimodal(lambda_prox=1.0, probe_fraction=0.25)
    sizes = []
    policy.model.register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
    policy.compute_loss(batch(32))
    assert sizes == [K * 32 + 8]
    multimodal(lambda_prox=0.0).compute_loss(batch(32)).backward()


def test_the_head_does_not_train_the_encoder():
    policy = multimodal()
    cond = policy.generator.encode(batch()["obs"])
    policy.head(policy.generator.embedding(cond)).sum().backward()
    assert all(p.grad is None for p in policy.obs_encoder.parameters())


def codes_of(policy, obs):
    """Which code acted for each row, found from the network's input."""
    seen = []
    hook = policy.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    policy.predict_action(obs)
    hook.remove()
    return torch.stack([(policy.codes - x).flatten(1).norm(dim=1).argmin() for x in seen[0]])


def test_codes_have_the_probabilities_of_the_head():
    policy = multimodal(draw="chunk").eval()
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    policy.head.net[-1].bias.data.copy_(p.log())
    torch.manual_seed(0)
    found = codes_of(policy, {"obs": torch.zeros(4000, TO, DO)}).bincount(minlength=K) / 4000
    torch.testing.assert_close(found, p, atol=0.03, rtol=0)
    noise = gumbel(torch.randn(100_000, generator=torch.Generator().manual_seed(0)))
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.02) and noise.var().item() == pytest.approx(
        1.645, abs=0.05
    )
    assert gumbel(torch.tensor([-40.0, 40.0])).isfinite().all()


def test_an_episode_keeps_its_code_and_a_new_one_draws_again():
    policy = multimodal().eval()  # all codes are as likely
    obs = {"obs": torch.zeros(64, TO, DO)}
    torch.manual_seed(0)
    policy.reset()
    first = codes_of(policy, obs)
    assert len(first.unique()) == K
    for seed in range(5):  # other observations, as probable codes
        assert torch.equal(codes_of(policy, observation(64, seed)), first)
    policy.reset()
    assert not torch.equal(codes_of(policy, obs), first)


def test_a_code_that_became_improbable_is_left():
    policy = multimodal(modes=2).eval()
    policy.reset()
    torch.manual_seed(0)
    obs = {"obs": torch.zeros(64, TO, DO)}
    first = codes_of(policy, obs)
    policy.head.net[-1].bias.data.copy_(torch.tensor([0.0, 12.0]))
    assert (codes_of(policy, obs) == 1).all()  # the observation shows the other mode
    policy.head.net[-1].bias.data.zero_()
    assert torch.equal(codes_of(policy, obs), first)


def test_without_a_reset_and_with_draw_chunk_each_chunk_draws():
    for policy in (multimodal().eval(), multimodal(draw="chunk").eval()):
        if policy.options.draw == "chunk":
            policy.reset()
        torch.manual_seed(0)
        draws = [codes_of(policy, {"obs": torch.zeros(64, TO, DO)}) for _ in range(2)]
        assert not torch.equal(*draws)


def test_the_likeliest_code_needs_no_chance():
    policy = opened(multimodal(draw="likeliest"))
    state = torch.get_rng_state()
    results = [policy.predict_action(observation(16))["action_pred"] for _ in range(2)]
    assert torch.equal(*results) and torch.equal(state, torch.get_rng_state())


def test_rows_are_independent_episodes():
    policy = opened(multimodal())
    obs = observation(8)
    results = []
    for rows in (slice(None), slice(0, 8)):
        torch.manual_seed(3)
        policy.reset()
        policy.predict_action(obs)
        results.append(policy.predict_action({"obs": obs["obs"][rows]})["action_pred"])
    other = obs["obs"].clone()
    other[1:] = -other[1:]
    changed = policy.predict_action({"obs": other})["action_pred"]
    assert torch.equal(*results)
    torch.testing.assert_close(changed[0], results[0][0])  # the other rows see something else, the first does not
    policy.predict_action(observation(3))  # another number of rows: they are new episodes


def test_seeds_state_dict_and_copies():
    policy = opened(multimodal())
    other = opened(multimodal(seed=5), scale=1.0)
    other.load_state_dict(policy.state_dict())
    results = []
    for each in (policy, other, copy.deepcopy(policy)):
        torch.manual_seed(11)
        each.reset()
        results.append(torch.stack([each.predict_action(observation(8, s))["action_pred"] for s in range(3)]))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert {"codes", "head.net.0.weight"} <= set(policy.state_dict())
    assert torch.equal(policy.codes[0], torch.zeros(H, D)) and torch.equal(policy.codes, other.codes)


def test_every_optimiser_trains_the_head():
    policy = multimodal()
    trained = {id(p) for group in policy.get_optimizer(1e-3).param_groups for p in group["params"]}
    assert {id(p) for p in policy.head.parameters()} <= trained
    assert not [name for name in hidden_matrices(policy) if name.startswith("head")]


@pytest.mark.parametrize(
    "options, error",
    [
        ({"modes": 0}, "modes=0"),
        ({"mode_width": 0.0}, "mode_width=0.0"),
        ({"draw": "always"}, "draw='always' is not one of chunk, episode, likeliest"),
        ({"bank_size": 8}, "bank_size=8"),
        ({"proposal": {"noise": "gaussian"}}, "objective=idp"),
    ],
)
def test_wrong_options_name_the_value_and_the_fix(options, error):
    with pytest.raises(ValueError, match=error):
        stub_policy(lambda x, t: x, IDPMultimodalPolicy, **options)


# ---------------------------------------------------------------------- two modes
def test_both_modes_of_the_toy_in_one_call():
    policy = toy.train(
        toy.Method("", "", "IDPMultimodalPolicy", {"modes": 2, "lambda_prox": 0.0, "draw": "episode"}), 400, seed=5
    )
    torch.manual_seed(0)
    numbers, *_ = toy.evaluate(policy, count=1000)
    assert numbers["nfe"] == 1 and numbers["valid"] > 0.85 and 0.4 < numbers["plus"] < 0.6
    policy.reset()  # an episode keeps its side while the observation changes
    sides = []
    for o in (-0.8, -0.3, 0.2, 0.7):
        action = policy.predict_action({"obs": torch.full((200, 1, 1), o)})["action_pred"][:, 0, 0]
        sides.append(action > 0)
    kept = torch.stack(sides).float().mean(0)
    assert ((kept == 0) | (kept == 1)).float().mean() > 0.9
