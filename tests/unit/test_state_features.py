"""Features of a state: angles and points of a body."""

import numpy as np
import pytest
import torch

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.env.pusht.pusht_keypoints_env import PushTKeypointsEnv
from diffusion_policy.model.common.normalizer import SingleFieldLinearNormalizer
from diffusion_policy.model.common.state_features import PushTFeatures, StateFeatures
from diffusion_policy.model.mip.networks import StateEncoder
from tests.util import load_config


def states(count=50):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 5, generator=generator) * torch.tensor([512, 512, 512, 512, 6.28])


def test_points_of_the_block_are_the_environments():
    data = states()
    field = SingleFieldLinearNormalizer.create_fit(data)
    features = PushTFeatures()
    features.set_normalizer(field)
    out = features(field.normalize(data)).detach()
    assert out.shape == (50, features.output_dim) == (50, 5 + 2 + 18)
    torch.testing.assert_close(out[:, 5], data[:, 4].sin(), atol=1e-4, rtol=0)
    env = PushTKeypointsEnv()
    for state, feature in zip(data[:5], out, strict=False):
        env._block_pose = tuple(state[2:].tolist())
        scale, offset = field.params_dict["scale"][2:4], field.params_dict["offset"][2:4]
        points = (feature[7:].reshape(9, 2) - offset) / scale
        np.testing.assert_allclose(points.detach(), env._keypoints()["block"], atol=0.05)


def test_features_do_not_jump_where_the_angle_does():
    features = StateFeatures(1, angles=[0])
    before, after = features(torch.tensor([[1e-3], [2 * np.pi - 1e-3]]))
    assert (before[1:] - after[1:]).abs().max() < 0.01


def test_entries_that_do_not_exist():
    with pytest.raises(ConfigError, match="0 to 4, not 5"):
        StateFeatures(5, angles=[5])
    with pytest.raises(ConfigError, match="pose"):
        StateFeatures(5, points=[[0, 1]])


def test_a_state_encoder_with_features_keeps_its_interface():
    encoder = StateEncoder(5, n_obs_steps=2, emb_dim=8, features=PushTFeatures())
    assert encoder(torch.randn(3, 2, 5)).shape == (3, 2, 8)
    assert "features.scale" in encoder.state_dict() and "features.scale" not in StateEncoder(5).state_dict()


def test_a_preset_turns_the_features_of_a_task_on():
    off = load_config("train_idp_mlp_lowdim", "preset=debug")
    on = load_config("train_idp_mlp_lowdim", "preset=debug", "state_features=features")
    other = load_config("train_idp_mlp_lowdim", "preset=debug", "state_features=features", "task=lift_ph_lowdim")
    assert off.policy.obs_encoder.features is None and other.policy.obs_encoder.features is None
    assert on.policy.obs_encoder.features._target_.endswith("PushTFeatures")
