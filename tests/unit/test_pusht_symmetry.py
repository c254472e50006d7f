"""The mirror symmetry of PushT, held against the simulator."""

import numpy as np
import pytest
import torch

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.dataset.pusht_dataset import PushTLowdimDataset, PushTStateDataset
from diffusion_policy.dataset.pusht_image_dataset import PushTImageDataset
from diffusion_policy.env.pusht import symmetry
from diffusion_policy.env.pusht.pusht_env import PushTEnv
from diffusion_policy.env.pusht.pusht_image_env import PushTImageEnv
from tests.util import ROOT, write_pusht

DEMOS = ROOT / "data/demos/pusht_policy_rollouts.zarr"


def play(env, state, actions):
    env.reset(options={"state": state})
    steps = [env.step(action)[:2] for action in actions]
    return np.array([obs for obs, _ in steps]), np.array([reward for _, reward in steps])


@pytest.mark.parametrize("seed", range(4))
def test_a_mirrored_action_sequence_gives_the_mirrored_episode(seed):
    draw = np.random.RandomState(seed)
    state = np.array([*draw.uniform(60, 80, 2), *draw.uniform(230, 300, 2), draw.uniform(0, 6)])
    target = state[2:4] + draw.uniform(-40, 40, 2)  # pushes through the block
    actions = np.linspace(state[:2], 2 * target - state[:2], 40)
    env = PushTEnv()
    states, rewards = play(env, state, actions)
    mirrored, same = play(
        env,
        symmetry.mirror_states(torch.from_numpy(state)).numpy(),
        symmetry.mirror_positions(torch.from_numpy(actions)).numpy(),
    )
    expected = symmetry.mirror_states(torch.from_numpy(states)).numpy()
    assert np.abs(states[-1, 2:4] - states[0, 2:4]).max() > 5  # the block was moved
    np.testing.assert_allclose(same, rewards, atol=1e-6)
    np.testing.assert_allclose(mirrored[:, :4], expected[:, :4], atol=1e-3)
    np.testing.assert_allclose(np.exp(1j * mirrored[:, 4]), np.exp(1j * expected[:, 4]), atol=1e-4)


def test_a_mirrored_image_shows_the_mirrored_state():
    env = PushTImageEnv(render_size=96)
    state = torch.tensor([120.0, 200.0, 300.0, 250.0, 0.7])
    images = []
    for value in (state, symmetry.mirror_states(state)):
        env.reset(options={"state": value.numpy()})
        images.append(torch.from_numpy(env.render()).permute(2, 0, 1).float())
    difference = (symmetry.mirror_images(images[0]) - images[1]).abs().mean()
    assert difference < 2 < (images[0] - images[1]).abs().mean()  # of 255; edges are drawn differently


def test_mirrored_twice_is_the_same():
    state = torch.rand(9, 5) * 5
    torch.testing.assert_close(symmetry.mirror_states(symmetry.mirror_states(state)), state, atol=1e-4, rtol=0)
    image = torch.rand(2, 3, 8, 8)
    assert torch.equal(symmetry.mirror_images(symmetry.mirror_images(image)), image)


@pytest.mark.parametrize("kind", [PushTStateDataset, PushTLowdimDataset, PushTImageDataset])
def test_a_dataset_holds_the_mirror_image_of_every_training_window(kind, tmp_path):
    arguments = {"horizon": 4, "val_ratio": 0.1, "max_train_episodes": 2}
    path = write_pusht(tmp_path / "pusht.zarr") if kind is PushTImageDataset else DEMOS  # whose images take seconds
    plain, both = (kind(path, augment=augment, **arguments) for augment in (None, "mirror"))
    count = len(plain)
    assert len(both) == 2 * count and len(both.get_validation_dataset()) == len(plain.get_validation_dataset())
    for index in (0, count - 1):
        a, same, mirrored = plain[index], both[index], both[count + index]
        torch.testing.assert_close(a["action"], same["action"])
        torch.testing.assert_close(mirrored["action"], symmetry.mirror_positions(a["action"]))
        if kind is PushTImageDataset:
            assert torch.equal(mirrored["obs"]["image"], symmetry.mirror_images(a["obs"]["image"]))
            torch.testing.assert_close(mirrored["obs"]["agent_pos"], symmetry.mirror_positions(a["obs"]["agent_pos"]))
        else:
            agent = slice(0, 2) if kind is PushTStateDataset else slice(18, 20)
            torch.testing.assert_close(mirrored["obs"][:, agent], symmetry.mirror_positions(a["obs"][:, agent]))
    normalized = both.get_normalizer()["action"].normalize(both.get_all_actions())
    assert normalized.abs().max() <= 1 + 1e-5


def test_a_symmetry_that_the_task_does_not_have():
    with pytest.raises(ConfigError, match="'rotation'.*'mirror'"):
        PushTStateDataset(DEMOS, augment="rotation")
