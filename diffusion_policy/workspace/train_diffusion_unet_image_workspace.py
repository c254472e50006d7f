"""Upstream's name for the training loop."""

from diffusion_policy.workspace.train_workspace import TrainWorkspace


class TrainDiffusionUnetImageWorkspace(TrainWorkspace):
    pass
