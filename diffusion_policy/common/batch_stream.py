"""Batches for training: an endless stream whose position is one number."""

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
    """A dataset indexed by whole batches, (number, indices): one gather where the dataset can, sample by sample where it cannot.

    In a worker process the random numbers of a batch are a function of its number: a dataset that augments gives the same batch
    to a run that was resumed, whichever worker makes it. In the run's own process they are the run's, which are saved.
    """

    def __init__(self, dataset: Dataset, seed: int):
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, batch: tuple[int, np.ndarray]) -> Any:
        number, indices = batch
        if get_worker_info() is not None:
            seed_everything(self.seed * 1_000_003 + number)
        if hasattr(self.dataset, "get_batch"):
            return self.dataset.get_batch(indices)
        return default_collate([self.dataset[i] for i in indices.tolist()])


class BatchStream:
    """Shuffled passes over a dataset, one after the other, without end.

    The order of pass p is a function of (seed, p) alone, so batch number n is known without having drawn the n - 1 before it:
    a resumed run continues with exactly the batch it would have seen.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        **loader: Any,
    ):
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise ConfigError(f"dataloader.batch_size={batch_size!r} must be a whole number, at least 1")
        if len(dataset) == 0:
            raise ConfigError("the dataset has no windows to train on")
        if drop_last and len(dataset) < batch_size:
            raise ConfigError(
                f"the dataset has {len(dataset)} windows, fewer than one batch of {batch_size}: lower "
                "dataloader.batch_size or set dataloader.drop_last=false"
            )
        self.source = _ByBatch(dataset, seed)
        self.size, self.batch_size, self.seed, self.shuffle = len(dataset), batch_size, seed, shuffle
        self.batches_per_pass = self.size // batch_size if drop_last else -(-self.size // batch_size)
        self.loader = loader

    @classmethod
    def from_config(cls, dataset: Any, loader: DictConfig, seed: int) -> BatchStream:
        """A stream with the options of a config's section `dataloader` or `val_dataloader`."""
        options: Any = OmegaConf.to_container(loader, resolve=True)
        options["pin_memory"] = bool(options.get("pin_memory")) and torch.cuda.is_available()
        if not options.get("num_workers"):
            options.pop("persistent_workers", None)
        return cls(dataset, seed=seed, **options)

    def indices(self, start: int) -> Iterator[torch.Tensor]:
        """Index batches from number `start` on."""
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

    def batches(self, start: int = 0) -> Iterator[Any]:
        """Batches from number `start` on."""
        # As numpy arrays: tensors would be sent to worker processes as handles of shared memory.
        sampler = ((number, indices.numpy()) for number, indices in enumerate(self.indices(start), start))
        # A generator of its own: an iterator of a DataLoader draws a seed, and must not draw it from the training's random numbers.
        try:
            return iter(
                DataLoader(self.source, batch_size=None, sampler=sampler, generator=torch.Generator(), **self.loader)
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"dataloader: {error}") from error

    def batch(self, number: int) -> Any:
        return self.source[number, next(self.indices(number)).numpy()]
