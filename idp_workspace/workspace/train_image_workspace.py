"""The workspace that the configs of this package name for images and point clouds. The training loop is the host's."""

from __future__ import annotations

try:
    from diffusion_policy.workspace.train_workspace import TrainWorkspace
except ImportError:  # upstream's own tree has no common training loop
    from diffusion_policy.workspace.train_diffusion_unet_image_workspace import (  # type: ignore[assignment]
        TrainDiffusionUnetImageWorkspace as TrainWorkspace,
    )


class TrainImageWorkspace(TrainWorkspace):
    """Trains any objective of `idp_workspace.policy` on observations with images or point clouds."""
