"""robomimic's tasks observed through cameras."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from einops import rearrange
from gymnasium import spaces

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.env.robomimic.robomimic_wrapper import RobomimicWrapper
from diffusion_policy.env.robomimic.robosuite_task import RobosuiteTask

SUFFIX = "_image"


class RobomimicImageWrapper(RobomimicWrapper):
    """Observation {key: array} by shape_meta: images (3, H, W) uint8 of the camera in the key's name, low-dim float32.

    While `observing` is False, the observation keeps the last images: rendering takes most of the time of a step.
    `MultiStepWrapper` sets it for the steps inside a chunk of actions that no policy sees.

    Args:
        render_obs_key: the image shown in videos.

    Other arguments: see `RobomimicWrapper`.
    """

    def __init__(
        self,
        env: RobosuiteTask,
        shape_meta: Mapping,
        init_state: np.ndarray | None = None,
        render_obs_key: str = "agentview_image",
        terminate_on_success: bool = False,
    ):
        super().__init__(env, init_state, terminate_on_success=terminate_on_success)
        self.shapes = {key: tuple(meta["shape"]) for key, meta in shape_meta["obs"].items()}
        self.image_keys = [key for key, meta in shape_meta["obs"].items() if meta.get("type", "low_dim") == "rgb"]
        cameras = {key: key.removesuffix(SUFFIX) for key in self.image_keys}
        for key, camera in cameras.items():
            if not key.endswith(SUFFIX) or camera not in env.camera_names():
                raise ConfigError(
                    f"shape_meta has the image {key!r}, but {env.name} has only the cameras "
                    f"{', '.join(env.camera_names())} (a key is the camera's name and {SUFFIX})."
                )
        if render_obs_key not in self.image_keys:
            raise ConfigError(f"render_obs_key {render_obs_key!r} is none of the images {', '.join(self.image_keys)}.")
        self.cameras, self.render_obs_key = cameras, render_obs_key
        raw = env.get_observation()
        self.require(raw, [key for key in self.shapes if key not in cameras])
        for key, shape in self.shapes.items():
            if key not in cameras and raw[key].shape != shape:
                raise ConfigError(
                    f"shape_meta gives {key} the shape {shape}, but in {env.name} it has {raw[key].shape}."
                )
        self.observation_space = spaces.Dict(
            {
                key: spaces.Box(0, 255, shape, np.uint8)
                if key in cameras
                else spaces.Box(-np.inf, np.inf, shape, np.float32)
                for key, shape in self.shapes.items()
            }
        )
        self.observing = True
        self._seen = False  # whether the images of the last observation are new
        self._images: dict[str, np.ndarray] = {}  # the last images

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.observing = True
        return super().reset(seed=seed, options=options)

    def get_observation(self, raw: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        raw = self.env.get_observation() if raw is None else raw
        self._seen = self.observing
        if self.observing:
            self._images = {
                key: np.ascontiguousarray(rearrange(self._image(key), "h w c -> c h w")) for key in self.image_keys
            }
        return {key: self._images[key] if key in self._images else raw[key].astype(np.float32) for key in self.shapes}

    def _image(self, key: str) -> np.ndarray:
        _, height, width = self.shapes[key]
        return self.env.render(mode="rgb_array", height=height, width=width, camera_name=self.cameras[key])

    def render(self) -> Any:
        if not self._seen:
            return np.ascontiguousarray(self._image(self.render_obs_key))
        return np.ascontiguousarray(rearrange(self._images[self.render_obs_key], "c h w -> h w c"))
