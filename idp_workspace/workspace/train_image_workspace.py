"""What the train_*_image configs of the plugin name. The training loop is the host's."""

from diffusion_policy.workspace.train_diffusion_unet_image_workspace import TrainDiffusionUnetImageWorkspace


class TrainImageWorkspace(TrainDiffusionUnetImageWorkspace):
    """Trains any objective of `idp_workspace.policy` on observations with images; the optimiser is the config's own `_target_`."""
