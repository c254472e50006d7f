"""How well a policy predicts the actions of held-out demonstrations, for tasks whose simulator is not available.

    python -m benchmarks.open_loop --checkpoint RUN/checkpoints/latest.ckpt --output results/NAME.json

The run must have held out episodes (task.dataset.val_ratio=0.1). The result is, for training and held-out windows, the
explained share of the variance of the executed actions, 1 - MSE / variance: 1 is perfect, 0 equals predicting the mean
action. It shows that a policy has learned, not that it succeeds.
"""

import argparse
import json
import pathlib

import torch
from omegaconf import OmegaConf

from diffusion_policy.common.config_util import build, register_resolvers
from diffusion_policy.dataset.identity import dataset_identity
from diffusion_policy.policy.loading import policy_of
from diffusion_policy.storage import atomic, checkpoint_io


@torch.no_grad()
def explained(policy, dataset, batch_size: int = 256) -> float:
    """Explained share of the variance of the executed actions (N, Ta, Da), over all windows of the dataset."""
    predictions, targets = [], []
    for start in range(0, len(dataset), batch_size):
        batch = dataset.get_batch(range(start, min(start + batch_size, len(dataset))))
        predictions.append(policy.predict_action(batch["obs"])["action"])
        first = policy.n_obs_steps - 1
        targets.append(batch["action"][:, first : first + policy.n_action_steps])
    predicted, target = torch.cat(predictions), torch.cat(targets)
    return 1 - float((predicted - target).square().mean() / (target - target.mean((0, 1))).square().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--output", required=True, type=pathlib.Path)
    options = parser.parse_args()
    register_resolvers()
    payload = checkpoint_io.load(options.checkpoint)
    cfg = OmegaConf.create(payload["cfg"])
    policy = policy_of(payload)
    dataset = build(cfg, "task.dataset")
    held_out = dataset.get_validation_dataset()
    if not len(held_out):
        parser.error("the run held out no episodes: train with task.dataset.val_ratio=0.1")
    result = {
        "task": cfg.task.name,
        "config": cfg.name,
        "steps": payload["attributes"]["global_step"],
        "seed": cfg.training.seed,
        "dataset": dataset_identity(dataset, cfg.task.dataset),
        "windows": {"training": len(dataset), "held out": len(held_out)},
        "explained": {"training": explained(policy, dataset), "held out": explained(policy, held_out)},
        "versions": checkpoint_io.versions(),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_atomically(options.output, lambda file: file.write((json.dumps(result, indent=2) + "\n").encode()))
    print(json.dumps(result["explained"]))


if __name__ == "__main__":
    main()
