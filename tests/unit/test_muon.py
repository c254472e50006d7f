"""Muon with AdamW as one optimiser."""

import copy

import pytest
import torch
from torch import nn

from diffusion_policy.model.common.muon import Muon, hidden_matrices, orthogonal
from diffusion_policy.model.diffusion.conditional_unet1d import ConditionalUnet1D
from diffusion_policy.model.mip.networks import ChiTransformer, ChiUnet, ResidualMLP, StateEncoder


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16), nn.Linear(16, 2))


def groups(net):
    hidden = [net[2].weight, net[4].weight]
    rest = [p for p in net.parameters() if not any(p is h for h in hidden)]
    return [{"params": hidden, "muon": True}, {"params": rest}]


def train(net, optimizers, steps, start=0):
    for step in range(start, start + steps):
        x = torch.randn(32, 6, generator=torch.Generator().manual_seed(step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        (net(x) - x[:, :2].sin()).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def test_it_is_torchs_muon_beside_adamw():
    ours, theirs = network(), network()
    hidden, rest = (group["params"] for group in groups(theirs))
    one = [Muon(groups(ours), lr=1e-3, muon_lr=0.02, weight_decay=0.1)]
    two = [torch.optim.Muon(hidden, lr=0.02, weight_decay=0.1), torch.optim.AdamW(rest, lr=1e-3, weight_decay=0.1)]
    torch.manual_seed(1)
    for _ in range(4):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimizer in (*one, *two):
            optimizer.step()
    start = dict(network().named_parameters())
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        # torch iterates in bfloat16, which has three digits
        assert (a - b).norm() < 0.02 * (b - start[name]).norm(), name


def test_singular_values_become_nearly_one():
    x = torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(x, 5))
    assert values.min() > 0.5 and values.max() < 1.3
    together = orthogonal(x, 5)
    torch.testing.assert_close(together[1], orthogonal(x[1:2], 5)[0])


def test_a_resumed_run_is_equal_to_the_bit():
    whole = network()
    train(whole, [Muon(groups(whole))], 6)
    half = network()
    optimizer = Muon(groups(half))
    train(half, [optimizer], 3)
    state, rest = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(half)
    optimizer = Muon(groups(rest))
    optimizer.load_state_dict(state)
    train(rest, [optimizer], 3, start=3)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), rest.parameters(), strict=True))


@pytest.mark.parametrize(
    "net, edges",
    [
        (ResidualMLP(2, 2, 4, n_layer=1, n_emb=8), {"net.0.weight", "net.5.weight"}),
        (ChiTransformer(2, 2, 4, n_layer=1, n_head=2, n_emb=8), {"input_emb", "cond_obs_emb", "head"}),
        (ChiUnet(2, global_cond_dim=8, down_dims=(8, 16)), {"final_conv.1", "residual_conv", "blocks.0"}),
        (ConditionalUnet1D(2, global_cond_dim=8, down_dims=(8, 16)), {"final_conv.1", "residual_conv", "blocks.0"}),
        (StateEncoder(5), {"mlp.0.weight"}),
    ],
)
def test_layers_that_read_data_or_write_actions_are_left_to_adamw(net, edges):
    hidden = hidden_matrices(net)
    others = {name for name, p in net.named_parameters() if p.ndim > 1} - hidden
    assert hidden and all(any(edge in name for name in others) for edge in edges)
    assert not any(word in name for name in hidden for word in ("bias", "norm", "pos_emb", "ln_f"))
    muon, adamw = Muon.parameter_groups(net)
    assert len(muon["params"]) == len(hidden)
    assert len(muon["params"]) + len(adamw["params"]) == len(list(net.parameters()))
