"""Open-loop numbers against a computation by hand."""

import numpy as np
import pytest
import torch

from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.dataset.base_dataset import BaseLowdimDataset, WindowedDataset
from diffusion_policy.workspace.open_loop import Episode, evaluate_open_loop, metrics, replay, summary


class Walks(WindowedDataset, BaseLowdimDataset):
    """Two numbers per step; the third action dimension stands still."""

    def __init__(self, lengths=(11, 7, 9), **arguments):
        buffer = ReplayBuffer.create_empty_numpy()
        for number, length in enumerate(lengths):
            walk = np.random.default_rng(number).normal(size=(length, 2)).cumsum(0)
            buffer.add_episode({"obs": walk, "action": np.c_[2 * walk + 1, np.ones(length)]})
        super().__init__(buffer, 8, 1, 2, val_ratio=0.5, **arguments)

    def _make_steps(self, replay_buffer):
        return {key: torch.from_numpy(replay_buffer[key]).float() for key in ("obs", "action")}


class Repeats:
    """Predicts 2 * (last observed numbers) + 1 for the whole chunk: right at its first step."""

    n_obs_steps, n_action_steps, device = 2, 3, torch.device("cpu")

    def predict_action(self, obs_dict):
        last = obs_dict["obs"][:, -1:] if obs_dict["obs"].shape[1] == 2 else obs_dict["obs"][:, 1:2]
        action = torch.cat([2 * last + 1, torch.ones(len(last), 1, 1)], dim=2).repeat(1, 3, 1)
        return {"action": action, "action_pred": action}


@pytest.fixture
def held_out():
    return Walks().get_validation_dataset()


def test_an_episode_is_replayed_chunk_by_chunk(held_out):
    episodes = replay(Repeats(), held_out)
    assert [episode.number for episode in episodes] == np.flatnonzero(held_out.val_mask).tolist()
    for episode in episodes:
        steps = held_out.replay_buffer.get_episode(episode.number)["action"]
        starts = np.arange(len(steps)) // 3 * 3
        np.testing.assert_allclose(episode.recorded, steps, rtol=1e-5)
        np.testing.assert_allclose(episode.predicted, steps[starts], rtol=1e-5)
        assert episode.chunk_step.tolist() == (np.arange(len(steps)) % 3).tolist()
    assert len(replay(Repeats(), held_out, limit=1)) == 1
    assert np.array_equal(replay(Repeats(), held_out, batch_size=2)[0].predicted, episodes[0].predicted)


def test_numbers_equal_those_computed_by_hand():
    recorded = np.array([[0.0, 5], [1, 5], [4, 5], [9, 5], [16, 5]])
    predicted = recorded + np.array([[0.0, 0], [1, 0], [2, 0], [0, 0], [1, 0]])
    episode = Episode(3, predicted, recorded, np.array([0, 1, 2, 0, 1]))
    found = metrics([episode], spread=np.array([3.0, 1.0]), fps=2.0)
    assert found["rmse"] == pytest.approx([np.sqrt(6 / 5), 0]) and found["mae"] == pytest.approx([4 / 5, 0])
    assert found["variance_explained"] == [pytest.approx(1 - 1.2 / 34.8), None]
    assert found["by_chunk_step"]["rmse"] == [pytest.approx([0, 0]), pytest.approx([1, 0]), pytest.approx([2, 0])]
    assert found["by_chunk_step"]["variance_explained"][2][0] == pytest.approx(1 - 4 / 34.8)
    assert found["step_size"]["expert"] == pytest.approx([4, 0])
    assert found["step_size"]["policy"] == pytest.approx([(2 + 4 + 3 + 8) / 4, 0])
    assert found["seams"]["policy"] == pytest.approx([3, 0]) and found["seams"]["expert"] == pytest.approx([5, 0])
    assert found["inside"]["policy"] == pytest.approx([(2 + 4 + 8) / 3, 0])
    assert found["inside"]["expert"] == pytest.approx([(1 + 3 + 7) / 3, 0])
    assert found["jerk"]["expert"] == pytest.approx([0, 0])
    assert found["jerk"]["policy"] == pytest.approx([8 * np.abs(np.diff([0, 2, 6, 9, 17], 3)).mean(), 0])
    # Held: 0 through the first chunk, then the action before the second, 4.
    assert found["hold"]["mae"] == pytest.approx([(0 + 1 + 4 + 5 + 12) / 5, 0])
    assert (found["steps"], found["chunks"], found["episodes"], found["moves"]) == (5, 2, [3], [True, False])
    mean = summary(found)
    assert mean["open_loop_rmse"] == pytest.approx(np.sqrt(0.6))
    assert mean["variance_explained"] == pytest.approx(1 - 1.2 / 34.8)
    assert mean["step_size_ratio"] == pytest.approx(17 / 16)
    assert mean["seams_ratio"] == pytest.approx(3 / 5) and mean["inside_ratio"] == pytest.approx(14 / 11)


def test_actions_after_the_observed_step(held_out):
    """Upstream's older convention: the first action belongs to the step after the last observation."""
    policy = Repeats()
    policy.oa_step_convention = False
    for episode in replay(policy, held_out):
        steps = held_out.replay_buffer.get_episode(episode.number)["action"]
        np.testing.assert_allclose(episode.recorded, steps[1:], rtol=1e-5)
        np.testing.assert_allclose(episode.predicted, steps[np.arange(len(steps) - 1) // 3 * 3], rtol=1e-5)


def test_short_episodes_have_no_jerk():
    dataset = Walks(lengths=(9, 9, 2)).get_validation_dataset()
    dataset.val_mask = np.array([False, False, True])
    found = evaluate_open_loop(Repeats(), dataset, fps=None)
    assert "jerk_ratio" not in found and np.isfinite(found["variance_explained"])
