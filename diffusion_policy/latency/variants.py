"""A policy in the ways it can run: eager, compiled, exported; and the iterative methods on the same network."""

from __future__ import annotations

import copy
import os
import shutil
import time
from collections.abc import Sequence
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf

from diffusion_policy.common.config_util import build, config_dir, register_configs, register_resolvers
from diffusion_policy.common.errors import ConfigError
from diffusion_policy.export.bundle import onnx_of, use_ddim

#: The methods compared, by label: their objective in config/, their network calls, whether DDIM replaces DDPM.
METHODS: dict[str, tuple[str, int, bool]] = {
    "DP": ("diffusion", 100, False),
    "DDIM": ("diffusion", 10, True),
    "Flow": ("flow", 9, False),
    "MIP": ("mip", 2, False),
}
#: Arguments of a policy that do not belong to its objective: networks, sizes and conditioning, by upstream's names.
NETWORK = (
    "model", "obs_encoder", "shape_meta", "horizon", "n_obs_steps", "n_action_steps", "obs_dim", "action_dim",
    "obs_as_cond", "obs_as_global_cond", "obs_as_local_cond", "pred_action_steps_only", "oa_step_convention",
    "diffusion_step_embed_dim", "down_dims", "kernel_size", "n_groups", "cond_predict_scale", "n_layer",
    "n_cond_layers", "n_head", "n_emb", "p_drop_emb", "p_drop_attn", "causal_attn", "time_as_cond", "crop_shape",
    "obs_encoder_group_norm", "eval_fixed_crop", "obs_encoder_width",
)  # fmt: skip
BACKENDS = ("eager", "compiled", "ONNX Runtime")
INT8 = "ONNX Runtime, int8"
#: An unrolled graph of more network calls takes minutes to export.
UNROLLED = 20


def stand_in(label: str, policy: Any, section: DictConfig) -> Any:
    """Return a policy of METHODS[label] with the network of `policy`, whose config is `section`.

    It was not trained for that method: its actions are meaningless, but take as long as those of a trained policy.
    """
    objective, calls, ddim = METHODS[label]
    register_resolvers()
    register_configs()
    with hydra.initialize_config_dir(str(config_dir()), version_base=None):
        method = hydra.compose("train", [f"objective={objective}"]).policy
    theirs, ours = (OmegaConf.to_container(part, resolve=True) for part in (method, section))
    assert isinstance(theirs, dict) and isinstance(ours, dict)
    arguments = {key: value for key, value in theirs.items() if key not in NETWORK}
    arguments |= {key: value for key, value in ours.items() if key in NETWORK}
    out = build(OmegaConf.create({"policy": arguments}), "policy")
    out.set_normalizer(policy.normalizer)
    if ddim:
        use_ddim(out, calls)
    out.nfe = calls
    return out.eval()


def backends(policy: Any, names: Sequence[str] = BACKENDS) -> dict[str, Any]:
    """Return the policy by backend, or the reason why that backend is not available."""
    makers = dict(zip((*BACKENDS, INT8), (lambda policy: policy, compiled, exported, in_int8), strict=True))
    return {name: makers[name](policy) for name in names}


def in_int8(policy: Any) -> Any:
    """Return the exported policy with int8 weights, or why there is none."""
    return exported(policy, int8=True)


def exported(policy: Any, int8: bool = False) -> Any:
    """Return the exported policy, or why there is none."""
    if policy.nfe > UNROLLED:
        return f"{policy.nfe} network calls are too many to unroll into one graph"
    try:
        return onnx_of(policy, int8)
    except ConfigError as error:
        return str(error)


def compiled(policy: Any) -> Any:
    """Return a copy with compiled networks, or why there is none."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None and shutil.which("clang++") is None:
        return f"torch.compile needs a C++ compiler, and there is none ({compiler})"
    out = copy.deepcopy(policy)
    for network in (out.model, getattr(out, "obs_encoder", None)):
        if network is not None:
            network.compile(dynamic=False)
    return out


def trial(policy: Any, obs: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Call a policy once; return how many milliseconds that took, and why it failed, if it did, as a compiler can."""
    start = time.perf_counter()
    reason = ""
    try:
        policy.predict_action(obs)
    except Exception as error:  # of any tool that a compiler calls
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return 1000 * (time.perf_counter() - start), reason
