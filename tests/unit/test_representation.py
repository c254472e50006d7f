"""Rotations and relative actions between a recording and the network of a policy."""

import copy

import pytest
import torch
from omegaconf import OmegaConf
from scipy.spatial.transform import Rotation as Scipy

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.common.representation import Field, Representation, Rotation
from diffusion_policy.dataset.recorded_representation import representation_of
from diffusion_policy.export.signature import signature_of
from diffusion_policy.policy.base_lowdim_policy import BaseLowdimPolicy
from diffusion_policy.policy.interface import interface_of
from diffusion_policy.policy.represented import build_policy


def scipy_rotation(source, values):
    if source == "quaternion":
        return Scipy.from_quat(values)
    if source == "quaternion_wxyz":
        return Scipy.from_quat(values, scalar_first=True)
    return Scipy.from_rotvec(values) if source == "axis_angle" else Scipy.from_euler("xyz", values)


@pytest.mark.parametrize("source, size", [("quaternion", 4), ("quaternion_wxyz", 4), ("axis_angle", 3), ("euler", 3)])
def test_rotations_are_the_first_two_rows_of_the_matrix(source, size):
    values = 0.7 * torch.randn(20, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    field = Field(3 + size + 1, (Rotation(3, source),))
    x = torch.cat([torch.rand(20, 3), values, torch.rand(20, 1)], dim=1)
    encoded = field.encode(x)
    assert encoded.shape == (20, field.encoded_width) == (20, 10)
    expected = scipy_rotation(source, values.numpy()).as_matrix()[:, :2].reshape(20, 6)
    torch.testing.assert_close(encoded[:, 3:9], torch.from_numpy(expected))
    assert torch.equal(encoded[:, :3], x[:, :3]) and torch.equal(encoded[:, 9], x[:, -1])
    back = field.decode(encoded)
    again = scipy_rotation(source, back[:, 3:-1].numpy())
    assert (scipy_rotation(source, values.numpy()).inv() * again).magnitude().max() < 1e-6
    torch.testing.assert_close(field.decode(field.encode(back)), back)


def test_two_rotations_of_one_array_and_of_joined_arrays():
    two = {"pose": [{"start": 4, "from": "axis_angle"}, {"start": 0, "from": "quaternion"}]}
    found = representation_of({"other": 2, "pose": 7}, 7, two, relative=False, joined=True)
    assert found.obs["obs"] == Field(9, (Rotation(2, "quaternion"), Rotation(6, "axis_angle")))
    assert found.obs["obs"].encoded_width == 14 and found.action.encoded_width == 7
    assert Representation.from_config(OmegaConf.create(found.to_config())) == found
    apart = representation_of({"other": 2, "pose": 7}, 7, two, relative=False, joined=False)
    assert apart.obs["pose"].encoded_width == 12 and apart.obs["other"].rotations == ()


@pytest.mark.parametrize(
    "rotations, message",
    [
        ({"pose": {"start": 4, "from": "quaternion"}}, "leave its 7 numbers"),
        ({"pose": [{"start": 0, "from": "euler"}, {"start": 2, "from": "euler"}]}, "overlap"),
        ({"pose": {"start": 0, "from": "matrix"}}, "not one of quaternion"),
        ({"pose": 3}, "must be"),
        ({"pos": {"start": 0, "from": "euler"}}, "nearest: pose"),
    ],
)
def test_mistakes_in_rotations_are_named(rotations, message):
    with pytest.raises(ConfigError, match=message):
        representation_of({"pose": 7}, 7, rotations, relative=False, joined=True)


def test_relative_actions_need_an_array_of_their_size():
    found = representation_of({"other": 2, "pose": 3}, 3, {}, relative=True, joined=True)
    assert found.relative == ("obs", 2, 5)
    with pytest.raises(ConfigError, match=r"observed are other \(2\)"):
        representation_of({"other": 2}, 3, {}, relative=True, joined=True)


class Remembers(BaseLowdimPolicy):
    """Keeps what the network would see, and predicts the actions of the last batch."""

    n_obs_steps, n_action_steps = 2, 3

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def compute_loss(self, batch):
        self.seen = batch
        return self.weight.sum()

    def predict_action(self, obs_dict):
        assert torch.equal(obs_dict["obs"], self.seen["obs"])
        return {"action": self.seen["action"][:, 1:4], "action_pred": self.seen["action"]}


def represented(**arguments):
    section = representation_of({"other": 2, "state": 8}, 8, joined=True, **arguments).to_config()
    target = f"{Remembers.__module__}.Remembers"
    return build_policy(OmegaConf.create({"policy": {"_target_": target}, "task": {"representation": section}}))


def batch():
    numbers = torch.Generator().manual_seed(1)
    obs, action = torch.randn(5, 2, 10, generator=numbers), torch.randn(5, 6, 8, generator=numbers)
    return {"obs": obs, "action": action}


def test_the_network_sees_relative_actions_and_the_robot_gets_absolute_ones():
    policy, data = represented(rotations={}, relative=True), batch()
    assert isinstance(policy, Remembers) and type(policy).__name__ == "Remembers"
    assert list(policy.state_dict()) == list(Remembers().state_dict())
    policy = copy.deepcopy(policy)  # as for the averaged weights
    policy.compute_loss(data)
    assert torch.equal(policy.seen["action"], data["action"] - data["obs"][:, 1:2, 2:])
    result = policy.predict_action({"obs": data["obs"]})
    torch.testing.assert_close(result["action_pred"], data["action"], rtol=0, atol=1e-6)
    torch.testing.assert_close(result["action"], data["action"][:, 1:4], rtol=0, atol=1e-6)


def test_rotations_are_undone_for_the_robot():
    both = {key: {"start": 3, "from": "quaternion"} for key in ("state", "action")}
    policy, data = represented(rotations=both, relative=True), batch()
    data["action"] = policy.representation.action.decode(policy.representation.action.encode(data["action"]))
    policy.compute_loss(data)
    assert policy.seen["obs"].shape == (5, 2, 12) and policy.seen["action"].shape == (5, 6, 10)
    torch.testing.assert_close(policy.predict_action({"obs": data["obs"]})["action_pred"], data["action"])


def test_robots_and_servers_see_the_recorded_sizes():
    both = {key: {"start": 3, "from": "quaternion"} for key in ("state", "action")}
    policy = represented(rotations=both, relative=True)
    policy.obs_dim, policy.action_dim = 12, 10
    interface = interface_of(policy)
    assert interface.observation["obs"].shape == (10,) and interface.action_dim == 8
    policy.obs_shapes = lambda: {"obs": (12,)}
    with pytest.raises(ConfigError, match="serve its checkpoint"):
        signature_of(policy)


def test_a_damaged_section_is_one_line():
    with pytest.raises(ConfigError, match=r"task\.representation cannot be read"):
        Representation.from_config({"obs": {"obs": {"width": "many", "rotations": []}}, "relative": None})


@pytest.mark.parametrize("task", [None, [], "pusht"])
def test_acting_needs_no_task(task):
    target = f"{Remembers.__module__}.Remembers"
    assert type(build_policy(OmegaConf.create({"policy": {"_target_": target}, "task": task}))) is Remembers
