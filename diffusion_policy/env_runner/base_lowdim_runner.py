"""The interface that a workspace expects of the rollouts of a low-dimensional task."""

from typing import Any


class BaseLowdimRunner:
    """Base class of the runners of a low-dimensional task."""

    def __init__(self, output_dir: str):
        self.output_dir = output_dir

    def run(self, policy: Any) -> dict[str, Any]:
        """Roll out the policy and return the values to log."""
        raise NotImplementedError
