"""A batch over several processes, the ranks of torch.distributed: a loss compares the samples of all of them.

All ranks must call these functions together, with as many samples each: in training, not in an evaluation, which one
rank does alone. In one process they change nothing.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from idp_workspace.geometry import Samples

#: Bytes that `gathered` has received on this rank, its own samples included.
received = 0


def size() -> int:
    """Return the number of ranks; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@torch.no_grad()
def gathered(features: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the features (N B, ...) and actions of all N ranks, in float32 and without gradient, rank after rank."""
    global received
    if size() == 1:
        return features, actions
    mine = torch.cat([x.detach().float().flatten(1) for x in (features, actions)], dim=1)  # one message
    everyone = mine.new_empty(size() * len(mine), mine.shape[1])
    dist.all_gather(list(everyone.chunk(size())), mine)
    received += everyone.numel() * everyone.element_size()
    width = math.prod(features.shape[1:])
    return everyone[:, :width].reshape(-1, *features.shape[1:]), everyone[:, width:].reshape(-1, *actions.shape[1:])


def in_batch_order(x: Tensor) -> Tensor:
    """Return what `gathered` returned in the order of the batch, of which rank r has the samples r, r + N, ..."""
    return x.reshape(size(), -1, *x.shape[1:]).transpose(0, 1).flatten(0, 1)


def whole_batch(features: Tensor, actions: Tensor, training: bool, mask: Tensor | None = None) -> Samples:
    """Return the samples of all ranks; those of this one in an evaluation, which one rank does alone."""
    if size() == 1 or not training:
        return Samples(features, actions, mask=mask)
    first = dist.get_rank() * len(features)
    if mask is None:
        return Samples(*gathered(features, actions), first=first)
    features, actions = gathered(features, torch.cat([actions, mask.unsqueeze(-1).to(actions.dtype)], dim=-1))
    return Samples(features, actions[..., :-1], first, actions[..., -1] > 0)


@torch.no_grad()
def mean(x: Tensor) -> Tensor:
    """Return the mean of x over the ranks."""
    if size() == 1:
        return x
    total = x.clone()
    dist.all_reduce(total)
    return total / size()
