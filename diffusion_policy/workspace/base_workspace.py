"""The state of a run, and how it is saved and loaded."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from diffusion_policy.common.config_util import get_class, register_resolvers
from diffusion_policy.common.errors import CheckpointError
from diffusion_policy.policy.loading import check_normalizer
from diffusion_policy.storage import checkpoint_io

register_resolvers()

#: The checkpoint before the latest one; a run continues from it if the latest is damaged.
PREVIOUS = "previous.ckpt"


class BaseWorkspace:
    """Owns the objects of a run.

    A checkpoint holds every attribute that has state_dict and load_state_dict, except those in `exclude_keys`, and the
    plain attributes named in `include_keys`.
    """

    include_keys: Sequence[str] = ()
    exclude_keys: Sequence[str] = ()

    def __init__(self, cfg: DictConfig, output_dir: str | None = None):
        self.cfg = cfg
        self._output_dir = output_dir

    @property
    def output_dir(self) -> str:
        return HydraConfig.get().runtime.output_dir if self._output_dir is None else str(self._output_dir)

    def run(self) -> Any:
        raise NotImplementedError("a workspace defines what its run does")

    # ------------------------------------------------------------------ saving
    def get_checkpoint_path(self, tag: str = "latest") -> pathlib.Path:
        return pathlib.Path(self.output_dir) / "checkpoints" / f"{tag}.ckpt"

    def save_checkpoint(
        self,
        path: str | None = None,
        tag: str = "latest",
        exclude_keys: Sequence[str] | None = None,
        include_keys: Sequence[str] | None = None,
    ) -> str:
        """Write the state of the run atomically; returns the path."""
        target = self.get_checkpoint_path(tag) if path is None else pathlib.Path(path)
        exclude = self.exclude_keys if exclude_keys is None else exclude_keys
        include = self.include_keys if include_keys is None else include_keys
        states = {
            name: value.state_dict()
            for name, value in self.__dict__.items()
            if hasattr(value, "state_dict") and hasattr(value, "load_state_dict") and name not in exclude
        }
        checkpoint_io.save(
            {
                "cfg": OmegaConf.to_container(self.cfg, resolve=True),
                "state_dicts": states,
                "attributes": {name: self.__dict__[name] for name in include},
            },
            target,
            previous=target.with_name(PREVIOUS) if target == self.get_checkpoint_path() else None,
        )
        return str(target.absolute())

    # ------------------------------------------------------------------ loading
    def load_payload(
        self,
        payload: dict[str, Any],
        exclude_keys: Sequence[str] | None = None,
        include_keys: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Load the states for which this workspace has an object, and the attributes in include_keys."""
        exclude = () if exclude_keys is None else exclude_keys
        attributes = payload.get("attributes", {})
        missing = [key for key in include_keys or () if key not in attributes]
        if missing:
            raise CheckpointError(
                f"the checkpoint has no {', '.join(missing)} (it has: {', '.join(attributes) or 'none'})"
            )
        include = [key for key in self.include_keys if key in attributes] if include_keys is None else include_keys
        for name, state in payload["state_dicts"].items():
            target = self.__dict__.get(name)
            if name in exclude or target is None:
                continue
            try:
                misfit = difference(state, target.state_dict())
                if misfit:
                    raise ValueError(misfit)
                target.load_state_dict(state, **kwargs)
                if isinstance(target, torch.optim.Optimizer):
                    check_optimizer(target)
                elif isinstance(target, torch.nn.Module):
                    check_normalizer(target)
            except CheckpointError:
                raise
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                raise CheckpointError(
                    f"the checkpoint's {name} does not fit this configuration (another architecture or size?): "
                    f"{shorten(str(error))}"
                ) from error
        for name in include:
            misfit = difference(attributes[name], self.__dict__.get(name))
            if misfit:
                raise CheckpointError(f"the checkpoint's {name} is damaged: {misfit}")
            self.__dict__[name] = attributes[name]

    def load_checkpoint(
        self,
        path: str | None = None,
        tag: str = "latest",
        exclude_keys: Sequence[str] | None = None,
        include_keys: Sequence[str] | None = None,
        trust: bool = False,
    ) -> dict[str, Any]:
        # Nothing is built from the file's config, so its targets need no check.
        payload = checkpoint_io.load(
            self.get_checkpoint_path(tag) if path is None else path, trust=trust, check_config=False
        )
        self.load_payload(payload, exclude_keys=exclude_keys, include_keys=include_keys)
        return payload

    @classmethod
    def create_from_checkpoint(
        cls,
        path: str,
        exclude_keys: Sequence[str] | None = None,
        include_keys: Sequence[str] | None = None,
        output_dir: str | None = None,
        trust: bool = False,
    ) -> BaseWorkspace:
        """The workspace that wrote `path`; called on a subclass, an instance of that."""
        payload = checkpoint_io.load(path, trust=trust)
        cfg = OmegaConf.create(payload["cfg"])
        kind = get_class(cfg.get("_target_"), BaseWorkspace) if cls is BaseWorkspace else cls
        instance = kind(cfg, output_dir=output_dir)
        instance.load_payload(payload, exclude_keys=exclude_keys, include_keys=include_keys)
        return instance


def difference(new: Any, old: Any, place: str = "") -> str | None:
    """How a state differs in kind from the one it replaces; None if it does not.

    Most objects take over any state, and fail in the middle of training if it holds a text for a number or a tensor of
    another shape. Keys that only one of them has are left to the object: versions of torch differ in them.
    """
    number, at = (int, float), f"{place} " if place else ""
    if isinstance(old, dict) and isinstance(new, dict):
        return next(filter(None, (difference(new[key], old[key], str(key)) for key in old.keys() & new.keys())), None)
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        if old.numel() and old.shape != new.shape:
            return f"{at}has shape {tuple(new.shape)}, expected {tuple(old.shape)}"
        return None
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return next(filter(None, (difference(a, b, place) for a, b in zip(new, old, strict=False))), None)
    alike = isinstance(new, type(old)) or (isinstance(new, number) and isinstance(old, number))
    unset = new is None and (isinstance(old, bool) or not isinstance(old, number))
    if old is None or alike or unset:
        return None
    return f"{at}is a {type(new).__name__}, expected a {type(old).__name__}"


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if a loaded state does not have the shape of its parameter."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if not isinstance(value, (int, float, torch.Tensor, type(None))):
                raise ValueError(f"{name} is a {type(value).__name__}")
            if isinstance(value, torch.Tensor) and value.ndim and value.shape != parameter.shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}")


def shorten(text: str, limit: int = 600) -> str:
    """Return `text` as one line of limited length."""
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[:limit]} ..."
