"""A policy as one graph: raw observations, and the noise if it samples, to raw actions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.export.signature import NOISE, Signature, signature_of

NORMAL = (torch.randn, torch.randn_like)
#: Other random numbers; a policy that acts with them has no fixed graph.
RANDOM = (
    torch.rand,
    torch.rand_like,
    torch.randint,
    torch.randint_like,
    torch.randperm,
    torch.normal,
    torch.bernoulli,
    torch.multinomial,
    Tensor.normal_,
    Tensor.uniform_,
    Tensor.bernoulli_,
    Tensor.random_,
)


class GivenNoise(TorchFunctionMode):
    """Replaces the normal numbers that a policy draws by those of `noise` (batch, draws, ...), in their order.

    Without `noise` they are drawn, and `shapes` lists them. While a graph is captured, what does not depend on its
    inputs, such as the coefficients of a noise scheduler, is computed at once and becomes a constant.
    """

    def __init__(self, noise: Tensor | None = None):
        super().__init__()
        self.noise = noise
        self.shapes: list[tuple[int, ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in RANDOM:
            raise ConfigError(
                "this policy acts with random numbers that are not normal, such as random crops of images "
                "(eval_fixed_crop=true takes the centre), so it cannot be exported"
            )
        if func in NORMAL and self.noise is not None:
            self.shapes.append(())
            return self.noise[:, len(self.shapes) - 1]
        if torch.compiler.is_compiling() and not any(map(_is_traced, tree_leaves((args, kwargs)))):
            with _disable_current_modes():
                return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if func in NORMAL:
            self.shapes.append(tuple(out.shape))
        return out


def _is_traced(value: Any) -> bool:
    if isinstance(value, Tensor):
        return type(value) not in (Tensor, nn.Parameter)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


class Graph(nn.Module):
    """A policy as a function of the tensors of its signature, in their order."""

    def __init__(self, policy: Any, signature: Signature):
        super().__init__()
        self.policy = policy
        self.names = [field.name for field in signature.inputs]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        values = dict(zip(self.names, tensors, strict=True))
        with GivenNoise(values.pop(NOISE, None)):
            result = acting(self.policy)(values)
        return result["action"], result["action_pred"]


def acting(policy: Any) -> Any:
    """Return `predict_action` without its checks of values, if the policy has it."""
    return getattr(policy, "act_recorded", getattr(policy, "act", policy.predict_action))


@torch.no_grad()
def describe(policy: Any, rate_hz: float | None = None) -> Signature:
    """Return the signature of a policy, after a trial that counts its draws."""
    policy.eval().cpu().reset()
    values = {field.name: field.example(2) for field in signature_of(policy).inputs}
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        with GivenNoise() as mode:
            results.append(acting(policy)(values)["action_pred"])
    policy.reset()
    name = type(policy).__name__
    if not torch.equal(*results):
        raise ConfigError(f"{name} acts on its last prediction too (warm_start), so it is not one graph: switch it off")
    if len(set(mode.shapes)) > 1 or any(shape[0] != 2 for shape in mode.shapes):
        raise ConfigError(f"{name} cannot be exported: its draws have the shapes {sorted(set(mode.shapes))}")
    return signature_of(policy, mode.shapes, rate_hz)


@contextlib.contextmanager
def constant_schedule(policy: Any) -> Iterator[None]:
    """Let a noise scheduler make its steps outside of a graph that is captured: it makes them with numpy."""
    scheduler = getattr(policy, "noise_scheduler", None)
    if scheduler is None:
        yield
        return
    set_timesteps = scheduler.set_timesteps

    def outside(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            set_timesteps(*args, **kwargs)

    scheduler.set_timesteps = outside
    try:
        yield
    finally:
        del scheduler.set_timesteps


@torch.no_grad()
def capture(policy: Any, signature: Signature) -> torch.export.ExportedProgram:
    """Return the graph of a policy in eval mode, for batches of any size."""
    batch = torch.export.Dim("batch", min=1, max=1 << 20)
    example = tuple(field.example(2) for field in signature.inputs)
    dynamic = {"tensors": tuple({0: batch} for _ in example)}
    try:
        with constant_schedule(policy):
            return torch.export.export(Graph(policy, signature), example, dynamic_shapes=dynamic, strict=False)
    except Exception as error:  # torch has many, for what a graph cannot hold
        if isinstance(error, ConfigError):
            raise
        text = " ".join(str(error).split())[:300]
        raise ConfigError(f"{signature.policy} cannot be exported as one graph: {text}") from error
