"""Reference values for MIP: losses and samplers with stub networks, time embedding, schedule, windows, parameter
counts.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

from diffusion_policy.common.sampler import create_indices
from diffusion_policy.model.common.lr_scheduler import get_scheduler
from diffusion_policy.model.diffusion.mip_networks import (
    ChiTransformer,
    ChiUnet,
    ResidualMLP,
    StateEncoder,
    TwoTimeEmbedding,
)
from idp_workspace.policy import (
    FlowMatchingPolicy,
    MIPPolicy,
    RegressionPolicy,
    StraightFlowPolicy,
    TSDPolicy,
)
from tests import golden
from tests.unit.test_idp_policy import batch, stub_policy

MIP = golden.read("mip")
POLICIES = {
    "regression": RegressionPolicy,
    "mip": MIPPolicy,
    "flow": FlowMatchingPolicy,
    "tsd": TSDPolicy,
    "straight_flow": StraightFlowPolicy,
}
STUBS = {"zero": lambda x, t: 0 * x, "input": lambda x, t: x, "half": lambda x, t: 0 * x + 0.5}


def act(policy) -> float:
    """The single value that a stub policy predicts everywhere."""
    values = policy.predict_action({"obs": batch(4)["obs"]})["action_pred"]
    assert values.max() - values.min() < 1e-5
    return values.mean().item()


@pytest.mark.parametrize("objective", POLICIES)
@pytest.mark.parametrize("stub", STUBS)
def test_losses(stub, objective):
    torch.manual_seed(0)
    loss = stub_policy(STUBS[stub], POLICIES[objective]).compute_loss(batch(b=8192, value=0.5))
    assert loss.item() == pytest.approx(MIP["losses"][stub][objective], rel=0.01, abs=2e-4)


def test_samplers():
    expected = MIP["samplers"]
    for steps, value in expected["euler_velocity_t"].items():
        policy = stub_policy(lambda x, t: t, FlowMatchingPolicy, nfe=int(steps))
        assert act(policy) == pytest.approx(value, abs=1e-5)
    for steps, value in expected["euler_velocity_x_plus_1"].items():
        policy = stub_policy(lambda x, t: x + 1, FlowMatchingPolicy, nfe=int(steps))
        assert act(policy) == pytest.approx(value, abs=1e-5)
    assert act(stub_policy(lambda x, t: x + 1, MIPPolicy)) == pytest.approx(expected["mip_x_plus_1"])
    assert act(stub_policy(lambda x, t: x + t, MIPPolicy)) == pytest.approx(expected["mip_x_plus_t"])
    regression = stub_policy(lambda x, t: x + 1 + t, RegressionPolicy)
    assert act(regression) == pytest.approx(expected["regression_x_plus_1_plus_t"])


def test_time_embedding():
    case = MIP["time_embedding"]
    embedding = TwoTimeEmbedding(2 * case["dim"])(torch.tensor([[0.0, case["t"]]]))[0]
    torch.testing.assert_close(embedding[case["dim"] :], torch.tensor(case["values"]), rtol=0, atol=1e-5)


def test_learning_rate():
    case = MIP["learning_rate"]
    optimizer = torch.optim.AdamW(nn.Linear(1, 1).parameters(), lr=case["base"])
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=0, num_training_steps=case["steps"])
    for step in (0, 1000, 150_000, 299_999):
        factor = schedule.lr_lambdas[0](step)
        expected = 0.5 * case["base"] * (1 + math.cos(math.pi * step / case["steps"]))
        assert case["base"] * factor == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("case", MIP["windows"], ids=str)
def test_windows(case):
    """Two observation steps and eight action steps."""
    indices = create_indices(np.array([case["length"]]), case["horizon"], np.ones(1, bool), pad_before=1, pad_after=7)
    assert len(indices) == case["count"]


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def linear(n_in: int, n_out: int) -> int:
    return n_in * n_out + n_out


@pytest.mark.parametrize("task", [name for name in MIP["parameters"] if name != "about"])
def test_parameter_counts(task):
    """Ours have no scalar head, which MIP counts and never trains."""
    case = MIP["parameters"][task]
    obs_dim, action_dim, horizon = case["sizes"]
    with torch.device("meta"):
        networks = {
            "mlp": (ResidualMLP(action_dim, action_dim, horizon), linear(512, 1), 512),
            "transformer": (
                ChiTransformer(action_dim, action_dim, horizon),
                linear(action_dim, 96) + linear(384, 96) + linear(96 + 96 + 384, 1),
                384,
            ),
            "unet": (ChiUnet(action_dim), linear(512, 128) + linear(128, 1), 256),
        }
        for name, (network, scalar_head, width) in networks.items():
            encoder = StateEncoder(obs_dim, 2, width)
            assert [count(network) + scalar_head, count(encoder)] == case[name], name
