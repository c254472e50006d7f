"""Which classes a config from a file may name.

A `_target_` is a call: building the config inside a checkpoint would let the author of the file call anything that
Python can import. Its targets are therefore resolved here first, and only classes of known packages pass. The config
that a user writes or passes on the command line is not restricted.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import os
from collections.abc import Sequence
from typing import Any

import hydra
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from diffusion_policy.common.errors import CheckpointError

#: Plugins register with an entry point of this group; their classes may be built, like those of this package.
PLUGINS = "diffusion_policy.plugins"
#: Environment variable with further packages, separated by commas.
VARIABLE = "DIFFUSION_POLICY_ALLOWED_PACKAGES"
#: Parts of libraries whose classes may be built.
LIBRARIES = ("torch.nn", "torch.optim", "diffusers.schedulers")
#: Functions that upstream's configs call.
FUNCTIONS = ("diffusion_policy.model.vision.model_getter.get_resnet",)


def checked_config(cfg: Any, where: str, sections: Sequence[str] | None = None) -> dict[str, Any]:
    """`cfg` with its interpolations resolved, if every `_target_` in it is allowed; raises CheckpointError.

    sections: those that the caller builds, such as "policy" or "task.env_runner". Outside of them every `_target_` is
    removed instead of checked.
    """
    try:
        resolved: Any = OmegaConf.to_container(OmegaConf.create(cfg), resolve=True)
    except (OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"the config in {where} cannot be read: {error}") from error
    if sections is not None:
        resolved = _without_targets(resolved, sections)
    _check(resolved, where, "")
    return resolved


def _without_targets(node: Any, sections: Sequence[str], path: str = "") -> Any:
    """A copy of `node` in which only `sections` can be built."""
    if path in sections:
        return node
    if isinstance(node, dict):
        return {
            name: _without_targets(child, sections, f"{path}.{name}".strip("."))
            for name, child in node.items()
            if name != "_target_"
        }
    if isinstance(node, list):
        return [_without_targets(child, sections, f"{path}[{number}]") for number, child in enumerate(node)]
    return node


def _check(node: Any, where: str, path: str) -> None:
    if isinstance(node, dict):
        if "_target_" in node:
            _check_target(node["_target_"], where, path)
        for name, child in node.items():
            _check(child, where, f"{path}.{name}".strip("."))
    elif isinstance(node, list):
        for number, child in enumerate(node):
            _check(child, where, f"{path}[{number}]")
    elif isinstance(node, str) and "${" in node:
        # An escaped interpolation: harmless here, but resolved when the config is used.
        raise CheckpointError(f"the config in {where} hides an interpolation at {path}: {node!r}")


def _check_target(target: Any, where: str, path: str) -> None:
    if not isinstance(target, str) or not _allowed(target):
        raise CheckpointError(
            f"the config in {where} names {target!r} (at {path or 'its top'}), which is not in a package that a file "
            f"may use ({', '.join((*_packages(), *LIBRARIES))}). If you trust the source of the file, pass "
            f"--trust-checkpoint, or allow your own package permanently: export {VARIABLE}=name_of_the_package"
        )


def _packages() -> tuple[str, ...]:
    named = (name.strip() for name in os.environ.get(VARIABLE, "").split(","))
    return ("diffusion_policy", *_plugins(), *(name for name in named if name))


@functools.cache
def _plugins() -> tuple[str, ...]:
    return tuple(sorted({point.value for point in importlib.metadata.entry_points(group=PLUGINS)}))


def _inside(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _allowed(target: str) -> bool:
    """Whether `target` is a class defined in an allowed package. Its module is imported only if the name is allowed.

    A module exposes everything it has imported (`diffusion_policy.x.os.system`), so the defining module is checked as
    well. Functions may do anything with their arguments, so only classes pass.
    """
    if target in FUNCTIONS:
        return True
    places = (*_packages(), *LIBRARIES)
    if not _inside(target, places):
        return False
    try:
        found = hydra.utils.get_object(target)
    except Exception as error:
        raise CheckpointError(f"the config names {target!r}, which cannot be imported here: {error}") from error
    return inspect.isclass(found) and _inside(found.__module__, places)
