"""The explicit drifting field."""

import pytest
import torch

from idp_workspace.drifting import drifting_field, drifting_loss


def samples(b=6, g=4, p=1, s=3, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(b, g, s, generator=gen), torch.randn(b, p, s, generator=gen)


def naive_field(x, y, temperatures, floor=1e-6):
    """The published recipe for one batch, written with loops, in float64."""
    x, y = x.double(), y.double()
    b, g, s = x.shape
    targets = torch.cat([x, y], 1)
    d = torch.stack(
        [
            torch.stack(
                [
                    torch.stack([(x[i, m] - targets[i, k]).norm().clamp(min=1e-4) for k in range(targets.shape[1])])
                    for m in range(g)
                ]
            )
            for i in range(b)
        ]
    )
    c = d.mean()
    scale = c / s**0.5
    d = d / c
    for m in range(g):
        d[:, m, m] += 100
    total = torch.zeros_like(x)
    for tau in temperatures:
        a = ((-d / tau).softmax(2) * (-d / tau).softmax(1)).clamp(min=floor).sqrt()
        v = torch.zeros_like(x)
        for i in range(b):
            for m in range(g):
                minus, plus = a[i, m, :g], a[i, m, g:]
                v[i, m] = (plus[:, None] * minus.sum() * (y[i] - x[i, m])).sum(0) - (
                    minus[:, None] * plus.sum() * (x[i] - x[i, m])
                ).sum(0)
        v = v / scale
        total += v / v.square().mean().sqrt()
    return total * scale


def test_equals_the_published_recipe():
    x, y = samples(p=2)
    torch.testing.assert_close(
        drifting_field(x, y).double(), naive_field(x, y, (0.02, 0.05, 0.2)), atol=1e-4, rtol=1e-3
    )


@pytest.mark.parametrize("kernel", ["laplace", "gaussian"])
@pytest.mark.parametrize("axes", ["xy", "y", "none"])
def test_proposition_3_1_one_sample_moves_straight_to_its_expert(kernel, axes):
    """With one sample and one positive V is a positive multiple of a* - a, whatever the kernel."""
    x, y = samples(g=1)
    field = drifting_field(
        x, y, kernel=kernel, normalise_axes=axes, self_mask=axes == "xy", drift_norm=False, temperatures=[1.0]
    )
    cosine = torch.nn.functional.cosine_similarity(field.flatten(1), (y - x).flatten(1))
    torch.testing.assert_close(cosine, torch.ones(len(x)))


def test_proposition_3_1_gradient_is_proportional_to_that_of_the_squared_error():
    x, y = samples(g=1)
    x.requires_grad_()
    (drift,) = torch.autograd.grad(drifting_loss(x[None], y[None]), x)
    (mse,) = torch.autograd.grad((x - y).square().sum(), x)
    ratio = drift / mse
    torch.testing.assert_close(ratio, ratio.flatten()[0].expand_as(ratio), rtol=1e-4, atol=0)
    assert ratio.min() > 0


def test_samples_repel_each_other_and_are_attracted_by_the_positive():
    x = torch.tensor([[[0.5, 0.05], [0.5, -0.05]]])
    y = torch.tensor([[[1.0, 0.0]]])
    field = drifting_field(x, y, temperatures=[1.0])[0]
    assert (field[:, 0] > 0).all()
    assert field[0, 1] > 0 > field[1, 1]
    # Without the mask a sample repels itself with the largest weight of all, which cancels: the push apart is weaker.
    unmasked = drifting_field(x, y, temperatures=[1.0], self_mask=False, drift_norm=False)[0]
    masked = drifting_field(x, y, temperatures=[1.0], drift_norm=False)[0]
    assert masked[0, 1] > unmasked[0, 1]


def test_field_is_zero_when_samples_are_the_positives():
    """Equilibrium: as many samples as positives, at the same places."""
    x = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])
    field = drifting_field(x, x, self_mask=False, drift_norm=False)
    assert field.abs().max() < 1e-6


def test_loss_value_is_the_number_of_temperatures_squared_when_fields_agree():
    x, y = samples(g=1)
    assert drifting_loss(x[None], y[None]).item() == pytest.approx(9.0, rel=1e-4)


def test_no_gradient_through_the_field_and_one_through_the_samples():
    x, y = samples()
    x.requires_grad_()
    y.requires_grad_()
    assert not drifting_field(x, y).requires_grad
    drifting_loss(x[None], y[None]).backward()
    assert y.grad is None and x.grad.abs().sum() > 0


def test_problems_on_the_first_axis_do_not_mix():
    x, y = samples(b=8)
    other = 50 * torch.randn_like(x), 50 * torch.randn_like(y)
    alone = drifting_loss(x[None], y[None])
    together = drifting_loss(torch.stack([x, other[0]]), torch.stack([y, other[1]]))
    torch.testing.assert_close(
        2 * together - drifting_loss(other[0][None], other[1][None]), alone, rtol=1e-4, atol=1e-4
    )


def test_scale_of_actions_does_not_matter_to_the_loss():
    x, y = samples()
    torch.testing.assert_close(
        drifting_loss(10 * x[None], 10 * y[None]), drifting_loss(x[None], y[None]), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    "bad", [{"kernel": "rbf"}, {"temperatures": []}, {"temperatures": [0.0]}, {"normalise_axes": "x"}]
)
def test_bad_switches_are_named(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        drifting_field(*samples(), **bad)


def test_identical_samples_stay_finite():
    x = torch.zeros(3, 4, 2)
    assert torch.isfinite(drifting_field(x, torch.zeros(3, 1, 2))).all()
