"""f(x, s, t): one network as a function of one time or of two."""

import pytest
import torch
from torch import nn

from diffusion_policy.model.diffusion.positional_embedding import SinusoidalPosEmb
from idp_workspace import policy as policies
from idp_workspace.policy import IDPPolicy
from tests.unit.test_idp_policy import NETWORKS, SIZES, D, H, batch, make


def generator_and_inputs(network, b=3):
    """A generator in float64 whose output depends on everything, with cond, x, s, t."""
    policy = make(IDPPolicy, network).double().eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(0.2 * torch.randn_like(p))  # small initial weights would hide the times
    cond = policy.generator.encode(batch(b)["obs"].double())
    return policy.generator, cond, torch.randn(b, H, D).double(), torch.rand(b).double(), torch.rand(b).double()


@pytest.mark.parametrize("network", NETWORKS)
def test_equal_times_are_one_time_and_different_times_are_not(network):
    f, cond, x, s, t = generator_and_inputs(network)
    assert torch.equal(f(cond, x, t, s=t), f(cond, x, t))
    assert torch.equal(f(cond, x, 0.3, s=0.3), f(cond, x, 0.3))
    assert (f(cond, x, t, s=s) - f(cond, x, t)).abs().max() > 1e-3  # s matters
    assert (f(cond, x, t, s=s) - f(cond, x, s)).abs().max() > 1e-3  # t matters
    assert (f(cond, x, t, s=s) - f(cond, x, s, s=t)).abs().max() > 1e-3  # and their order


def test_even_frequencies_of_the_embedding_see_the_end_and_odd_ones_the_start():
    embed, s, t = SinusoidalPosEmb(8), torch.tensor([0.3]), torch.tensor([0.8])
    both = embed(torch.stack([s, t], dim=-1))
    assert torch.equal(both[:, 0::2], embed(t)[:, 0::2]) and torch.equal(both[:, 1::2], embed(s)[:, 1::2])


@pytest.mark.parametrize("network", NETWORKS)
def test_the_second_time_has_no_parameters(network):
    policy = make(IDPPolicy, network)
    before = list(policy.state_dict())
    cond = policy.generator.encode(batch(2)["obs"])
    policy.generator(cond, torch.zeros(2, H, D), 0.5, s=0.1)
    assert list(policy.state_dict()) == before


@pytest.mark.parametrize("network", NETWORKS)
def test_forward_mode_derivative_in_action_and_times(network):
    """jvp along (dx, ds, dt) against central differences, one direction at a time and all together."""
    f, cond, x, s, t = generator_and_inputs(network)
    function = lambda x, s, t: f(cond, x, t, s=s)
    dx, one, zero = torch.randn_like(x), torch.ones_like(t), torch.zeros_like(t)
    for tangents in ((dx, zero, zero), (0 * x, one, zero), (0 * x, zero, one), (dx, -one, 2 * one)):
        value, derivative = torch.func.jvp(function, (x, s, t), tangents)
        step = 1e-5
        ahead, behind = (function(*(p + sign * step * d for p, d in zip((x, s, t), tangents))) for sign in (1, -1))
        numeric = (ahead - behind) / (2 * step)
        assert torch.allclose(value, function(x, s, t))
        assert numeric.abs().max() > 1e-4
        assert torch.allclose(derivative, numeric, rtol=1e-5, atol=1e-5 * numeric.abs().max().item())


class UpstreamsNetwork(nn.Module):
    """Takes any keyword and ignores it, as the networks in upstream's tree do."""

    def forward(self, sample, timestep, local_cond=None, global_cond=None, **kwargs):
        return sample


@pytest.mark.parametrize(
    "objective", ["ConsistencyPolicy", "ConsistencyTrainingPolicy", "EDMTeacherPolicy", "MeanFlowPolicy", "OFPPolicy"]
)
def test_an_objective_of_two_times_refuses_a_network_that_ignores_the_second(objective):
    with pytest.raises(ValueError, match="UpstreamsNetwork would ignore the second"):
        getattr(policies, objective)(**SIZES, model=UpstreamsNetwork(), obs_as_global_cond=True)


def test_one_time_is_enough_for_the_others():
    policy = IDPPolicy(**SIZES, model=UpstreamsNetwork(), obs_as_global_cond=True)
    cond, action = torch.zeros(2, 2, 6), torch.ones(2, H, D)
    assert torch.equal(policy.generator(cond, action, 0.5), action)
    with pytest.raises(ValueError, match="would ignore the second"):
        policy.generator(cond, action, 0.5, s=0.1)
