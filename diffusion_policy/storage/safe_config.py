"""What a config from a file may build: which classes, in which section, with which numbers.

A `_target_` is a call: building the config inside a checkpoint would let the author of the file call anything that
Python can import. Its targets are therefore resolved here first. Only classes of known packages pass, and each section
builds only what it is for: a dataset in the section of the policy could write files. The config that a user writes or
passes on the command line is not restricted.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import os
from collections.abc import Sequence
from typing import Any

import hydra

from diffusion_policy.common.errors import CheckpointError
from diffusion_policy.storage.plain_config import plain_config

#: Plugins register with an entry point of this group; their classes may be built, like those of this package.
PLUGINS = "diffusion_policy.plugins"
#: Environment variable with further packages, separated by commas.
VARIABLE = "DIFFUSION_POLICY_ALLOWED_PACKAGES"
#: Parts of libraries whose classes may be built.
LIBRARIES = ("torch.nn", "torch.optim", "diffusers.schedulers")
#: Functions that upstream's configs call.
FUNCTIONS = ("diffusion_policy.model.vision.model_getter.get_resnet",)
RUNNER = "task.env_runner"
#: What each section may build: classes with one of these among their bases. "" is the workspace.
ROLES = {
    "policy": ("torch.nn.modules.module.Module", "diffusers.schedulers.scheduling_utils.SchedulerMixin"),
    "task.features": ("torch.nn.modules.module.Module",),
    RUNNER: (
        "diffusion_policy.env_runner.base_lowdim_runner.BaseLowdimRunner",
        "diffusion_policy.env_runner.base_image_runner.BaseImageRunner",
    ),
    "task.dataset": ("torch.utils.data.dataset.Dataset",),
    "optimizer": ("torch.optim.optimizer.Optimizer",),
    "ema": ("diffusion_policy.model.diffusion.ema_model.EMAModel",),
    "": ("diffusion_policy.workspace.base_workspace.BaseWorkspace",),
}
#: Largest numbers in the sections that are built. They are far above any use and far below what fills a memory.
LIMITS = {
    "n_test": 1000,
    "n_train": 1000,
    "n_test_vis": 1000,
    "n_train_vis": 1000,
    "n_envs": 256,
    "max_steps": 10_000,
    "horizon": 10_000,
    "n_obs_steps": 1000,
    "n_action_steps": 10_000,
    "n_latency_steps": 1000,
    "pad_before": 10_000,
    "pad_after": 10_000,
    "fps": 1000,
    "render_size": 4096,
    "render_hw": 4096,
    "num_points": 100_000,
    "n_layer": 1000,
    "n_cond_layers": 1000,
    "num_train_timesteps": 100_000,
    "num_inference_steps": 10_000,
    "nfe": 10_000,
    "seed": 2**32,
    "test_start_seed": 2**32,
    "train_start_seed": 2**32,
}
OTHER_LIMIT = 1_000_000
SEED = "training.seed"  # of an evaluation


def checked_config(cfg: Any, where: str, sections: Sequence[str] | None = None) -> dict[str, Any]:
    """`cfg` as plain data, if every `_target_` in it is allowed; raises CheckpointError.

    sections: those that the caller builds, of ROLES; None for all. Outside of them every `_target_` is removed instead
    of checked.
    """
    plain = plain_config(cfg, where)
    out = _visit(plain, where, tuple(ROLES) if sections is None else sections, "", None)
    if sections is not None:
        for section in sections:
            value = _value(out, section, where)
            if not isinstance(value, dict) and not (value is None and section == RUNNER):
                raise CheckpointError(f"the section {section} of the config in {where} is a {type(value).__name__}")
        seed = _value(out, SEED, where) if RUNNER in sections else 0
        if not isinstance(seed, int) or not 0 <= seed < 2**32:
            raise CheckpointError(f"{SEED} of the config in {where} is not a seed: {str(seed)[:50]!r}")
    return out


def _value(cfg: dict[str, Any], place: str, where: str) -> Any:
    """Return the value at cfg.<place>, which must be there."""
    node: Any = cfg
    for name in place.split("."):
        if not isinstance(node, dict) or name not in node:
            raise CheckpointError(f"the config in {where} has no {place}")
        node = node[name]
    return node


def _visit(node: Any, where: str, sections: Sequence[str], path: str, role: str | None) -> Any:
    """A copy of `node` whose targets are checked against the role of their section, and removed without one."""
    name = path.removeprefix("teacher.")  # a distillation's config holds the one of its teacher
    if role is None and name in sections:
        role = name
    if isinstance(node, dict):
        out = {}
        for key, child in node.items():
            if key == "_target_":
                if role is None:
                    continue
                _check_target(child, where, path, role)
            here = None if role == "" else role  # the workspace's own target; its sections have their own roles
            out[key] = _visit(child, where, sections, f"{path}.{key}".strip("."), here)
        if role and out.get("_target_") in FUNCTIONS:
            out["weights"] = None  # the file has the weights; a path or a download in it is not followed
        return out
    if isinstance(node, list):
        return [_visit(child, where, sections, f"{path}[{number}]", role) for number, child in enumerate(node)]
    if role:
        if node == "???":
            raise CheckpointError(f"the config in {where} leaves {path} open (???)")
        _check_number(node, where, path)
    return node


def _check_number(value: Any, where: str, path: str) -> None:
    key = path.rpartition(".")[2].partition("[")[0]
    limit = LIMITS.get(key, OTHER_LIMIT)
    if isinstance(value, (int, float)) and (isinstance(value, int) or key in LIMITS) and abs(value) > limit:
        raise CheckpointError(
            f"the config in {where} sets {path} to {value:g}, more than the {limit:,} that a file may ask for. If you "
            "trust the source of the file, pass --trust-checkpoint"
        )


def _check_target(target: Any, where: str, path: str, role: str) -> None:
    if not isinstance(target, str) or (found := _allowed(target)) is None:
        raise CheckpointError(
            f"the config in {where} names {str(target)[:200]!r} (at {path or 'its top'}), which is not in a package "
            f"that a file may use ({', '.join((*_packages(), *LIBRARIES))}). If you trust the source of the file, pass "
            f"--trust-checkpoint, or allow your own package permanently: export {VARIABLE}=name_of_the_package"
        )
    bases = {f"{base.__module__}.{base.__qualname__}" for base in getattr(found, "__mro__", ())}
    if target not in FUNCTIONS and not bases & set(ROLES[role]):
        kinds = " or ".join(base.rpartition(".")[2] for base in ROLES[role])
        raise CheckpointError(
            f"the config in {where} names {target!r} (at {path or 'its top'}), which is not a {kinds}: this section "
            "may build nothing else. If you trust the source of the file, pass --trust-checkpoint"
        )


def _packages() -> tuple[str, ...]:
    named = (name.strip() for name in os.environ.get(VARIABLE, "").split(","))
    return ("diffusion_policy", *_plugins(), *(name for name in named if name))


@functools.cache
def _plugins() -> tuple[str, ...]:
    return tuple(sorted({point.value for point in importlib.metadata.entry_points(group=PLUGINS)}))


def _inside(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _allowed(target: str) -> Any:
    """The class `target` if an allowed package defines it, else None. It is imported only if its name is allowed.

    A module exposes everything it has imported (`diffusion_policy.x.os.system`), so the defining module is checked as
    well. Functions may do anything with their arguments, so only classes pass.
    """
    places = (*_packages(), *LIBRARIES)
    if not _inside(target, places):
        return None
    try:
        found = hydra.utils.get_object(target)
    except Exception as error:
        raise CheckpointError(f"the config names {target[:200]!r}, which cannot be imported here: {error}") from error
    if target in FUNCTIONS or (inspect.isclass(found) and _inside(found.__module__, places)):
        return found
    return None
