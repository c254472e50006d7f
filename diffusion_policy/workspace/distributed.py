"""Training over several processes, the ranks, that torchrun or accelerate launch starts.

The batch size of a config is that of all ranks together. Of N ranks, rank r takes the rows r, r + N, r + 2 N, ... of
each batch, and the gradients are averaged, so a step computes what one process would. Rank 0, the main one, alone logs,
saves and evaluates. The launcher ends all ranks if one fails.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from diffusion_policy.common import launch
from diffusion_policy.common.config_util import resolve_device
from diffusion_policy.common.errors import ConfigError, UserError
from diffusion_policy.common.random_state import RandomState, seed_everything

#: The other ranks wait for evaluations on the main one, which may take hours.
TIMEOUT = datetime.timedelta(days=7)

Loss = Callable[[Any], torch.Tensor]


class RankLostError(UserError, RuntimeError):
    """Another rank ended in the middle of the training."""

    exit_code = 1


class OneProcess:
    """The ranks of a training of one process: nothing is shared and nothing waits."""

    rank, size = 0, 1

    @property
    def main(self) -> bool:
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """The device of this rank, for `training.device`."""
        return resolve_device(name)

    def parallel(self, policy: torch.nn.Module, loss: Callable[[Any, Any], torch.Tensor]) -> Loss:
        """loss(policy, batch) as a function of the batch whose gradient is averaged over the ranks."""
        return functools.partial(loss, policy)

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager:
        """The context of a backward pass. Only that of the last batch of a step needs the other ranks."""
        return contextlib.nullcontext()

    def random_state(self, device: torch.device) -> Any:
        """The random numbers that checkpoints hold."""
        return RandomState()

    def start_step(self, seed: int, step: int) -> None:
        """Called before each step."""

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Mean of a tensor over the ranks."""
        return value

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return flag

    def from_main(self, value: Any) -> Any:
        """The value that the main rank has."""
        return value

    def main_first(self) -> contextlib.AbstractContextManager:
        """Let the main rank pass first: it downloads, and fills caches that the others read."""
        return contextlib.nullcontext()

    def wait(self) -> None:
        """Wait until all ranks are here."""

    def watching(self) -> contextlib.AbstractContextManager:
        """Raise RankLostError for what a collective says if another rank has ended."""
        return contextlib.nullcontext()


class Ranks(OneProcess):
    """The same for the ranks of a launcher, with DDP and the collectives of accelerate."""

    def __init__(self, device: str) -> None:
        try:
            import accelerate
        except ImportError as error:
            raise ConfigError(
                f"training over {launch.world_size()} ranks needs accelerate: pip install "
                "'implicit-drifting-policy[dist]', or start train.py without a launcher"
            ) from error
        for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
            if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true":
                raise ConfigError(f"{name} is not supported, and networks of this size do not need it: use DDP")
        self._device = rank_device(device)
        self.accelerator = accelerate.Accelerator(
            cpu=self._device.type == "cpu",
            mixed_precision="no",  # training.precision says it
            kwargs_handlers=[
                accelerate.InitProcessGroupKwargs(timeout=TIMEOUT),
                accelerate.DistributedDataParallelKwargs(find_unused_parameters=True, broadcast_buffers=False),
            ],
        )
        self.rank, self.size = self.accelerator.process_index, self.accelerator.num_processes
        # Messages between the processes, not the devices: no rank waits for its GPU.
        self.group: Any = torch.distributed.new_group(backend="gloo", timeout=TIMEOUT)
        if not self.main:
            logging.disable(logging.WARNING)  # the main rank says the same
        # Not all objectives use all parameters. The newer name of broadcast_buffers is not in all versions of torch.
        for message in ("find_unused_parameters=True was specified", "`broadcast_buffers` is deprecated"):
            warnings.filterwarnings("ignore", message=message)

    def device(self, name: str) -> torch.device:
        return self._device

    def parallel(self, policy: torch.nn.Module, loss: Callable[[Any, Any], torch.Tensor]) -> Loss:
        self.model: Any = self.accelerator.prepare_model(RankLoss(policy, loss, self.noise))
        return lambda batch: self.model(batch)

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if last else self.accelerator.no_sync(self.model)

    def random_state(self, device: torch.device) -> Any:
        self.noise = BatchNoise(self.rank, self.size, device)
        state = RankRandomState(self.noise)
        state.load_state_dict(self.from_main(RandomState().state_dict()))
        return state

    def start_step(self, seed: int, step: int) -> None:
        """Dropout and augmentations differ between the ranks; a resumed run repeats them."""
        seed_everything((seed * 1_000_003 + step) * self.size + self.rank)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(value, reduction="mean")

    def any(self, flag: bool) -> bool:
        count = torch.tensor(float(flag))
        torch.distributed.all_reduce(count, group=self.group)
        return bool(count)

    def from_main(self, value: Any) -> Any:
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def main_first(self) -> contextlib.AbstractContextManager:
        return self.accelerator.main_process_first()

    def wait(self) -> None:
        torch.distributed.barrier(group=self.group)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not (isinstance(error, torch.distributed.DistBackendError) or "gloo/transport" in str(error)):
                raise
            raise RankLostError(
                f"another rank ended, so rank {self.rank} cannot go on: its error is above, or the launcher tells how "
                "it ended; the last checkpoint is complete, training.resume=true continues from it"
            ) from error


