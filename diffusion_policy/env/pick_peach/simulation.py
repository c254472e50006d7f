"""The MuJoCo scene of Pick Peach, and its cameras."""

import atexit
import functools
import logging
import pathlib
from typing import Any

import numpy as np

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.gym_util.mujoco_point_cloud import choose_renderer, no_renderer

SCENE = pathlib.Path(__file__).with_name("scene.xml")
CAMERAS = ("front", "head")
JOINTS = ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate")


@functools.cache
def load_model() -> Any:
    """The model; all environments of a process share it, and nothing may change it."""
    logging.getLogger("OpenGL.acceleratesupport").setLevel(logging.WARNING)  # it tells what it does not find
    try:
        choose_renderer()
        import mujoco
    except ImportError:
        raise ConfigError("Pick Peach needs MuJoCo, which is not installed: pip install -e .[pick_peach]") from None
    return mujoco.MjModel.from_xml_path(str(SCENE))


@functools.cache
def _renderer(height: int, width: int) -> Any:
    import mujoco

    try:
        renderer = mujoco.Renderer(load_model(), height, width)
    except Exception as error:  # a missing OpenGL library can raise any type
        raise no_renderer("Pick Peach", error) from error
    atexit.register(renderer.close)  # before the library that draws is unloaded
    return renderer


def draw(data: Any, camera: str, height: int, width: int, shadows: bool = False) -> np.ndarray:
    """An image (height, width, 3) uint8. A software renderer takes ten times as long with shadows."""
    import mujoco

    renderer = _renderer(height, width)
    renderer.update_scene(data, camera=camera)
    renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = shadows
    renderer.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False
    return renderer.render().copy()
