"""EMA law and learning-rate schedules: upstream's numbers and closed forms."""

import copy
import json
import math

import pytest
import torch
from torch import nn

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.model.common.lr_scheduler import get_scheduler
from diffusion_policy.model.diffusion.ema_model import EMAModel
from tests import golden


class Probe(nn.Module):
    """A parameter that is not trained, trained ones, batch norm: each is averaged differently."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0))
        self.fc = nn.Linear(3, 2)
        self.bn = nn.BatchNorm1d(2)


def test_decay_and_trace_match():
    expected = golden.read("ema")
    for schedule in expected["schedules"]:
        ema = EMAModel(Probe(), **schedule["kwargs"])
        for step, decay in schedule["decay_for_optimization_step"].items():
            assert ema.get_decay(int(step)) == pytest.approx(decay, abs=1e-12)

    model = Probe()
    weights = {key: torch.tensor(value) for key, value in expected["run_initial_weights"].items()}
    model.load_state_dict(weights, strict=False)
    ema = EMAModel(copy.deepcopy(model), power=0.75)
    for record in expected["run"]:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += expected["run_add_per_step"]
        ema.step(model)
        assert ema.decay == pytest.approx(record["decay"]) and ema.optimization_step == record["optimization_step"]
        for key, value in ema.averaged_model.named_parameters():
            if value.numel():
                torch.testing.assert_close(value, torch.tensor(record["ema"][key]))


def test_constant_rate_in_closed_form():
    """ema = p + (ema0 - p) 0.995^k for constant p."""
    model = Probe()
    start = copy.deepcopy(model)
    with torch.no_grad():
        model.fc.weight += 1
    ema = EMAModel(copy.deepcopy(start), rate=0.995)
    for _ in range(50):
        ema.step(model)
    expected = model.fc.weight + (start.fc.weight - model.fc.weight) * 0.995**50
    torch.testing.assert_close(ema.averaged_model.fc.weight, expected.detach(), rtol=1e-5, atol=1e-6)


def test_averaged_model_is_frozen_and_buffers_follow():
    model = Probe()
    ema = EMAModel(copy.deepcopy(model), rate=0.9)
    assert not ema.averaged_model.training and not any(p.requires_grad for p in ema.averaged_model.parameters())
    model.train()
    model.bn(torch.randn(16, 2) + 5)
    ema.step(model)
    assert torch.equal(ema.averaged_model.bn.running_mean, model.bn.running_mean)
    assert ema.averaged_model.bn.num_batches_tracked == 1
    assert all(p.requires_grad for p in model.fc.parameters())


def test_counter_survives_a_state_dict():
    model = Probe()
    ema = EMAModel(copy.deepcopy(model), power=0.75)
    for _ in range(7):
        ema.step(model)
    resumed = EMAModel(copy.deepcopy(ema.averaged_model), power=0.75)
    resumed.load_state_dict(json.loads(json.dumps(ema.state_dict())))
    with torch.no_grad():
        model.fc.weight += 1
    for average in (ema, resumed):
        average.step(model)
    assert resumed.optimization_step == 8 and resumed.decay == ema.decay > 0.7
    assert torch.equal(resumed.averaged_model.fc.weight, ema.averaged_model.fc.weight)


def test_ema_errors():
    with pytest.raises(ConfigError, match="use_ema=False"):
        EMAModel(Probe(), rate=1.0)
    with pytest.raises(ValueError):
        EMAModel(Probe()).step(nn.Linear(3, 2))


def learning_rates(name, steps, base_lr=1e-4, **kwargs):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=base_lr)
    scheduler = get_scheduler(name, optimizer, **kwargs)
    values = []
    for _ in range(steps):
        values.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return values


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "constant_with_warmup"])
def test_schedules_match(name):
    expected = golden.read("lr_scheduler")[name]
    values = learning_rates(
        name,
        len(expected["lr"]),
        expected["base_lr"],
        num_warmup_steps=expected["warmup"],
        num_training_steps=expected["total"],
    )
    assert values == pytest.approx(expected["lr"], rel=1e-9, abs=1e-18)


def test_resume_continues_the_schedule():
    kwargs = dict(num_warmup_steps=10, num_training_steps=100)
    uninterrupted = learning_rates("cosine", 60, **kwargs)
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "initial_lr": 1e-4}], lr=1e-4)
    scheduler = get_scheduler("cosine", optimizer, last_epoch=39, **kwargs)
    assert scheduler.get_last_lr()[0] == pytest.approx(uninterrupted[40])


def test_cosine_in_closed_form_and_held_at_the_end():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-4)
    factor = get_scheduler("cosine", optimizer, num_warmup_steps=0, num_training_steps=300_000).lr_lambdas[0]
    for k in (0, 1, 1_000, 150_000, 299_999):
        assert 1e-4 * factor(k) == pytest.approx(0.5e-4 * (1 + math.cos(math.pi * k / 300_000)), rel=1e-9)
    assert factor(300_000) == factor(450_000) == 0


def test_cosine_restarts():
    values = learning_rates("cosine_with_restarts", 110, 1.0, num_warmup_steps=0, num_training_steps=100, num_cycles=2)
    assert values[0] == values[50] == 1 and values[25] == pytest.approx(0.5) and values[49] < 0.01 and values[105] == 0


def test_lr_errors():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-4)
    with pytest.raises(ConfigError, match="'cosin'.*constant.*cosine"):
        get_scheduler("cosin", optimizer)
    with pytest.raises(ConfigError, match="num_warmup_steps"):
        get_scheduler("cosine", optimizer, num_training_steps=10)
    with pytest.raises(ConfigError, match="num_training_steps"):
        get_scheduler("cosine", optimizer, num_warmup_steps=10)
