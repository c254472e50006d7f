"""Train a policy on your own arrays, without a simulator, and predict an action.

    python examples/your_own_data.py

Replace `record_episodes` by whatever reads your robot's logs.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
from collections.abc import Iterator

import numpy as np
import torch

from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.dataset.base_dataset import BaseLowdimDataset, WindowedDataset, check_steps
from diffusion_policy.model.diffusion.mip_networks import ResidualMLP, StateEncoder
from idp_workspace.policy import IDPPolicy

OBS_DIM, ACTION_DIM = 4, 2  # position and goal; velocity
HORIZON, N_OBS_STEPS, N_ACTION_STEPS = 8, 2, 4


def record_episodes(count: int = 40, steps: int = 30) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield observations (T, 4) and actions (T, 2) of episodes; action[t] was taken when obs[t] was seen."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        position, goal = rng.uniform(-1, 1, 2), rng.uniform(-1, 1, 2)
        obs, action = [], []
        for _ in range(steps):
            obs.append([*position, *goal])
            action.append(0.2 * (goal - position))
            position = position + action[-1]
        yield np.array(obs, dtype=np.float32), np.array(action, dtype=np.float32)


class MyDataset(WindowedDataset, BaseLowdimDataset):
    """Windows of HORIZON steps over the episodes of a replay buffer."""

    def __init__(self, path: str):
        buffer = ReplayBuffer.copy_from_path(path, keys=["obs", "action"])
        super().__init__(buffer, HORIZON, pad_before=N_OBS_STEPS - 1, pad_after=N_ACTION_STEPS - 1)

    def _make_steps(self, replay_buffer: ReplayBuffer) -> dict[str, torch.Tensor]:
        check_steps(replay_buffer, {"obs": (OBS_DIM,), "action": (ACTION_DIM,)})
        return {key: torch.from_numpy(replay_buffer[key]) for key in ("obs", "action")}


def train(dataset: MyDataset, steps: int = 400, batch_size: int = 128) -> IDPPolicy:
    policy = IDPPolicy(
        model=ResidualMLP(ACTION_DIM, ACTION_DIM, HORIZON, N_OBS_STEPS, n_layer=2, n_emb=64, p_drop=0.0),
        obs_encoder=StateEncoder(OBS_DIM, N_OBS_STEPS, emb_dim=64),
        obs_dim=OBS_DIM,
        action_dim=ACTION_DIM,
        horizon=HORIZON,
        n_obs_steps=N_OBS_STEPS,
        n_action_steps=N_ACTION_STEPS,
        obs_as_cond=True,
        lambda_schedule="ramp",  # few steps: let the probe's weight grow to 81 late
    )
    policy.set_normalizer(dataset.get_normalizer())
    optimizer = policy.get_optimizer(learning_rate=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        policy.set_progress(step / steps)
        loss = policy.compute_loss(dataset.get_batch(torch.randint(len(dataset), (batch_size,))))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return policy.eval()


def main(folder: str) -> float:
    torch.manual_seed(0)
    path = pathlib.Path(folder) / "mine.zarr"
    buffer = ReplayBuffer.create_empty_numpy()
    for obs, action in record_episodes():
        buffer.add_episode({"obs": obs, "action": action})
    buffer.save_to_path(str(path))
    dataset = MyDataset(str(path))
    print(f"{dataset.replay_buffer.n_episodes} episodes, {len(dataset)} windows in {path}")

    policy = train(dataset)
    obs = torch.tensor([[[-0.5, 0.0, 0.5, 0.5], [-0.4, 0.05, 0.5, 0.5]]])  # (batch, N_OBS_STEPS, OBS_DIM), raw units
    action = policy.predict_action({"obs": obs})["action"]  # (batch, N_ACTION_STEPS, ACTION_DIM), raw units
    expert = 0.2 * (obs[:, -1, 2:] - obs[:, -1, :2])
    error = (action[:, 0] - expert).abs().max().item()
    print(f"predicted {action[0, 0].tolist()}, the expert would do {expert[0].tolist()} (error {error:.3f})")
    return error


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
