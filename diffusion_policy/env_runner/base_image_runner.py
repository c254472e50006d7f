"""The interface that a workspace expects of the rollouts of an image task."""

from typing import Any


class BaseImageRunner:
    """Base class of the runners of an image task."""

    def __init__(self, output_dir: str):
        self.output_dir = output_dir

    def run(self, policy: Any) -> dict[str, Any]:
        """Roll out the policy and return the values to log."""
        raise NotImplementedError
