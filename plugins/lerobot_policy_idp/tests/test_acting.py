"""Queues, history, chunks for asynchronous inference, and what a user can get wrong."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from conftest import ROOT
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature, PreTrainedConfig
from lerobot.datasets.lerobot_dataset import LeRobotDatasetMetadata
from lerobot.policies import make_policy, make_pre_post_processors
from lerobot.rollout.inference.rtc import supports_rtc_inference
from lerobot_policy_idp import IDPConfig, IDPPolicy, make_idp_pre_post_processors
from lerobot_policy_idp.modeling_idp import continued
from test_equal_numbers import A, config, stats


@pytest.fixture
def policy() -> IDPPolicy:
    torch.manual_seed(0)
    made = IDPPolicy(config(n_obs_steps=3, horizon=16, n_action_steps=4)).eval()
    for parameter in made.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return made


def observation(value: float, batch: int = 2) -> dict[str, torch.Tensor]:
    return {key: torch.full((batch, width), value) for key, width in (
        ("observation.state", 5), ("observation.environment_state", 4))}  # fmt: skip


def history(*values: float) -> dict[str, torch.Tensor]:
    steps = [observation(value) for value in values]
    return {key: torch.stack([step[key] for step in steps], dim=1) for key in steps[0]}


def test_actions_are_those_of_the_chunk_and_observations_those_of_every_step(policy):
    """A new chunk sees the last three control steps, although only every fourth step needs one."""
    actions = [policy.select_action(observation(t / 10)) for t in range(9)]
    assert actions[0].shape == (2, A)
    for first, seen in ((0, (0.0, 0.0, 0.0)), (4, (0.2, 0.3, 0.4)), (8, (0.6, 0.7, 0.8))):
        chunk = policy.predict_action_chunk(history(*seen))
        assert chunk.shape == (2, 14, A)
        for step, action in enumerate(actions[first : first + 4]):
            torch.testing.assert_close(action, chunk[:, step])


def test_reset_forgets(policy):
    first = policy.select_action(observation(0.1))
    policy.select_action(observation(0.9))
    policy.reset()
    assert torch.equal(policy.select_action(observation(0.1)), first)


def test_one_observation_counts_for_the_whole_history(policy):
    """What the asynchronous server passes: no dimension of time, and no queue."""
    policy.select_action(observation(0.5))  # does not matter
    assert torch.equal(
        policy.predict_action_chunk(observation(0.2)), policy.predict_action_chunk(history(0.2, 0.2, 0.2))
    )


def test_one_network_call_per_chunk(policy):
    calls = []
    policy.idp.model.register_forward_hook(lambda *_: calls.append(1))
    policy.predict_action_chunk(observation(0.2))
    assert len(calls) == 1


def test_a_chunk_passes_over_from_the_previous_one(policy):
    assert supports_rtc_inference(policy)
    new = policy.predict_action_chunk(observation(0.2, batch=1))
    before = torch.ones(6, A)
    chunk = policy.predict_action_chunk(observation(0.2, batch=1), inference_delay=2, prev_chunk_left_over=before)
    assert chunk.shape == new.shape
    assert torch.equal(chunk[:, :2], torch.ones(1, 2, A)) and torch.equal(chunk[:, 6:], new[:, 6:])
    for step, weight in ((2, 0.8), (3, 0.6), (4, 0.4), (5, 0.2)):
        torch.testing.assert_close(chunk[:, step], weight * before[None, step] + (1 - weight) * new[:, step])
    padded = torch.cat([before[:4], torch.zeros(2, A)])  # LeRobot fills a short rest with zeros
    torch.testing.assert_close(continued(new, padded, 2), continued(new, before[:4], 2))
    assert torch.equal(continued(new, torch.zeros(6, A), 2), new)
    assert torch.equal(continued(new, before[:0], 0), new)
    assert torch.equal(continued(new, torch.ones(1, 40, A), 40), torch.ones_like(new))


def test_the_loss_does_not_see_padded_actions(policy):
    """A batch whose padding holds other numbers has the same loss, but for the probe, which starts from them."""
    policy = IDPPolicy(config(backbone="mlp", lambda_prox=0.0))
    batch = {key: torch.rand(6, 2, width) for key, width in (
        ("observation.state", 5), ("observation.environment_state", 4))}  # fmt: skip
    padded = torch.arange(16) >= torch.tensor([[16], [16], [9], [5], [3], [12]])
    batch |= {"action": torch.rand(6, 16, A), "action_is_pad": padded}
    loss, _ = policy(batch)
    other = {**batch, "action": torch.where(padded[..., None], 7.0, batch["action"])}
    torch.testing.assert_close(policy(other)[0], loss)
    assert not torch.allclose(policy({key: x for key, x in other.items() if key != "action_is_pad"})[0], loss)


def test_the_settings_of_the_documentation_exist():
    text = (ROOT / "docs/lerobot.md").read_text()
    table = re.findall(r"^\| (`.*?) \|", text, re.M)
    named = {*re.findall(r"--policy\.(\w+)", text), *(name for row in table for name in re.findall(r"`(\w+)`", row))}
    fields = {field.name for field in dataclasses.fields(IDPConfig)}
    assert len(named) > 20 and named - {"type", "path"} <= fields
    documented = fields - {field.name for field in dataclasses.fields(PreTrainedConfig)}
    hidden = {"normalization_mapping", "kernel_size", "n_groups", "scheduler_name"}
    assert documented - named <= hidden | {name for name in fields if name.startswith("optimizer_")}


# ---------------------------------------------------------------------- what a user can get wrong
@pytest.mark.parametrize(
    "settings, message",
    [
        ({"backbone": "resnet"}, "policy.backbone='resnet' is not one of transformer, unet, mlp"),
        ({"optimizer_type": "sgd"}, "policy.optimizer_type='sgd' is not one of muon, adamw"),
        ({"n_action_steps": 16}, "policy.n_action_steps=16 is more than the 15 steps"),
        ({"horizon": 0}, "policy.horizon=0 must be at least 1"),
        ({"backbone": "unet", "horizon": 15}, "divisible by 2 for a unet of 2 levels"),
        ({"energy_power": 0.0}, "energy_power=0.0 must be above 0"),
        ({"probe_fraction": 2.0}, "at most 1"),
        ({"switches": {"taus": 1}}, "policy.switches has an option that IDP does not have"),
        ({"switches": {"nfe": 2}}, "nfe is a setting of its own, policy.nfe"),
        ({"switches": {"granularity": "flat"}}, "mixes recorded and padded steps"),
        ({"switches": {"bank_size": 8}}, "do not know padded steps"),
        ({"switches": {"lambda_schedule": "ramp"}}, "no ramp"),
        ({"switches": {"reference": "dataset"}}, "use ema or batch"),
    ],
)
def test_settings_that_do_not_fit(settings, message):
    with pytest.raises(ValueError, match=message):
        config(**settings)


@pytest.mark.parametrize(
    "inputs, message",
    [
        ({}, "IDP needs a state, such as 'observation.state', among the inputs; got none"),
        ({"observation.images.a": PolicyFeature(FeatureType.VISUAL, (3, 8, 8))}, "got observation.images.a"),
        ({"observation.state": PolicyFeature(FeatureType.STATE, (3, 2))}, "must be a vector"),
    ],
)
def test_features_without_a_state(inputs, message):
    cfg = config()
    cfg.input_features = inputs
    with pytest.raises(ValueError, match=message):
        IDPPolicy(cfg)


def test_other_features_that_do_not_fit():
    cfg = config()
    cfg.output_features = {}
    with pytest.raises(ValueError, match="IDP needs one action, a vector called 'action'"):
        IDPPolicy(cfg)
    with pytest.raises(ValueError, match="crop_shape=.30, 30. does not fit observation.images.front of size .20, 24."):
        IDPPolicy(config(images=True, crop_shape=(30, 30)))
    with pytest.raises(ValueError, match="VISUAL must be IDENTITY"):
        IDPPolicy(config(images=True, normalization_mapping={"VISUAL": NormalizationMode.MEAN_STD}))


def test_batches_that_do_not_fit(policy):
    batch = {**history(0.1, 0.2, 0.3), "action": torch.zeros(2, 16, A + 1)}
    with pytest.raises(ValueError, match=r"chunks of shape \(16, 3\), got actions \(2, 16, 4\)"):
        policy(batch)
    with pytest.raises(ValueError, match="the batch has no observation.environment_state"):
        policy.predict_action_chunk({"observation.state": torch.zeros(2, 5)})
    with pytest.raises(ValueError, match=r"observation.state must have shape \(batch, 3, 5\), got \(2, 2, 5\)"):
        policy.predict_action_chunk({**history(0.1, 0.2, 0.3), "observation.state": torch.zeros(2, 2, 5)})


def test_missing_statistics():
    cfg = config()
    with pytest.raises(ValueError, match="no statistics min, max of observation.state"):
        make_pre_post_processors(cfg)
    known = stats(cfg)
    del known["action"]["max"]
    with pytest.raises(ValueError, match="no statistics max of action"):
        make_idp_pre_post_processors(cfg, known)
    known = stats(cfg)
    known["action"]["max"] = torch.zeros(7)
    with pytest.raises(
        ValueError, match=r"min, max of action must be finite and of shape \(3,\), got \(3,\) and \(7,\)"
    ):
        make_idp_pre_post_processors(cfg, known)


def test_a_checkpoint_for_another_action(policy, tmp_path):
    """As when a training continues on a dataset of another robot."""
    policy.save_pretrained(tmp_path)
    cfg = config(n_obs_steps=3, horizon=16, n_action_steps=4)
    cfg.output_features = {"action": PolicyFeature(FeatureType.ACTION, (A + 1,))}
    with pytest.raises(ValueError, match="does not fit the policy's settings: idp.model.* Has the dataset another"):
        IDPPolicy.from_pretrained(tmp_path, config=cfg)
    other = config(n_obs_steps=3, horizon=16, n_action_steps=4, n_layer=2)
    with pytest.raises(ValueError, match="is only in one of them"):
        IDPPolicy.from_pretrained(tmp_path, config=other)


def test_a_chunk_longer_than_the_episodes(pusht):
    meta = LeRobotDatasetMetadata("local/pusht", root=pusht)
    cfg = config(horizon=512, backbone="mlp")
    cfg.input_features = {}
    with pytest.raises(ValueError, match="policy.horizon=512 is too long for this dataset: a chunk has 511 steps"):
        make_policy(cfg, ds_meta=meta)
