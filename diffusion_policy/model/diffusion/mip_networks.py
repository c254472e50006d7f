"""Former path of `diffusion_policy.model.mip.networks`, which configs and checkpoints name."""

from diffusion_policy.model.mip.networks import (
    ChiTransformer,
    ChiUnet,
    ResidualBlock,
    ResidualMLP,
    StateEncoder,
    TwoTimeEmbedding,
    stack_times,
)

__all__ = [
    "ChiTransformer",
    "ChiUnet",
    "ResidualBlock",
    "ResidualMLP",
    "StateEncoder",
    "TwoTimeEmbedding",
    "stack_times",
]
