"""The mathematics of the conditional expert geometry."""

import itertools
import math

import hydra
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common import peak_bytes
from idp_workspace import geometry, geometry_variants
from idp_workspace.geometry import Samples, compute_excess, conditional_variance, geometry_excess, reference_variance
from idp_workspace.geometry_variants import Geometry, effective_neighbors, reference_covariance
from tests.util import load_config, unit_normalizer


def neighbor_weights(features, **switches):
    return geometry_variants.neighbor_weights(features, Geometry(**switches))


def batch(b=64, f=12, h=4, d=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(b, f, generator=g), torch.rand(b, h, d, generator=g) * 2 - 1


def two_clusters(b=128, h=2, seed=0):
    """Dimension 0 is wide overall and tight within each of two clusters of observations; dimension 1 is noise."""
    g = torch.Generator().manual_seed(seed)
    side = torch.arange(b) % 2 * 2.0 - 1
    features = torch.stack([side, -side, torch.ones(b)], 1) + 0.01 * torch.randn(b, 3, generator=g)
    tight = side[:, None] + 0.05 * torch.randn(b, h, generator=g)
    noise = torch.randn(b, h, generator=g)
    return features, torch.stack([tight, noise], -1)


def by_definition(features, actions, eps=1e-6):
    """m computed entry by entry from the paper's formulas, in float64."""
    phi, a = features.double(), actions.double()
    h = phi / (phi.norm(dim=1, keepdim=True) + eps)
    s = h @ h.T
    z = (s - s.mean(1, keepdim=True)) / (s.std(1, correction=0, keepdim=True) + eps)
    w = z.softmax(1)
    v = (w[:, :, None, None] * (a[None] - a[:, None]) ** 2).sum(1)
    v_ref = a.var(0, correction=0)
    p, p_ref = (v + eps) ** -0.5, (v_ref + eps) ** -0.5
    s_cond, s_ref = p / p.mean(-1, keepdim=True), p_ref / p_ref.mean(-1, keepdim=True)
    return (s_cond / (s_ref + eps) - 1).relu()


def test_equals_the_paper_s_formulas():
    features, actions = batch()
    torch.testing.assert_close(
        geometry_excess(features, actions).double(), by_definition(features, actions), atol=2e-5, rtol=2e-4
    )


def test_moments_equal_pairwise_differences_even_far_from_zero():
    features, actions = batch()
    w = neighbor_weights(features)
    shifted = actions + 100.0  # float32 squares of 100 would drown a variance of 0.3 without centring
    pairwise = (w[:, :, None, None].double() * (actions[None] - actions[:, None]).double() ** 2).sum(1)
    torch.testing.assert_close(conditional_variance(w, shifted).double(), pairwise, atol=1e-4, rtol=1e-3)


def test_weights_are_a_distribution_and_favour_similar_observations():
    features, _ = two_clusters()
    w = neighbor_weights(features)
    torch.testing.assert_close(w.sum(1), torch.ones(len(w)))
    same = torch.arange(len(w))[:, None] % 2 == torch.arange(len(w))[None] % 2
    assert w[same].mean() > 3 * w[~same].mean()


def test_tight_within_clusters_gets_the_largest_m():
    m = geometry_excess(*two_clusters())
    assert m[..., 0].mean() > 0.2
    assert m[..., 0].mean() > 10 * m[..., 1].mean()


@pytest.mark.parametrize("granularity", ["per_step", "flat", "dim"])
def test_granularities_find_the_tight_dimension(granularity):
    m = geometry_excess(*two_clusters(), granularity=granularity)
    assert m.shape == (128, 2, 2)
    assert m[..., 0].mean() > 5 * m[..., 1].mean()
    if granularity == "dim":
        assert torch.equal(m[:, 0], m[:, 1])


def test_self_inclusion_and_exclusion_agree():
    """w_ii scales all of v_cond,i alike, and the normalisation over coordinates removes a common scale."""
    features, actions = batch(b=256)
    include = geometry_excess(features, actions)
    exclude = geometry_excess(features, actions, self_neighbor=False)
    torch.testing.assert_close(include, exclude, atol=5e-5, rtol=0)
    assert neighbor_weights(features, self_neighbor=False).diagonal().max() == 0


def test_no_neighbourhood_no_excess():
    features, actions = batch(b=1)
    assert torch.equal(geometry_excess(features, actions), torch.zeros_like(actions))
    assert geometry_excess(features, actions, matrix="full").shape == (1, 4, 3, 3)


def test_uniform_neighbours_around_their_own_mean_have_no_excess():
    """Then v_cond is v_ref, which is what 'no information from the observation' should mean."""
    features, actions = batch()
    assert geometry_excess(features, actions, weights="uniform", center="weighted_mean").max() < 1e-4
    assert (
        geometry_excess(features, actions, weights="uniform").max() > 0.05
    )  # expert-centred: distance from the mean remains


def test_no_gradient_flows():
    features, actions = batch()
    features.requires_grad_()
    actions.requires_grad_()
    for matrix in ("diag", "full"):
        m = geometry_excess(features, actions, matrix=matrix)
        assert not m.requires_grad and m.grad_fn is None


@given(st.integers(2, 40), st.integers(1, 5), st.integers(1, 6), st.integers(0, 10_000))
@settings(max_examples=60)
def test_m_is_finite_and_not_negative(b, h, d, seed):
    features, actions = batch(b, 7, h, d, seed)
    if seed % 3 == 0:
        actions[..., 0] = 0.25  # a constant dimension
    if seed % 4 == 0:
        features[:] = features[0]  # observations that cannot be told apart
    for switches in (
        {},
        {"granularity": "flat"},
        {"center": "weighted_mean"},
        {"tau": 0.1, "rel_floor": 0.01, "m_clip": 10.0},
        {"topk": 2, "rel_floor": 0.01},
        {"reference": "none"},
        {"excess": "absolute"},
    ):
        m = geometry_excess(features, actions, **switches)
        assert m.shape == actions.shape and torch.isfinite(m).all() and (m >= 0).all()
        assert m.max() <= switches.get("m_clip", float("inf"))


# ---------------------------------------------------------------------- degenerate batches
def same(x):
    return x[:1].expand_as(x).clone()


def only_one_coordinate(a):
    out = torch.full_like(a, 0.5)
    out[:, :1, :1] = a[:, :1, :1]
    return out


def first_dimension(a, scale):
    return torch.cat([a[..., :1] * scale, a[..., 1:]], -1)


def first_sample(x, scale):
    return torch.cat([x[:1] * scale, x[1:]])


#: What is done to features and actions.
DEGENERATE = {
    "ordinary": lambda f, a: (f, a),
    "constant actions": lambda f, a: (f, torch.full_like(a, 0.5)),
    "identical observations": lambda f, a: (same(f), a),
    "zero features": lambda f, a: (0 * f, a),
    "one repeated sample": lambda f, a: (same(f), same(a)),
    "one repeated action": lambda f, a: (f, same(a)),
    "a single varying coordinate": lambda f, a: (f, only_one_coordinate(a)),
    "two samples, repeated": lambda f, a: (f[torch.arange(len(f)) % 2 % len(f)], a[torch.arange(len(a)) % 2 % len(a)]),
    "far from zero": lambda f, a: (f + 1e8, a + 1e8),
    "half": lambda f, a: (f.half(), a.half()),
    "half, constant dimension": lambda f, a: (f.half(), first_dimension(a, 0).half()),
    "half, smallest numbers": lambda f, a: (f.half() * 1e-7, a.half() * 1e-7),
    "bfloat16": lambda f, a: (f.bfloat16(), a.bfloat16()),
    "double": lambda f, a: (f.double(), a.double()),
    **{
        f"{what} times {scale:g}": change
        for scale in (1e6, 1e-20, 1e-44)
        for what, change in {
            "actions": lambda f, a, scale=scale: (f, a * scale),
            "features": lambda f, a, scale=scale: (f * scale, a),
            "one action dimension": lambda f, a, scale=scale: (f, first_dimension(a, scale)),
            "one sample": lambda f, a, scale=scale: (first_sample(f, scale), first_sample(a, scale)),
        }.items()
    },
}
WORDS = {
    "granularity": ["per_step", "flat", "dim"],
    "self_neighbor": [True, False],
    "tau": [1.0, 1e-3],
    "topk": [None, 1, 3],
    "center": ["expert", "weighted_mean"],
    "reference": ["batch", "dataset", "none"],
    "excess": ["relative", "absolute"],
    "weights": ["softmax", "uniform", "shuffled"],
    "matrix": ["diag", "full"],
    "rel_floor": [0.0, 0.01],
    "m_clip": [None, 10.0],
}
COMBINATIONS = [
    switches
    for values in itertools.product(*WORDS.values())
    for switches in [dict(zip(WORDS, values))]
    if switches["matrix"] == "diag" or (switches["granularity"], switches["excess"]) == ("per_step", "relative")
]


def is_an_excess(m, actions, switches):
    full = switches["matrix"] == "full"
    assert m.shape == actions.shape + actions.shape[2:] * full and m.dtype == actions.dtype
    assert torch.isfinite(m).all() and not m.requires_grad and m.grad_fn is None
    rounding = 1e-5 + 4 * torch.finfo(m.dtype).eps if full else 0  # of the entries of M
    values = torch.linalg.eigvalsh(m.double()) if full else m
    assert values.min() >= -rounding * m.double().abs().max()
    assert values.max() <= (1 + rounding) * (switches["m_clip"] or torch.inf)


@pytest.mark.parametrize("kind", DEGENERATE)
def test_degenerate_batches_have_a_finite_m(kind):
    """Every 61st combination of all switches, other ones for each batch size."""
    for start, b in enumerate((1, 2, 16)):
        features, actions = DEGENERATE[kind](*batch(b))
        assert torch.isfinite(features).all() and torch.isfinite(actions).all()
        for switches in COMBINATIONS[start::61]:
            v_ref = torch.full(actions.shape[1:], [0.0, 0.3, 1e12][start])
            is_an_excess(
                geometry_excess(features.requires_grad_(), actions, v_ref=v_ref, **switches), actions, switches
            )


@pytest.mark.parametrize("kind", ["constant actions", "one repeated sample", "one repeated action"])
def test_where_nothing_varies_there_is_no_excess(kind):
    m = geometry_excess(*DEGENERATE[kind](*batch()))
    assert m.max() < 1e-4


@pytest.mark.parametrize("scale", [1e3, 1e6])
def test_large_features_keep_their_neighbours_and_large_actions_their_m(scale):
    features, actions = batch()
    torch.testing.assert_close(neighbor_weights(features * scale), neighbor_weights(features), atol=1e-6, rtol=1e-4)
    for switches in ({}, {"granularity": "flat"}, {"reference": "none"}):
        torch.testing.assert_close(
            geometry_excess(features, actions * scale, **switches),
            geometry_excess(features, actions, **switches),
            atol=1e-4,
            rtol=1e-3,
        )


def test_the_variants_with_the_paper_s_switches_are_the_paper_s_to_the_last_bit():
    features, actions = batch()
    assert torch.equal(geometry_variants.excess(features, actions, Geometry()), geometry_excess(features, actions))


def test_full_matrix_of_large_actions_is_bounded_by_the_floor():
    """Three neighbours in three dimensions span two: in the third there are rounding errors and the floor."""
    features, actions = batch(b=200)
    m = geometry_excess(features, 50 * actions, matrix="full", topk=3, center="weighted_mean")
    largest = torch.linalg.eigvalsh(reference_covariance(50 * actions)).max()
    assert torch.linalg.eigvalsh(m.double()).max() < 6.01 * largest / 1e-6


@pytest.mark.parametrize("matrix", ["diag", "full"])
def test_what_is_not_finite_is_not_hidden(matrix):
    for where in (0, 1):
        data = batch()
        data[where][3] = torch.nan
        assert geometry_excess(*data, matrix=matrix).isnan().any()


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"matrix": "full"},
        {"granularity": "flat", "center": "weighted_mean"},
        {"granularity": "dim", "reference": "ema"},
        {"reference": "dataset", "topk": 1},
        {"excess": "absolute", "self_neighbor": False, "tau": 0.01},
    ],
)
def test_the_loss_and_its_gradient_are_finite_on_degenerate_batches(switches):
    cfg = load_config(
        "train_idp_mlp_lowdim", "preset=debug", *(f"policy.{key}={value}" for key, value in switches.items())
    )
    torch.manual_seed(0)
    policy = hydra.utils.instantiate(cfg.policy)
    policy.set_normalizer(unit_normalizer(5, 2))
    for kind in (
        "ordinary",
        "constant actions",
        "identical observations",
        "zero features",
        "one repeated sample",
        "one repeated action",
        "a single varying coordinate",
        "two samples, repeated",
        "actions times 1e-20",
        "actions times 1e+06",
        "features times 1e+06",
    ):
        for b in (1, 2, 16):
            obs, actions = DEGENERATE[kind](*batch(b, f=5 * policy.horizon, h=policy.horizon, d=2))
            policy.zero_grad()
            loss = policy.compute_loss({"obs": obs.view(b, policy.horizon, 5), "action": actions})
            loss.backward()
            assert torch.isfinite(loss), (kind, b)
            assert all(torch.isfinite(p.grad).all() for p in policy.parameters() if p.grad is not None), (kind, b)
            assert all(math.isfinite(value) for value in policy.metrics().values()), (kind, b)


