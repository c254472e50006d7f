"""Observations that a robot or a script may hand to a policy."""

from __future__ import annotations

import pathlib
import traceback

import numpy as np
import torch
from hypothesis import strategies as st

from benchmarks.fuzz import ROOT, Finding
from benchmarks.fuzz_targets.mutate import StrategyTarget
from benchmarks.fuzz_targets.small import small_config, workspace_of

POLICIES = {
    "train_idp_mlp_lowdim": 5,
    "train_idp_transformer_lowdim": 5,
    "train_naive_drifting_unet_lowdim": 5,
    "train_diffusion_unet_lowdim_workspace": 20,
    "train_diffusion_transformer_lowdim_pusht_workspace": 20,
}
OUR_FILES = tuple(str(ROOT / package) for package in ("diffusion_policy", "idp_workspace"))
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
FILLS = (0.0, 1.0, -1.0, 250.0, 1e6, 1e30, 3e38, 1e300, float("nan"), float("inf"), -float("inf"))


def tensors(obs_dim: int) -> st.SearchStrategy:
    """Arrays of any content, mostly of the right shape (B, 2 or more, Do)."""
    right = st.tuples(st.integers(1, 4), st.integers(2, 4), st.just(obs_dim))
    shape = st.one_of(
        right,
        right,
        right,
        st.tuples(st.integers(0, 4), st.integers(0, 4), st.sampled_from([obs_dim - 1, obs_dim])),
        st.lists(st.integers(0, 6), max_size=5).map(tuple),
    )

    def make(shape, dtype, fill, other, noise):
        """Noise, one value everywhere, or one value first."""
        values = torch.full(shape, fill, dtype=torch.float64)
        if noise is not None:
            values = torch.randn(shape, generator=torch.Generator().manual_seed(noise), dtype=torch.float64) * fill
        elif values.numel():
            values.view(-1)[0] = other
        return values.to(dtype)

    dtype = st.one_of(st.just(torch.float32), st.just(torch.float32), st.sampled_from(DTYPES))
    return st.builds(
        make, shape, dtype, st.sampled_from(FILLS), st.sampled_from(FILLS), st.one_of(st.none(), st.integers(0, 9))
    )


def strategy_for(name: str) -> st.SearchStrategy:
    tensor = tensors(POLICIES[name])
    other = st.one_of(
        st.none(),
        st.integers(),
        st.floats(),
        st.text(max_size=5),
        st.binary(max_size=5),
        st.booleans(),
        tensor.map(lambda t: t.tolist()),
        tensor.filter(lambda t: t.dtype != torch.bfloat16).map(lambda t: t.numpy()),
        tensor.map(lambda t: t.to_sparse()),
        st.just(object()),
        tensor.map(lambda t: t.transpose(0, -1) if t.ndim else t),
        tensor.map(lambda t: {"obs": t}),
        st.just(np.array([None, "x"], dtype=object)),
        tensor.map(lambda t: t.requires_grad_() if t.is_floating_point() else t),
        st.just(torch.empty(2, 2, 5, device="meta")),
    )
    value = st.one_of(tensor, tensor, tensor, other)
    keys = st.one_of(
        st.just("obs"),
        st.sampled_from(["action", "past_action", "observation", "obs ", "OBS", "image"]),
        st.text(max_size=4),
        st.integers(),
        st.none(),
    )
    dictionary = st.one_of(*[value.map(lambda v: {"obs": v})] * 4, st.dictionaries(keys, value, max_size=3), other)
    return st.tuples(st.just(name), dictionary)


class ObservationTarget(StrategyTarget):
    """Correct results: finite actions of the right shape, or a ValueError or TypeError raised by the project's code."""

    batch = 100

    def __init__(self, folder: pathlib.Path, canary: pathlib.Path):
        self.strategy, self.policies = st.one_of(*map(strategy_for, POLICIES)), {}
        for name in POLICIES:
            workspace = workspace_of(small_config(folder, name), folder)
            workspace.prepare()
            self.policies[name] = workspace.policy.eval()

    def check(self, value) -> str:
        if value is None:
            return "read"
        name, observation = value
        policy = self.policies[name]
        try:
            result = policy.predict_action(observation)
        except (ValueError, TypeError) as error:
            where = traceback.extract_tb(error.__traceback__)[-1].filename
            if not where.startswith(OUR_FILES) or len(str(error)) < 15:
                raise
            return type(error).__name__
        action = result["action"]
        expected = (len(observation["obs"]), policy.n_action_steps, policy.action_dim)
        if tuple(action.shape) != expected or not torch.isfinite(action).all():
            raise Finding(
                f"actions of shape {tuple(action.shape)} instead of {expected}, or not finite: "
                f"{action.flatten()[:5].tolist()}"
            )
        return "read"

    def describe(self, value) -> str:
        if value is None:
            return ""
        name, observation = value

        def short(item):
            if isinstance(item, torch.Tensor):
                what = (
                    "" if item.device.type == "meta" or item.is_sparse else f" {item.detach().flatten()[:2].tolist()}"
                )
                return (
                    f"tensor {tuple(item.shape)} {item.dtype} {item.device}{' sparse' if item.is_sparse else ''}{what}"
                )
            return {key: short(child) for key, child in item.items()} if isinstance(item, dict) else repr(item)[:200]

        return f"{name}: {short(observation)}"
