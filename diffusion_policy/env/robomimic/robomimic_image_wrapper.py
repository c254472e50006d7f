"""robomimic's tasks observed through cameras."""

import numpy as np
from gymnasium import spaces

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.env.robomimic.robomimic_wrapper import RobomimicWrapper

SUFFIX = "_image"


class RobomimicImageWrapper(RobomimicWrapper):
    """Observation {key: array} as `shape_meta` says: pictures (3, H, W) uint8 of the camera in the key's name, and numbers float32.

    `observing` False leaves the pictures of the last step in the observation instead of rendering new ones, which take most of the time
    of a step: `MultiStepWrapper` sets it for the steps inside a chunk of actions that no policy sees.
    Other arguments: see `RobomimicWrapper`; videos show the picture of `render_obs_key`.
    """

    def __init__(self, env, shape_meta, init_state=None, render_obs_key="agentview_image", terminate_on_success=False):
        super().__init__(env, init_state, terminate_on_success=terminate_on_success)
        self.shapes = {key: tuple(meta["shape"]) for key, meta in shape_meta["obs"].items()}
        self.image_keys = [key for key, meta in shape_meta["obs"].items() if meta.get("type", "low_dim") == "rgb"]
        cameras = {key: key.removesuffix(SUFFIX) for key in self.image_keys}
        for key, camera in cameras.items():
            if not key.endswith(SUFFIX) or camera not in env.camera_names():
                raise ConfigError(
                    f"shape_meta has the picture {key!r}, but {env.name} has only the cameras {', '.join(env.camera_names())} "
                    f"(a key is the camera's name and {SUFFIX})."
                )
        if render_obs_key not in self.image_keys:
            raise ConfigError(
                f"render_obs_key {render_obs_key!r} is none of the pictures {', '.join(self.image_keys)}."
            )
        self.cameras, self.render_obs_key = cameras, render_obs_key
        raw = env.get_observation()
        self.require(raw, [key for key in self.shapes if key not in cameras])
        for key, shape in self.shapes.items():
            if key not in cameras and raw[key].shape != shape:
                raise ConfigError(
                    f"shape_meta says that {key} has the shape {shape}, in {env.name} it has {raw[key].shape}."
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
        self._seen, self._pictures = False, {}  # whether the last observation's pictures are new; the last pictures

    def reset(self, *, seed=None, options=None):
        self.observing = True
        return super().reset(seed=seed, options=options)

    def get_observation(self, raw=None):
        raw = self.env.get_observation() if raw is None else raw
        self._seen = self.observing
        if self.observing:
            self._pictures = {
                key: np.ascontiguousarray(self._picture(key).transpose(2, 0, 1)) for key in self.image_keys
            }
        return {
            key: self._pictures[key] if key in self._pictures else raw[key].astype(np.float32) for key in self.shapes
        }

    def _picture(self, key):
        _, height, width = self.shapes[key]
        return self.env.render(mode="rgb_array", height=height, width=width, camera_name=self.cameras[key])

    def render(self):
        if not self._seen:
            return np.ascontiguousarray(self._picture(self.render_obs_key))
        return np.ascontiguousarray(self._pictures[self.render_obs_key].transpose(1, 2, 0))