# ---------------------------------------------------------------------- large batches, and neighbours elsewhere
@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"granularity": "flat", "center": "weighted_mean"},
        {"self_neighbor": False, "topk": 7, "rel_floor": 0.01},
        {"weights": "uniform", "granularity": "dim"},
        {"matrix": "full"},
        {"matrix": "full", "center": "weighted_mean", "self_neighbor": False},
    ],
)
def test_a_large_batch_in_parts_has_the_same_m(switches, monkeypatch):
    features, actions = batch(b=50)
    whole = geometry_excess(features, actions, **switches)
    monkeypatch.setattr(geometry_variants, "ROWS", 16)  # parts of 16, 16, 16 and 2
    torch.testing.assert_close(geometry_excess(features, actions, **switches), whole, atol=1e-4, rtol=1e-3)
    g = Geometry(**switches)
    for first in (0, 30):  # some rows of a batch, such as those of one process
        rows = slice(first, first + 20)
        part = compute_excess(features[rows], actions[rows], g, among=Samples(features, actions, first))
        torch.testing.assert_close(part, whole[rows], atol=1e-4, rtol=1e-3)


def test_one_part_is_the_whole_to_the_last_bit():
    """The batch of the paper, 1024, is computed in one part by the formulas of one batch."""
    features, actions = batch(b=1024, f=8, h=2)
    assert torch.equal(geometry_excess(features, actions), geometry.excess(features, actions))


