"""The memory bank: earlier samples as further neighbours of a small batch."""

import copy
import logging
import shutil

import hydra
import pytest
import torch

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.policy.loading import load_policy
from diffusion_policy.storage import checkpoint_io, weights_io
from idp_workspace import memory_bank
from idp_workspace.geometry import Samples, compute_excess, geometry_excess
from idp_workspace.geometry_variants import Geometry
from idp_workspace.memory_bank import MemoryBank
from tests.util import equal, load_config, train_here, unit_normalizer, write_pusht


def make(*overrides):
    cfg = load_config("train_idp_mlp_lowdim", "preset=debug", *overrides)
    torch.manual_seed(0)
    policy = hydra.utils.instantiate(cfg.policy)
    policy.set_normalizer(unit_normalizer(5, 2))
    return policy.train()


def batches(policy, count, size=4):
    g = torch.Generator().manual_seed(1)
    return [
        {
            "obs": torch.rand(size, policy.horizon, 5, generator=g) * 2 - 1,
            "action": torch.rand(size, policy.horizon, 2, generator=g) * 2 - 1,
        }
        for _ in range(count)
    ]


def loss_of(policy, batch):
    torch.manual_seed(2)
    return policy.compute_loss(batch)


def test_an_empty_bank_changes_nothing_and_a_filled_one_adds_neighbours():
    plain, banked = make(), make("policy.bank_size=10")
    first, second = batches(plain, 2)
    assert torch.equal(loss_of(plain, first), loss_of(banked, first)) and plain._last[2] is None
    assert torch.equal(plain._last[1], banked._last[1])
    loss_of(banked, second)
    phi, m, among = banked._last
    earlier = plain._last[0]
    assert torch.equal(among.phi, torch.cat([phi, earlier])) and len(banked.bank) == 8
    assert torch.equal(among.a[:4], second["action"]) and torch.equal(among.a[4:], first["action"])
    # A batch of all eight samples has the same neighbourhoods and the same reference.
    torch.testing.assert_close(m, geometry_excess(among.phi, among.a)[:4])
    assert not torch.allclose(m, geometry_excess(phi, second["action"]))
    assert banked.metrics()["effective_neighbors"] > 4  # more than the batch has


def test_the_bank_keeps_the_newest_samples():
    bank = MemoryBank(5)
    for number in range(4):
        bank.push(torch.full((2, 3), float(number)), torch.full((2, 1, 2), float(number)))
    assert bank.rows[:, 0].tolist() == [3, 3, 2, 2, 1] and bank.rows.shape == (5, 5)
    bank.push(torch.full((9, 3), 7.0), torch.zeros(9, 1, 2))
    assert bank.rows[:, 0].tolist() == [7] * 5


def test_validation_and_acting_neither_use_nor_fill_the_bank():
    policy = make("policy.bank_size=8")
    first, second = batches(policy, 2)
    loss_of(policy, first)
    with torch.no_grad():
        loss_of(policy.eval(), second)
    assert policy._last[2] is None and len(policy.bank) == 4


def test_the_bank_holds_features_of_the_averaged_encoder(caplog):
    policy = make("policy.bank_size=8", "backbone=transformer")  # its features depend on weights
    average = copy.deepcopy(policy)
    for parameter in average.parameters():
        parameter.data.add_(0.1)
    policy.set_average(average)
    (batch,) = batches(policy, 1)
    with caplog.at_level(logging.WARNING):
        loss_of(policy, batch)
    expected = average.generator.embedding(average.generator.encode(batch["obs"]))
    features = policy.bank.rows[:, : expected.shape[1]]
    assert torch.equal(features, expected) and not torch.allclose(features, policy._last[0]) and not caplog.text
    assert len(average.bank) == 0 and average.state_dict().keys() == policy.state_dict().keys()
    alone = make("policy.bank_size=8", "backbone=transformer")  # upstream's loops do not tell the average
    for _ in range(2):
        loss_of(alone, batch)
    assert caplog.text.count("features of the encoder in training") == 1
    assert torch.equal(alone.bank.rows[:4, : expected.shape[1]], alone._last[0])