@functools.cache
def connect(device: str) -> OneProcess:
    """The ranks of this run, once per process."""
    return OneProcess() if launch.world_size() == 1 else Ranks(device)


def disconnect() -> None:
    """Leave the ranks at the end of a command that succeeded."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def rank_device(name: str) -> torch.device:
    """The device of this rank: a GPU of its own, or the CPU."""
    if name in ("auto", "cuda") and torch.cuda.is_available():
        ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
        if ranks > gpus:
            raise ConfigError(
                f"{ranks} ranks on this machine, but {gpus} GPUs: start one rank per GPU (--nproc-per-node={gpus}), or "
                "set training.device=cpu"
            )
        return resolve_device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
    if name in ("auto", "cpu"):
        return torch.device("cpu")
    resolve_device(name)  # says what is wrong with it alone
    raise ConfigError(f"training.device={name} is one device, but there are several ranks: use auto, cuda or cpu")


class RankLoss(torch.nn.Module):
    """The loss as the forward pass of a module, which DDP needs."""

    def __init__(self, policy: torch.nn.Module, loss: Callable[[Any, Any], torch.Tensor], noise: BatchNoise) -> None:
        super().__init__()
        self.policy, self.loss, self.noise = policy, loss, noise

    def forward(self, batch: Any) -> torch.Tensor:
        self.noise.rows = len(batch["action"])
        with self.noise:
            return self.loss(self.policy, batch)


class BatchNoise(TorchFunctionMode):
    """Random numbers of a loss: every rank draws those of the whole batch, alike, and takes the ones of its rows.

    So that a loss has the noise that it would have in one process. It applies to the functions in DRAWS, if they are
    given no generator. Draws per row may have several numbers, (rows * n, ...). Dropout is not among them: a mask is as
    large as the activations, so each rank draws its own.
    """

    NORMAL, UNIFORM = (torch.randn, torch.randn_like), (torch.rand, torch.rand_like)
    DRAWS = (*NORMAL, *UNIFORM, torch.randint, torch.randperm)

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        super().__init__()
        self.rank, self.size, self.rows = rank, size, 1
        self.generators = {kind: torch.Generator(kind) for kind in {"cpu", device.type}}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self.DRAWS or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        plan = func(*args, **{**kwargs, "device": "meta"})  # shape and type, without values
        device = kwargs.get("device") or (args[0].device if isinstance(args[0], torch.Tensor) else "cpu")
        options = {"generator": self.generators[torch.device(device).type], "device": device, "dtype": plan.dtype}
        if func is torch.randperm:
            return torch.randperm(len(plan), **options)
        shape = (plan.shape[0] * self.size, *plan.shape[1:]) if plan.ndim else ()
        if func is torch.randint:
            bounds = [arg for arg in args if isinstance(arg, int)]
            return self.own(torch.randint(*bounds, shape, **options))
        return self.own((torch.randn if func in self.NORMAL else torch.rand)(shape, **options))

    def own(self, drawn: torch.Tensor) -> torch.Tensor:
        """The share of this rank of numbers for all rows, in the order of the batch."""
        if drawn.ndim == 0:
            return drawn
        count = len(drawn) // self.size
        per_row = count // self.rows if count % self.rows == 0 else 1
        return drawn.unflatten(0, (-1, per_row))[self.rank :: self.size].flatten(0, 1) if count else drawn


class RankRandomState:
    """RandomState of a run over ranks: the noise that they share. It is that of one process before and after."""

    def __init__(self, noise: BatchNoise) -> None:
        self.generators = noise.generators

    def capture(self) -> dict[str, torch.Tensor]:
        return {kind: generator.get_state() for kind, generator in self.generators.items()}

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        for kind, generator in self.generators.items():
            generator.set_state(state[kind])

    def state_dict(self) -> dict[str, Any]:
        noise = self.capture()
        cuda = [noise["cuda"]] * torch.cuda.device_count() if "cuda" in noise else []
        return RandomState().state_dict() | {"torch": noise["cpu"], "cuda": cuda}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generators["cpu"].set_state(state["torch"])
        if "cuda" in self.generators and state["cuda"]:
            self.generators["cuda"].set_state(state["cuda"][0])
