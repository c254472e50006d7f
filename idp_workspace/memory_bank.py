"""Features and actions of earlier batches, among which a small batch looks for neighbours."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from idp_workspace import ranks
from idp_workspace.geometry import Samples
from idp_workspace.geometry_variants import ROWS

if TYPE_CHECKING:  # policies import this module
    from idp_workspace.policy.base import GeneratorPolicy as Policy
    from idp_workspace.policy.idp_options import IDPOptions
else:
    Policy = object

try:
    from diffusion_policy.common.memory import available_bytes
except ImportError:  # upstream's own tree does not have it

    def available_bytes() -> float:
        return float("inf")


log = logging.getLogger(__name__)


class MemoryBank(nn.Module):
    """The last `size` samples, newest first: features (n, F) and actions (n, H D) side by side, in float32.

    They are saved with the policy. They are neither a parameter nor a buffer, so an average of the policy's weights
    does not copy them, and a checkpoint without them leaves the bank empty.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.rows = torch.zeros(0, 0)

    def __len__(self) -> int:
        return len(self.rows)

    def extended(self, batch: Samples) -> Samples:
        """Return the samples of a batch, followed by those of the bank, which is not empty."""
        self.rows = self.rows.to(batch.phi.device)
        features, actions = batch.phi.flatten(1).float(), batch.a.float()
        if self.rows.shape[1] != features.shape[1] + actions[0].numel():
            raise ValueError("the memory bank of the checkpoint does not fit the features and actions of this run")
        phi, a = self.rows[:, : features.shape[1]], self.rows[:, features.shape[1] :]
        return Samples(torch.cat([features, phi]), torch.cat([actions, a.view(-1, *actions.shape[1:])]), batch.first)

    @torch.no_grad()
    def push(self, phi: Tensor, actions: Tensor) -> None:
        """Add a batch; the oldest samples leave."""
        new = torch.cat([phi.flatten(1).float(), actions.flatten(1).float()], dim=1)
        if len(self) == 0:
            self.check_memory(len(new), new.shape[1], new.device)
        # A sample that is not finite would break the loss of every step until it leaves.
        new = torch.nan_to_num(new, nan=0.0, posinf=0.0, neginf=0.0)[: self.size]
        kept = self.rows[: self.size - len(new)].to(new.device).view(-1, new.shape[1])
        self.rows = torch.cat([new, kept])

    def check_memory(self, batch: int, width: int, device: torch.device) -> None:
        """Raise ValueError if the bank, twice while it changes, and the weights of a batch do not fit in memory."""
        needed = 4.0 * self.size * (2 * width + min(batch, ROWS))
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
        if needed > free:
            raise ValueError(
                f"bank_size={self.size} needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free; use a "
                "smaller bank"
            )

    # ------------------------------------------------------------------ state dict
    def get_extra_state(self) -> Tensor:
        return self.rows

    def set_extra_state(self, state: Any) -> None:
        if not (isinstance(state, Tensor) and state.ndim == 2 and state.is_floating_point()):
            raise ValueError("the memory bank must be a table of numbers (samples, features and actions)")
        self.rows = state[: self.size].detach().float().clone()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}_extra_state" in state_dict:  # else the run did not have a bank
            super()._load_from_state_dict(state_dict, prefix, *rest)


class Remembering(Policy):
    """Mixin of a policy: puts each training batch into a bank and looks for neighbours there, if bank_size > 0.

    The bank holds features of the averaged encoder, because they change slowly. If a training loop, such as
    upstream's, does not pass the averaged policy, they are those of the encoder in training.
    """

    options: IDPOptions
    bank: MemoryBank | None
    _last: tuple[Tensor, Tensor, Samples | None] | None

    def make_bank(self) -> None:
        self.bank = MemoryBank(self.options.bank_size) if self.options.bank_size and self.options.geometry else None
        self._average: tuple[Any, ...] = ()  # the averaged policy, in a tuple: it is not a part of this one

    def set_average(self, policy: Any) -> None:
        self._average = () if policy is None else (policy,)

    def among(self, batch: Samples) -> Samples | None:
        """Return the samples among which those of a process look for neighbours; None for those alone."""
        if self.bank is None or len(self.bank) == 0 or not self.training:
            return batch if batch.mask is not None or (ranks.size() > 1 and self.training) else None
        return self.bank.extended(batch)

    def loss_of(self, obs: Tensor | dict[str, Tensor], actions: Tensor) -> Tensor:
        loss = super().loss_of(obs, actions)
        if self.bank is not None and self.training:
            if len(self.bank) == 0 and not self._average:
                log.warning("the weights are not averaged: the memory bank holds features of the encoder in training")
            batch = ranks.gathered(self.slow_features(obs), actions.detach())
            self.bank.push(*map(ranks.in_batch_order, batch))
        return loss

    @torch.no_grad()
    def slow_features(self, obs: Tensor | dict[str, Tensor]) -> Tensor:
        """Return phi of the averaged encoder, or that of the last loss."""
        if not self._average:
            assert self._last is not None
            return self._last[0]
        generator = self._average[0].generator
        return generator.embedding(generator.encode(obs))