def test_the_bank_is_part_of_the_state_and_checkpoints_without_one_load():
    policy, other = make("policy.bank_size=8"), make("policy.bank_size=8")
    for batch in batches(policy, 3):
        loss_of(policy, batch)
    other.load_state_dict(policy.state_dict())
    assert torch.equal(other.bank.rows, policy.bank.rows) and len(other.bank) == 8
    smaller = make("policy.bank_size=3")
    smaller.load_state_dict(policy.state_dict())
    assert torch.equal(smaller.bank.rows, policy.bank.rows[:3])
    old = make().state_dict()
    assert not any("bank" in key for key in old)
    fresh = make("policy.bank_size=8")
    fresh.load_state_dict(old)
    assert len(fresh.bank) == 0
    for broken in ("text", torch.zeros(3), torch.zeros(2, 2, dtype=torch.long)):
        with pytest.raises(ValueError, match="memory bank must be a table"):
            other.load_state_dict(policy.state_dict() | {"bank._extra_state": broken})
    other.load_state_dict(policy.state_dict() | {"bank._extra_state": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match="does not fit"):
        loss_of(other, batches(policy, 1)[0])


def test_a_sample_that_is_not_finite_does_not_stay():
    policy = make("policy.bank_size=8")
    bad, good = batches(policy, 2)
    bad["action"][1] = torch.nan
    bad["obs"][2] = torch.inf
    assert not loss_of(policy, bad).isfinite()
    assert loss_of(policy, good).isfinite()


def test_a_bank_larger_than_the_memory_is_one_line(tmp_path, monkeypatch):
    data = write_pusht(tmp_path / "pusht.zarr")
    overrides = ("preset=debug", f"task.dataset.zarr_path={data}", "task.env_runner=null")
    with pytest.raises(ConfigError, match=r"bank_size=1000000000000 needs .* GB of memory, .* GB are free") as error:
        train_here(tmp_path / "run", "train_idp_mlp_lowdim", *overrides, "policy.bank_size=1000000000000")
    assert "\n" not in str(error.value)
    monkeypatch.setattr(memory_bank, "available_bytes", lambda: 1e6)
    with pytest.raises(ValueError, match="use a smaller bank"):
        MemoryBank(10_000).push(torch.zeros(2, 30), torch.zeros(2, 4, 2))


def test_a_run_with_a_bank_resumes_exactly(tmp_path):
    data = write_pusht(tmp_path / "pusht.zarr")
    overrides = (
        "preset=debug",
        "backbone=transformer",
        f"task.dataset.zarr_path={data}",
        "task.env_runner=null",
        "policy.bank_size=12",
        "dataloader.batch_size=8",
        "training.steps_per_epoch=2",
        "training.num_epochs=2",
    )
    workspace, _ = train_here(tmp_path / "whole", "train", *overrides)
    assert len(workspace.model.bank) == 12 and len(workspace.ema_model.bank) == 0
    (tmp_path / "again/checkpoints").mkdir(parents=True)
    halfway = tmp_path / "again/checkpoints/latest.ckpt"
    shutil.copy(tmp_path / "whole/checkpoints/previous.ckpt", halfway)
    assert checkpoint_io.load(halfway)["attributes"]["global_step"] == 2
    resumed, _ = train_here(tmp_path / "again", "train", *overrides)
    assert equal(resumed.model.state_dict(), workspace.model.state_dict())
    assert equal(resumed.ema_model.state_dict(), workspace.ema_model.state_dict())
    exported = weights_io.write(checkpoint_io.load(tmp_path / "whole/checkpoints/latest.ckpt"), tmp_path / "exported")
    obs = {"obs": torch.rand(1, workspace.policy.n_obs_steps, 5)}
    acting = workspace.policy.eval().predict_action(obs)["action"]
    assert torch.equal(load_policy(exported, "cpu").predict_action(obs)["action"], acting)


def test_the_bank_brings_m_of_a_small_batch_nearer_to_that_of_all_samples():
    g = torch.Generator().manual_seed(0)
    features = torch.randn(600, 6, generator=g)
    actions = torch.stack([features[:, 0] + 0.1 * torch.randn(600, generator=g), features[:, 1]], 1)[:, None]
    whole = geometry_excess(features, actions)
    rows = slice(0, 16)
    alone = compute_excess(features[rows], actions[rows], Geometry())
    bank = MemoryBank(256)
    bank.push(features[100:356], actions[100:356])
    among = bank.extended(Samples(features[rows], actions[rows]))
    banked = compute_excess(features[rows], actions[rows], Geometry(), among=among)
    assert (banked - whole[rows]).abs().mean() < 0.5 * (alone - whole[rows]).abs().mean()
