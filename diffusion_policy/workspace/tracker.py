"""Optional tracking of a run with wandb."""

from __future__ import annotations

import pathlib
from typing import Any

from omegaconf import DictConfig, OmegaConf

from diffusion_policy.common.errors import ConfigError


class Tracker:
    """Sends records to wandb if the config's `logging.mode` asks for it; else does nothing. A context manager."""

    def __init__(self, cfg: DictConfig, folder: pathlib.Path):
        config: Any = OmegaConf.to_container(cfg, resolve=True)
        options = config["logging"]
        self.run: Any = None
        if options.get("mode", "disabled") != "disabled":
            try:
                import wandb
            except ImportError as error:
                raise ConfigError(
                    f"logging.mode={options['mode']} needs wandb, which is not installed: pip install wandb, or set "
                    "logging.mode=disabled"
                ) from error
            self.run = wandb.init(dir=str(folder), config=config, **options)

    def log(self, record: dict[str, Any]) -> None:
        if self.run is None:
            return
        import wandb

        media = {
            key: wandb.Video(value, format="mp4") if isinstance(value, str) and value.endswith(".mp4") else value
            for key, value in record.items()
        }
        self.run.log(media, step=record["global_step"])

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.run is not None:
            self.run.finish()
