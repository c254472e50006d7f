"""PushT on a real robot: no evaluation during training."""

from typing import Any

from diffusion_policy.env_runner.base_image_runner import BaseImageRunner


class RealPushTImageRunner(BaseImageRunner):
    """Plays no episodes, as upstream's. It accepts the numbers of episodes that a preset sets, and ignores them."""

    def __init__(self, output_dir: str, **_: Any):
        super().__init__(output_dir)

    def run(self, policy: Any) -> dict[str, Any]:
        return {}
