"""Upstream's name for the environment of a real robot, whose drivers are not part of this repository."""

from typing import Any

from diffusion_policy.common.errors import ConfigError


class RealEnv:
    """Cannot be built: the drivers of the UR5 arm and of the RealSense cameras exist only in upstream's tree."""

    def __init__(self, *_: Any, **__: Any):
        raise ConfigError(
            "robot drivers are not part of this repository: use upstream's eval_real_robot.py with the policy's "
            "checkpoint, or call policy.predict_action in your own loop (docs/deployment.md)"
        )
