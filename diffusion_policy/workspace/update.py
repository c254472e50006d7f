"""The update of the weights at the end of a training step, unless its loss or its gradient is not finite."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from diffusion_policy.workspace import divergence

if TYPE_CHECKING:
    from diffusion_policy.workspace.train_workspace import TrainWorkspace


class Update:
    """One optimiser step. The host reads loss and gradient norm in every step, for which it waits for the device."""

    def __init__(self, run: TrainWorkspace) -> None:
        self.run = run

    def backward(self, loss: torch.Tensor) -> None:
        scaler = self.run.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()

    def gradient_norm(self) -> torch.Tensor:
        if self.run.scaler is not None:
            self.run.scaler.unscale_(self.run.optimizer)
        gradients = [p.grad for p in self.run.model.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    def clip(self, norm: torch.Tensor) -> None:
        limit = self.run.settings.grad_clip_norm
        if limit is not None:
            torch.nn.utils.clip_grads_with_norm_(self.run.model.parameters(), limit, norm)

    def finish(self, average: bool) -> None:
        """What every step does, whether or not it changed the weights."""
        run = self.run
        if run.scaler is not None:
            run.scaler.update()
        run.optimizer.zero_grad(set_to_none=True)
        run.lr_scheduler.step()
        if average and run.ema is not None:
            run.ema.step(run.model)

    def __call__(self, mean_loss: torch.Tensor, random_state: Any) -> float | None:
        """Update the weights from the gradients; returns the loss, None if the step was skipped.

        random_state: from before the step, to repeat it.
        """
        run = self.run
        loss, norm = torch.stack([mean_loss, self.gradient_norm().to(mean_loss)]).tolist()
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            self.clip(torch.tensor(norm, device=run.device))
            run.optimizer.step()
        elif not self.overflow(loss):
            divergence.skip_or_stop(run, loss, norm, random_state)
        self.finish(average=finite)
        return loss if finite else None

    def overflow(self, loss: float) -> bool:
        """Whether a gradient was too large for float16 only because of the scaler's factor, which it then lowers."""
        return self.run.scaler is not None and math.isfinite(loss) and self.run.scaler.get_scale() > 1

    def settle(self) -> list[float]:
        """The losses that the host did not know yet; called when a record is due."""
        return []


class DeviceUpdate(Update):
    """The same without waiting for the device: it skips a step by itself, and the host learns of it in `settle`.

    For AdamW in one kernel, which takes a flag to skip the step. The average of the weights then takes a step towards
    unchanged weights.
    """

    def __init__(self, run: TrainWorkspace) -> None:
        super().__init__(run)
        self.steps: list[torch.Tensor] = []  # (loss, norm, whether it was broken) of the steps since the last record

    def __call__(self, mean_loss: torch.Tensor, random_state: Any) -> None:
        run, norm = self.run, self.gradient_norm().to(mean_loss)
        skipped = ~(mean_loss.isfinite() & norm.isfinite())
        broken = skipped if run.scaler is None else ~mean_loss.isfinite()  # a scaler meets large gradients itself
        self.clip(norm)
        run.optimizer.found_inf = skipped.float()  # type: ignore[attr-defined]
        run.optimizer.step()
        del run.optimizer.found_inf  # type: ignore[attr-defined]
        self.finish(average=True)
        self.steps.append(torch.stack([mean_loss, norm, broken.to(mean_loss)]))

    def settle(self) -> list[float]:
        if not self.steps:
            return []
        steps = torch.stack(self.steps).tolist()
        self.steps.clear()
        first = self.run.global_step - len(steps)
        broken = [(first + i, loss, norm) for i, (loss, norm, is_broken) in enumerate(steps) if is_broken]
        for step in broken:
            divergence.skipped_or_stop(self.run, *step)
        return [loss for loss, _, is_broken in steps if not is_broken and math.isfinite(loss)]


def make_update(run: TrainWorkspace) -> Update:
    """On a GPU, AdamW works in one kernel and needs no host; other optimisers and devices have the plain update."""
    optimizer = run.optimizer
    if run.device.type != "cuda" or not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return Update(run)
    fuse(optimizer)
    optimizer.register_load_state_dict_post_hook(fuse)
    alone = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)  # a subclass may do more than the kernel
    return DeviceUpdate(run) if alone else Update(run)


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Let Adam or AdamW use one kernel for all parameters, also after a state without that was loaded."""
    for group in optimizer.param_groups:
        group.update(fused=True, foreach=False)
    for parameter, state in optimizer.state.items():
        if "step" in state:
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=parameter.device)
