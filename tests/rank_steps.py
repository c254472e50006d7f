"""A few training steps, in one process or in several ranks that share the batch: what test_distributed compares.

torchrun --nproc-per-node=2 -m tests.rank_steps OUTPUT
"""

import os
import signal
import sys

import hydra
import torch

from diffusion_policy.workspace.distributed import disconnect
from idp_workspace.policy import MIPPolicy
from tests.util import load_config

STEPS = 3
#: name: config and overrides. preset=debug has no dropout, whose masks are those of each rank.
CASES = {
    "idp": ["train_idp_mlp_lowdim"],
    "idp, transformer, accumulation": ["train_idp_transformer_lowdim", "training.gradient_accumulate_every=2"],
    "idp, a quarter of the probes, Muon": ["train_idp_mlp_lowdim", "probe_fraction=0.25", "optimizer=muon"],
    "idp, running reference": [
        "train_idp_mlp_lowdim",
        "++policy.reference=ema",
        "++policy.self_neighbor=false",
        "++policy.topk=5",
    ],
    "idp, memory bank": ["train_idp_mlp_lowdim", "++policy.bank_size=24"],
    "idp, drifting proposals": [
        "train_idp_mlp_lowdim",
        "++policy.proposal={noise: gaussian, samples: 3, assign: drift}",
    ],
    "naive_drifting": ["train_naive_drifting_mlp_lowdim"],
    "naive_drifting, weighted": [
        "train_naive_drifting_mlp_lowdim",
        "++policy.positives=weighted",
        "++policy.mse_coeff=1.0",
        "++policy.probe_coeff=1.0",
    ],
    "naive_drifting, nearest": ["train_naive_drifting_mlp_lowdim", "++policy.positives=knn", "++policy.space=flat"],
    "mip": ["train_mip_mlp_lowdim"],
    "flow": ["train_flow_mlp_lowdim"],
    # A larger eps: else AdamW turns the rounding of tiny gradients into steps of full length.
    "upstream's diffusion": ["train_diffusion_unet_lowdim_workspace", "optimizer.eps=1.0e-3"],
}


def steps(name: str, *overrides: str, data: str) -> dict[str, torch.Tensor]:
    """Losses, gradients of all steps, and weights after the last."""
    cfg = load_config(name, "preset=debug", f"task.dataset.zarr_path={data}", *overrides)
    run = hydra.utils.get_class(cfg._target_)(cfg, output_dir="unused")
    run.prepare()
    result: dict[str, torch.Tensor] = {}

    def keep_gradients(*_):
        for key, parameter in run.model.named_parameters():
            if parameter.grad is not None:
                result[f"gradient {len([k for k in result if k.endswith(key)])} {key}"] = parameter.grad.clone()

    run.optimizer.register_step_pre_hook(keep_gradients)
    batches = run.stream.batches()
    losses = []
    for run.global_step in range(STEPS):
        run.model.set_progress(run.global_step / STEPS)
        run.ranks.start_step(run.settings.seed, run.global_step)
        losses.append(run.optimise(batches))
    result["losses"] = torch.tensor(losses)
    result |= {f"weight {key}": value for key, value in run.model.state_dict().items() if torch.is_tensor(value)}
    result["random numbers"] = run.random_state.state_dict()["torch"]
    return result


class FailingPolicy(MIPPolicy):
    """Fails in the second epoch of preset=debug on one rank: raises, or is killed, as FAULT="<rank> <fault>" says."""

    def loss(self, cond, actions):
        rank, fault = os.environ["FAULT"].split()
        if self.training and self.progress and self.progress >= 0.5 and os.environ.get("RANK") == rank:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("a fault of one rank")
        return super().loss(cond, actions)


def main(output: str, data: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    results = {name: steps(*CASES[name], data=data) for name in names or CASES}
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        torch.save(results, output)
    disconnect()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
