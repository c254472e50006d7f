"""The state of a run, and how it is saved and loaded."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from diffusion_policy.common.config_util import get_class, register_resolvers
from diffusion_policy.common.errors import CheckpointError
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
                target.load_state_dict(state, **kwargs)
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                raise CheckpointError(
                    f"the checkpoint's {name} does not fit this configuration (another architecture or size?): "
                    f"{shorten(str(error))}"
                ) from error
        for name in include:
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


def shorten(text: str, limit: int = 600) -> str:
    return text if len(text) <= limit else f"{text[:limit]} ..."
