"""Block pushing: upstream's name for a simulator that is not part of this repository."""

from typing import Any

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.env_runner.base_lowdim_runner import BaseLowdimRunner


class BlockPushLowdimRunner(BaseLowdimRunner):
    """Cannot be built: upstream's simulator needs its own PyBullet scene. Training without it works."""

    def __init__(self, output_dir: str, **_: Any):
        raise ConfigError(
            "block pushing cannot be simulated here, its PyBullet scene exists only in upstream's tree: train with "
            "task.env_runner=null, and evaluate the policy there"
        )
