"""What the train_*_lowdim configs of the plugin name. The training loop is the host's."""

from diffusion_policy.workspace.train_diffusion_unet_lowdim_workspace import TrainDiffusionUnetLowdimWorkspace


class TrainLowdimWorkspace(TrainDiffusionUnetLowdimWorkspace):
    """Trains any objective of `idp_workspace.policy`; the optimiser is the config's own `_target_`."""
