"""Batches for training: an endless stream whose position is a single number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.common.random_state import seed_everything


class _ByBatch(Dataset):
    """A dataset indexed by whole batches, (number, indices).

    It calls get_batch if the dataset has it, else it collates single samples. In a worker process the random numbers of
    a batch depend on its number alone, so a dataset that augments gives a resumed run the same batches. In the main
    process they are the run's random numbers, which checkpoints hold.
    """

    def __init__(self, dataset: Dataset, seed: int, rank: int):
        self.dataset, self.seed = dataset, seed * 1_000_003 + rank * 1_000_000_007

    def __getitem__(self, batch: tuple[int, np.ndarray]) -> Any:
        number, indices = batch
        if get_worker_info() is not None:
            seed_everything(self.seed + number)
        if hasattr(self.dataset, "get_batch"):
            return self.dataset.get_batch(indices)
        return default_collate([self.dataset[i] for i in indices.tolist()])


class BatchStream:
    """Shuffled passes over a dataset, without end.

    The order of pass p depends on (seed, p) alone, so batch n is known without drawing those before it: a resumed run
    continues with exactly the batch it would have seen. Of several ranks, each gets its rows of every batch.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int = 0,
        ranks: int = 1,
        **loader: Any,
    ):
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise ConfigError(f"dataloader.batch_size={batch_size!r} must be a whole number, at least 1")
        if batch_size % ranks:
            raise ConfigError(
                f"dataloader.batch_size={batch_size} is the batch of all ranks, and {ranks} of them cannot share it "
                f"equally: choose a multiple of {ranks}"
            )
        if len(dataset) == 0:
            raise ConfigError("the dataset has no windows to train on")
        if drop_last and len(dataset) < batch_size:
            raise ConfigError(
                f"the dataset has {len(dataset)} windows, fewer than one batch of {batch_size}: lower "
                "dataloader.batch_size or set dataloader.drop_last=false"
            )
        self.source = _ByBatch(dataset, seed, rank)
        self.rank, self.ranks = rank, ranks
        self.size, self.batch_size, self.seed, self.shuffle = len(dataset), batch_size, seed, shuffle
        self.batches_per_pass = self.size // batch_size if drop_last else -(-self.size // batch_size)
        self.loader = loader

    @classmethod
    def from_config(cls, dataset: Any, loader: DictConfig, seed: int, rank: int = 0, ranks: int = 1) -> BatchStream:
        """A stream with the options of a config's section `dataloader` or `val_dataloader`."""
        options: Any = OmegaConf.to_container(loader, resolve=True)
        options["pin_memory"] = bool(options.get("pin_memory")) and torch.cuda.is_available()
        if not options.get("num_workers"):
            options.pop("persistent_workers", None)
        return cls(dataset, seed=seed, rank=rank, ranks=ranks, **options)

    def indices(self, start: int) -> Iterator[torch.Tensor]:
        """Dataset indices of the batches, from number `start` on."""
        number, offset = divmod(start, self.batches_per_pass)
        while True:
            if self.shuffle:
                order = torch.randperm(
                    self.size, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + number)
                )
            else:
                order = torch.arange(self.size)
            for i in range(offset, self.batches_per_pass):
                yield order[i * self.batch_size : (i + 1) * self.batch_size]
            number, offset = number + 1, 0

    def own(self, indices: torch.Tensor) -> torch.Tensor:
        """The rows of this rank. A short last batch is filled with its first windows, so that all have as many."""
        whole = -(-len(indices) // self.ranks) * self.ranks
        return indices[torch.arange(self.rank, whole, self.ranks) % len(indices)] if self.ranks > 1 else indices

    def batches(self, start: int = 0) -> Iterator[Any]:
        """Batches from number `start` on, the rows of this rank."""
        # numpy arrays, because tensors would be sent to worker processes through shared memory.
        sampler = ((number, self.own(indices).numpy()) for number, indices in enumerate(self.indices(start), start))
        # A separate generator: the iterator draws a seed, which must not come from the training's random numbers.
        try:
            return iter(
                DataLoader(self.source, batch_size=None, sampler=sampler, generator=torch.Generator(), **self.loader)
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"dataloader: {error}") from error

    def batch(self, number: int) -> Any:
        """Batch `number`, in this process."""
        return self.source[number, next(self.indices(number)).numpy()]

    def sample(self, count: int) -> Any:
        """The first `count` samples of the first batch, in this process."""
        return self.source[0, next(self.indices(0))[:count].numpy()]
