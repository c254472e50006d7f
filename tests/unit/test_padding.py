"""Steps that pad the end of an episode: geometry and loss are those of the steps that were recorded."""

import pytest
import torch

from idp_workspace import padding
from idp_workspace.geometry import Samples, compute_excess, conditional_variance, neighbor_weights, reference_variance
from idp_workspace.geometry_variants import ROWS, Geometry
from idp_workspace.policy import IDPPolicy
from tests.unit.test_idp_policy import DO, TO, D, H, make

B, F = 12, 5


@pytest.fixture
def batch():
    """Features, actions, and a mask whose chunks end at different steps; one also lacks its first step."""
    g = torch.Generator().manual_seed(0)
    phi, a = torch.randn(B, F, generator=g), torch.randn(B, H, D, generator=g)
    mask = torch.arange(H) < torch.randint(2, 2 * H, (B, 1), generator=g)
    mask[3, 0] = False
    assert not mask.all() and (mask.sum(dim=0) > 1).all()
    return phi, a, mask


def masked(phi, a, mask, **switches):
    return compute_excess(phi, a, Geometry(**switches), among=Samples(phi, a, mask=mask))


def test_variances_are_those_of_the_samples_that_have_the_step(batch):
    phi, a, mask = batch
    w, numbers = neighbor_weights(phi), mask.float()
    v = padding.conditional_variance(w, a, a, numbers)
    around = padding.conditional_variance(w, a, a, numbers, "weighted_mean")
    v_ref = padding.reference_variance(a, numbers)
    for h in range(H):
        rows = mask[:, h].nonzero().flatten()
        step = a[rows, h : h + 1]
        left = w[rows][:, rows] / w[rows][:, rows].sum(dim=1, keepdim=True)
        torch.testing.assert_close(v[rows, h : h + 1], conditional_variance(left, step), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(v_ref[h], reference_variance(step)[0])
        average = torch.einsum("ij,jhd->ihd", left, step)
        expected = torch.einsum("ij,jhd->ihd", left, step.square()) - average.square()
        torch.testing.assert_close(around[rows, h : h + 1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("switches", [{}, {"center": "weighted_mean"}, {"excess": "absolute"}, {"reference": "none"}])
def test_each_step_is_as_if_the_batch_did_not_hold_the_samples_without_it(batch, switches):
    """With uniform weights, which do not depend on who is in the batch."""
    phi, a, mask = batch
    m = masked(phi, a, mask, weights="uniform", **switches)
    assert (m[~mask] == 0).all() and ((m[mask] > 0).any() or "center" in switches)  # v is v_ref then, and m is 0
    for h in range(H):
        rows = mask[:, h]
        alone = compute_excess(phi[rows], a[rows, h : h + 1], Geometry(weights="uniform", **switches))
        torch.testing.assert_close(m[rows, h : h + 1], alone, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("switches", [{}, {"tau": 0.5, "rel_floor": 0.1}, {"self_neighbor": False}, {"topk": 4}])
def test_a_mask_of_whole_chunks_changes_nothing(batch, switches):
    phi, a, _ = batch
    whole = torch.ones(B, H, dtype=torch.bool)
    torch.testing.assert_close(masked(phi, a, whole, **switches), compute_excess(phi, a, Geometry(**switches)))


def test_a_large_batch_is_masked_in_parts():
    g = torch.Generator().manual_seed(1)
    n = ROWS + 3
    phi, a = torch.randn(n, F, generator=g), torch.randn(n, 4, 2, generator=g)
    mask = torch.arange(4) < torch.randint(1, 5, (n, 1), generator=g)
    m = masked(phi, a, mask)
    assert (m[~mask] == 0).all()
    w = neighbor_weights(phi)[-1:]
    v = padding.conditional_variance(w, a[-1:], a, mask.float())
    v_ref = padding.reference_variance(a, mask.float())
    s, s_ref = ((x + 1e-6).rsqrt() for x in (v, v_ref))
    s, s_ref = (x / x.mean(dim=-1, keepdim=True) for x in (s, s_ref))
    expected = (s / (s_ref + 1e-6) - 1).clamp(min=0)[0]
    torch.testing.assert_close(m[-1][mask[-1]], expected[mask[-1]], rtol=1e-3, atol=1e-4)


def test_a_step_that_one_sample_has_is_not_weighted():
    phi, a = torch.randn(3, F), torch.randn(3, 2, D)
    mask = torch.tensor([[True, True], [True, False], [True, False]])
    for switches in ({}, {"self_neighbor": False}, {"topk": 1}):
        m = masked(phi, a, mask, **switches)
        assert (m[:, 1] == 0).all() and m.isfinite().all()


def loss_and_gradients(policy, cond, a, mask):
    policy.zero_grad()
    torch.manual_seed(3)
    loss = policy.loss(cond, a, mask)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in policy.parameters() if p.grad is not None]


OPTIONS = ({}, {"probe_fraction": 0.25, "lambda_prox": 1.0, "energy_power": 0.25}, {"geometry": False})


@pytest.mark.parametrize("options", [*OPTIONS, {"reference": "ema"}, {"lambda_prox": 0.0}])
def test_what_stands_at_padded_steps_does_not_matter(batch, options):
    _, a, mask = batch
    policy = make(IDPPolicy, **options).train()
    cond = policy.generator.encode(torch.randn(B, TO, DO, generator=torch.Generator().manual_seed(2)))
    first, gradients = loss_and_gradients(policy, cond.detach(), a, mask)
    if options.get("reference") == "ema":
        policy.reference_variance.zero_()
    other = torch.where(mask.unsqueeze(-1), a, 100 * torch.randn_like(a))
    # What the network is given at padded steps is noise around another action: f depends on it, so without a probe.
    if policy.lambda_prox == 0:
        second, others = loss_and_gradients(policy, cond.detach(), other, mask)
        torch.testing.assert_close(second, first)
        torch.testing.assert_close(others, gradients)
    m, m_other = (policy.excess(cond, x, mask=mask) for x in (a, other))
    torch.testing.assert_close(m, m_other, rtol=1e-3, atol=1e-4)


def test_the_loss_is_the_mean_over_recorded_steps(batch):
    _, a, mask = batch
    policy = make(IDPPolicy, lambda_prox=0.0, geometry=False)
    cond = policy.generator.encode(torch.randn(B, TO, DO))
    y = policy.sample(cond, B)
    squares = ((y - a) / policy.options.t_star).square().sum(-1)
    torch.testing.assert_close(policy.loss(cond, a, mask), 0.1 * squares[mask].sum() / mask.sum())
    mask[-1] = False  # a sample without any step
    torch.testing.assert_close(policy.loss(cond, a, mask), policy.loss(cond[:-1], a[:-1], mask[:-1]))


@pytest.mark.parametrize("options", OPTIONS)
def test_a_whole_mask_gives_the_loss_without_one(batch, options):
    _, a, _ = batch
    policy = make(IDPPolicy, **options)
    cond = policy.generator.encode(torch.randn(B, TO, DO)).detach()
    plain, gradients = loss_and_gradients(policy, cond, a, None)
    whole, others = loss_and_gradients(policy, cond, a, torch.ones(B, H, dtype=torch.bool))
    torch.testing.assert_close(whole, plain)
    torch.testing.assert_close(others, gradients, rtol=1e-4, atol=1e-6)


def test_masks_that_do_not_fit_are_refused(batch):
    _, a, mask = batch
    cond = torch.zeros(B, TO, 16)
    with pytest.raises(ValueError, match=r"boolean and of shape \(12, 16\), got torch.float32"):
        make(IDPPolicy).loss(cond, a, mask.float())
    with pytest.raises(ValueError, match=r"got torch.bool \(12, 15\)"):
        make(IDPPolicy).loss(cond, a, mask[:, 1:])
    for switches in ({"granularity": "flat"}, {"matrix": "full"}):
        with pytest.raises(ValueError, match="mixes recorded and padded steps"):
            make(IDPPolicy, **switches).loss(cond, a, mask)
    with pytest.raises(ValueError, match="bank_size=0"):
        make(IDPPolicy, bank_size=8).loss(cond, a, mask)
    with pytest.raises(ValueError, match="use the paper's"):
        make(IDPPolicy, proposal={"samples": 2, "noise": "gaussian"}).loss(cond, a, mask)
