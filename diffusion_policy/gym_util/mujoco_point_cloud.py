"""Point clouds and images of a MuJoCo simulation, without a display."""

import ctypes.util
import glob
import importlib
import os
import sys
from typing import Any, ClassVar

import numpy as np
from einops import rearrange

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.common.point_cloud import View, farthest_points, points_in_view


def default_renderer() -> str:
    """Default of MUJOCO_GL: EGL on a machine with a GPU, else OSMesa if it is installed."""
    if os.uname().sysname == "Darwin":
        return "cgl"
    has_gpu = glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/dri/render*")
    return "osmesa" if not has_gpu and ctypes.util.find_library("OSMesa") else "egl"


def choose_renderer() -> None:
    """Set MUJOCO_GL to what fits this machine, unless the user has set it."""
    if not os.environ.get("MUJOCO_GL"):
        os.environ["MUJOCO_GL"] = default_renderer()
    # MuJoCo reads it on import. Imported before it was set, MuJoCo would open windows, and abort without a display.
    loaded = sys.modules.get("mujoco.gl_context")
    if loaded is not None and getattr(loaded, "_MUJOCO_GL", None) != os.environ["MUJOCO_GL"].lower().strip():
        importlib.reload(loaded)


def no_renderer(what: str, error: Exception) -> ConfigError:
    """The error for a missing renderer, with the command that installs one."""
    return ConfigError(
        f"{what} cannot be rendered with MUJOCO_GL={os.environ.get('MUJOCO_GL')}: {type(error).__name__}: {error}. "
        "Without a GPU: apt-get install libosmesa6, and set MUJOCO_GL=osmesa; with one: apt-get install libegl1, and "
        "MUJOCO_GL=egl."
    )


HIDDEN = 5  # a group of geometries that MuJoCo does not draw


class PointCloudGenerator:
    """Depth, images and point clouds from a camera of a simulation.

    With OSMesa, depth is silently wrong while a second renderer exists in the process. So only one generator per
    process has a renderer, and another one that renders closes it first. That takes a tenth of a second, so several
    environments should run in several processes.

    Args:
        model, data: MuJoCo's.
        camera: name of the camera.
        size: height and width of the image in pixels.
    """

    _renderer_of: ClassVar["PointCloudGenerator | None"] = None  # the generator of this process that has a renderer

    def __init__(self, model: Any, data: Any, camera: str, size: int):
        import mujoco

        self.model, self.data, self.camera, self.size = model, data, camera, size
        self.camera_id = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, camera)
        self.fovy = float(model.cam_fovy[self.camera_id])
        self._groups = model.geom_group.copy()
        # Shadows and antialiasing take a software renderer ten times as long; depth has neither.
        model.vis.quality.offsamples = 0
        self._renderer: Any = None

    def depth(self) -> np.ndarray:
        """(H, W) float32, metres along the camera's axis."""
        renderer = self._own_renderer()
        renderer.enable_depth_rendering()
        return self._draw(renderer)

    def image(self) -> np.ndarray:
        """(H, W, 3) uint8."""
        renderer = self._own_renderer()
        renderer.disable_depth_rendering()
        return self._draw(renderer)

    def point_cloud(self, view: View, count: int) -> np.ndarray:
        """(count, 3) float32."""
        points, _ = points_in_view(self.depth(), self.fovy, view)
        return points[farthest_points(points, count)]

    def coloured(self, view: View, count: int) -> dict[str, np.ndarray]:
        """point_cloud (count, 6), position and colour in 0..255; depth (H, W), all float32; img (H, W, 3) uint8."""
        depth, image = self.depth(), self.image()
        points, pixels = points_in_view(depth, self.fovy, view)
        chosen = farthest_points(points, count)
        colours = rearrange(image, "h w c -> (h w) c")[pixels[chosen]].astype(np.float32)
        return {"point_cloud": np.concatenate([points[chosen], colours], axis=1), "depth": depth, "img": image}

    def close(self) -> None:
        """Free the renderer."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
        if PointCloudGenerator._renderer_of is self:
            PointCloudGenerator._renderer_of = None

    def _own_renderer(self) -> Any:
        if self._renderer is None:
            if PointCloudGenerator._renderer_of is not None:
                PointCloudGenerator._renderer_of.close()
            self._renderer = self._make_renderer()
            PointCloudGenerator._renderer_of = self
        return self._renderer

    def _make_renderer(self) -> Any:
        import mujoco

        try:
            return mujoco.Renderer(self.model, self.size, self.size)
        except Exception as error:  # a missing OpenGL library can raise any type
            raise no_renderer("Depth", error) from error

    def _draw(self, renderer: Any) -> np.ndarray:
        import mujoco

        self._hide_what_is_out_of_view()
        renderer.update_scene(self.data, camera=self.camera)
        flags = renderer.scene.flags
        flags[mujoco.mjtRndFlag.mjRND_SHADOW] = flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        return renderer.render().copy()

    def _hide_what_is_out_of_view(self) -> None:
        """Hide meshes whose bounding spheres are out of view: a software renderer is faster, the image is the same."""
        rotation = self.data.cam_xmat[self.camera_id].reshape(3, 3)
        x, y, z = ((self.data.geom_xpos - self.data.cam_xpos[self.camera_id]) @ rotation).T  # it looks along -z
        half, radius = np.radians(self.fovy) / 2, self.model.geom_rbound
        # distance from the nearest plane of the view
        margin = np.minimum(-z * np.sin(half) - np.maximum(np.abs(x), np.abs(y)) * np.cos(half), -z)
        # Infinite planes have radius 0.
        self.model.geom_group[:] = np.where((radius == 0) | (margin > -radius), self._groups, HIDDEN)