def test_the_memory_of_a_large_batch_grows_with_b_and_not_with_its_square(monkeypatch):
    monkeypatch.setattr(geometry_variants, "ROWS", 64)
    peaks = []
    for b in (512, 1024, 2048):
        data = batch(b, f=4, h=1, d=2)
        peaks.append(peak_bytes(lambda data=data: geometry_excess(*data)))
    assert peaks[2] < 2.1 * peaks[1] < 4.4 * peaks[0]


def test_logging_a_large_batch_takes_no_more_memory_than_its_m(monkeypatch):
    monkeypatch.setattr(geometry_variants, "ROWS", 64)
    features, actions = batch(1024, f=4, h=1, d=2)
    m = geometry_excess(features, actions)
    used = peak_bytes(lambda: geometry_variants.statistics(features, m, Geometry()))
    assert used < 4 * 64 * 1024 * 4


def test_shuffled_weights_of_a_part_are_those_of_other_samples(monkeypatch):
    features, actions = two_clusters()
    monkeypatch.setattr(geometry_variants, "ROWS", 32)
    torch.manual_seed(0)
    shuffled = geometry_excess(features, actions, weights="shuffled")[..., 0].mean()
    assert shuffled < 0.5 * geometry_excess(features, actions)[..., 0].mean()


# ---------------------------------------------------------------------- invariances and switches
def test_m_does_not_depend_on_the_scale_of_actions_or_features():
    features, actions = batch()
    m = geometry_excess(features, actions)
    torch.testing.assert_close(geometry_excess(3 * features, actions), m, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(geometry_excess(features, 3 * actions + 1), m, atol=1e-4, rtol=1e-3)


def test_topk_keeps_k_neighbours_and_sharper_tau_fewer_effective_ones():
    features, _ = batch(b=50)
    assert ((neighbor_weights(features, topk=5) > 0).sum(1) == 5).all()
    ess = [effective_neighbors(neighbor_weights(features, tau=tau)).mean() for tau in (2.0, 1.0, 0.3)]
    assert 50 >= ess[0] > ess[1] > ess[2] >= 1
    torch.testing.assert_close(
        effective_neighbors(neighbor_weights(features, weights="uniform")), torch.full((50,), 50.0)
    )


def test_shuffled_weights_keep_their_spectrum_and_lose_their_meaning():
    features, actions = two_clusters()
    torch.manual_seed(0)
    shuffled = neighbor_weights(features, weights="shuffled")
    torch.testing.assert_close(
        shuffled.sort(1).values.sort(0).values,
        neighbor_weights(features).sort(1).values.sort(0).values,
        atol=1e-5,
        rtol=1e-3,
    )
    assert (
        geometry_excess(features, actions, weights="shuffled")[..., 0].mean()
        < 0.5 * geometry_excess(features, actions)[..., 0].mean()
    )


def test_reference_from_elsewhere():
    features, actions = batch()
    same = geometry_excess(features, actions, reference="dataset", v_ref=reference_variance(actions))
    assert torch.equal(same, geometry_excess(features, actions))
    none = geometry_excess(features, actions, reference="none")
    s = (conditional_variance(neighbor_weights(features), actions) + 1e-6).rsqrt()
    torch.testing.assert_close(none, (s / s.mean(-1, keepdim=True) - 1).relu(), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="v_ref"):
        geometry_excess(features, actions, reference="ema")


def test_absolute_excess():
    features, actions = batch()
    eps = 1e-6
    s = (conditional_variance(neighbor_weights(features), actions) + eps).rsqrt()
    r = (reference_variance(actions) + eps).rsqrt()
    expected = (s / s.mean(-1, keepdim=True) - r / r.mean(-1, keepdim=True)).relu()
    torch.testing.assert_close(geometry_excess(features, actions, excess="absolute"), expected, atol=1e-6, rtol=1e-5)


def test_full_matrix_reduces_to_the_diagonal_ratio_when_covariances_are_diagonal():
    """With one action dimension every covariance is diagonal: M = relu(v_ref / v_cond - 1)."""
    features, actions = batch(d=1)
    full = geometry_excess(features, actions, matrix="full")[..., 0, 0]
    v = conditional_variance(neighbor_weights(features), actions)[..., 0]
    expected = ((reference_variance(actions)[..., 0] + 1e-6) / (v + 1e-6) - 1).relu()
    torch.testing.assert_close(full, expected, atol=1e-4, rtol=1e-3)


def test_full_matrix_by_definition():
    features, actions = batch(b=20, h=2, d=3)
    m = geometry_excess(features, actions, matrix="full").double()
    a = actions.double()
    w = neighbor_weights(features).double()
    eye = 1e-6 * torch.eye(3, dtype=torch.float64)
    i, h = 7, 1
    diff = a[:, h] - a[i, h]
    g = (w[i][:, None, None] * diff[:, :, None] * diff[:, None, :]).sum(0)
    centred = a[:, h] - a[:, h].mean(0)
    sigma = centred.T @ centred / 20
    values, vectors = torch.linalg.eigh(sigma + eye)
    root = vectors @ values.sqrt().diag() @ vectors.T
    r = root @ torch.linalg.inv(g + eye) @ root
    values, vectors = torch.linalg.eigh(r)
    torch.testing.assert_close(m[i, h], vectors @ (values - 1).clamp(min=0).diag() @ vectors.T, atol=1e-5, rtol=1e-4)


def test_full_matrix_is_symmetric_positive_and_sees_tilted_directions():
    """Experts agree along (1, 1) and not along (1, -1): no single coordinate shows it, the matrix does."""
    g = torch.Generator().manual_seed(0)
    side = torch.arange(200) % 2 * 2.0 - 1
    features = torch.stack([side, -side], 1) + 0.01 * torch.randn(200, 2, generator=g)
    along = side + 0.05 * torch.randn(200, generator=g)
    across = torch.randn(200, generator=g)
    actions = torch.stack([along + across, along - across], -1)[:, None] / 2
    m = geometry_excess(features, actions, matrix="full")[:, 0]
    torch.testing.assert_close(m, m.mT)
    assert torch.linalg.eigvalsh(m).min() > -1e-4
    tilted = torch.tensor([1.0, 1.0]) / 2**0.5
    other = torch.tensor([1.0, -1.0]) / 2**0.5
    assert (m @ tilted @ tilted).mean() > 5 * (m @ other @ other).mean()


@pytest.mark.parametrize(
    "bad",
    [
        {"granularity": "step"},
        {"tau": 0.0},
        {"topk": 0},
        {"weights": "softmx"},
        {"matrix": "full", "granularity": "flat"},
        {"m_clip": -1.0},
        {"rel_floor": -0.1},
        {"matrix": "full", "excess": "absolute"},
    ],
)
def test_bad_switches_are_named(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        geometry_excess(*batch(), **bad)


def test_bad_shapes_are_named():
    features, actions = batch()
    with pytest.raises(ValueError, match="features"):
        geometry_excess(features[:5], actions)


def test_half_precision_inputs_are_computed_in_single():
    features, actions = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        m = geometry_excess(features, actions)
    assert torch.equal(m, geometry_excess(features, actions))
