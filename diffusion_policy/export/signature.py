"""Inputs and outputs of an exported policy: names, shapes, types, units and ranges. Stored in its file."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from diffusion_policy.common.errors import CheckpointError, ConfigError

NOISE = "noise"
#: Type of the numbers, and their units, of each kind of field.
KINDS = {
    "state": ("float32", "as in the dataset"),
    "image": ("uint8", "0 to 255; channels, height, width"),
    NOISE: ("float32", "standard normal numbers, or zeros"),
    "action": ("float32", "as in the dataset"),
}


@dataclasses.dataclass(frozen=True)
class Field:
    """A tensor (batch, *shape) of one of KINDS; `low` and `high` bound each of its numbers in the dataset."""

    name: str
    shape: tuple[int, ...]
    kind: str
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, KINDS[self.kind][0])

    def described(self) -> dict[str, Any]:
        """The field as JSON."""
        dtype, units = KINDS[self.kind]
        return {**dataclasses.asdict(self), "dtype": dtype, "units": units}

    def example(self, batch: int) -> torch.Tensor:
        """Draw values (batch, *shape), between `low` and `high` if they are known."""
        if self.kind == "image":
            return torch.randint(0, 256, (batch, *self.shape), dtype=torch.uint8)
        if self.low is None or self.high is None:
            return torch.randn(batch, *self.shape)
        low, high = torch.tensor(self.low), torch.tensor(self.high)
        return low + (high - low) * torch.rand(batch, *self.shape)


@dataclasses.dataclass(frozen=True)
class Signature:
    """The fields of a graph, and how its policy is used in a control loop."""

    inputs: tuple[Field, ...]
    outputs: tuple[Field, ...]
    policy: str
    n_obs_steps: int
    n_action_steps: int
    action_start: int
    """The step at which the executed actions begin, counted from the first observation."""
    nfe: int
    rate_hz: float | None = None

    @property
    def action(self) -> Field:
        return self.outputs[0]

    def described(self) -> dict[str, Any]:
        """The signature as JSON, which `from_json` reads."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields = {name: [field.described() for field in plain[name]] for name in ("inputs", "outputs")}
        return {**plain, **fields}


def signature_of(policy: Any, draws: Sequence[tuple[int, ...]] = (), rate_hz: float | None = None) -> Signature:
    """Return the signature of a policy that draws normal numbers of these shapes (batch, ...) per prediction."""
    if not hasattr(policy, "obs_shapes"):
        raise ConfigError(
            f"{type(policy).__name__} cannot be exported: it has no obs_shapes(), the shape of each observation's entry"
        )
    representation = getattr(policy, "representation", None)
    if representation is not None and any(
        field.rotations for field in (*representation.obs.values(), representation.action)
    ):
        raise ConfigError(
            "this policy converts rotations (task.rotations), which a graph does not hold: serve its checkpoint "
            "instead, or train without them"
        )
    steps = policy.n_obs_steps
    inputs = []
    for key, shape in policy.obs_shapes().items():
        kind = "image" if key in policy.rgb_keys else "state"
        low, high = recorded_range(policy, key, shape[-1:]) if kind == "state" else (None, None)
        inputs.append(Field(key, (steps, *shape), kind, low, high))
    if draws:
        inputs.append(Field(NOISE, (len(draws), *draws[0][1:]), NOISE))
    low, high = action_range(policy)
    chunk = policy.n_action_steps if getattr(policy, "pred_action_steps_only", False) else policy.horizon
    outputs = (
        Field("action", (policy.n_action_steps, policy.action_dim), "action", low, high),
        Field("action_pred", (chunk, policy.action_dim), "action", low, high),
    )
    start = getattr(policy, "action_start", steps - bool(getattr(policy, "oa_step_convention", True)))
    name, calls = type(policy).__name__, int(policy.nfe)
    return Signature(tuple(inputs), outputs, name, steps, policy.n_action_steps, start, calls, rate_hz)


def action_range(policy: Any) -> tuple[Any, Any]:
    """Bounds of each dimension of the actions in the dataset; of relative ones, those of the sum with the state."""
    bounds = recorded_range(policy, "action", (policy.action_dim,))
    relative = policy.representation.relative if hasattr(policy, "representation") else None
    if relative is None:
        return bounds
    key, first, last = relative
    states = recorded_range(policy, key, policy.obs_shapes()[key][-1:])
    low, high = (
        tuple(a + b for a, b in zip(bound, state[first:last], strict=True))
        for bound, state in zip(bounds, states, strict=True)
    )
    return low, high


def recorded_range(policy: Any, key: str, shape: Sequence[int]) -> tuple[Any, Any]:
    """Smallest and largest number of each dimension in the dataset that the normaliser was fitted on."""
    stats = policy.normalizer[key].get_input_stats()
    low, high = (tuple(stats[name].detach().expand(*shape).tolist()) for name in ("min", "max"))
    return low, high


# ---------------------------------------------------------------------- from a file
def from_json(data: Any, where: str) -> Signature:
    """Return the signature that `described` wrote; raises CheckpointError for anything else."""
    try:
        plain = {field.name: data[field.name] for field in dataclasses.fields(Signature)}
        for name in ("inputs", "outputs"):
            plain[name] = tuple(map(_field, plain[name]))
        out = Signature(**plain)
        numbers = (out.n_obs_steps, out.n_action_steps, out.nfe)
        ok = all(type(number) is int and 0 < number <= 10_000 for number in numbers)
        ok = ok and out.action_start in (out.n_obs_steps - 1, out.n_obs_steps)
        ok = ok and isinstance(out.policy, str) and (out.rate_hz is None or 0 < out.rate_hz < 1e6)
        ok = ok and [field.name for field in out.outputs] == ["action", "action_pred"] and len(out.inputs) > 0
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        ok = False
    if not ok:
        raise CheckpointError(f"{where} does not describe its inputs and outputs as an exported policy does")
    return out


def _field(data: Any) -> Field:
    field = Field(data["name"], tuple(data["shape"]), data["kind"], _numbers(data["low"]), _numbers(data["high"]))
    sizes = all(type(size) is int and 0 < size <= 1_000_000 for size in field.shape)
    if not (isinstance(field.name, str) and field.kind in KINDS and sizes and 2 <= len(field.shape) <= 5):
        raise ValueError("not a field")
    return field


def _numbers(values: Any) -> tuple[float, ...] | None:
    return None if values is None else tuple(map(float, values))
