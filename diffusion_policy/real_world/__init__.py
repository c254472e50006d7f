"""Running a policy on a robot in real time.

    from diffusion_policy.real_world import ActionChunkExecutor, ActionLimits

Upstream's folder of this name is a namespace package; `__path__` keeps it one, as in `diffusion_policy`.
"""

import pkgutil

__path__ = __import__("pkgutil").extend_path(__path__, __name__)
__path__ = list(dict.fromkeys([*pkgutil.extend_path([], __name__), *__path__]))

from diffusion_policy.real_world.cadence import CadenceReport
from diffusion_policy.real_world.clock import SimulatedClock, WallClock
from diffusion_policy.real_world.executor import ActionChunkExecutor, RobotFault
from diffusion_policy.real_world.limits import ActionLimits
from diffusion_policy.real_world.planner import DelayedPlanner, ThreadPlanner

__all__ = [
    "ActionChunkExecutor",
    "ActionLimits",
    "CadenceReport",
    "DelayedPlanner",
    "RobotFault",
    "SimulatedClock",
    "ThreadPlanner",
    "WallClock",
]
