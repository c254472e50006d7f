"""Former path of `diffusion_policy.model.mip.image_encoder`, which configs and checkpoints name."""

from diffusion_policy.model.mip.image_encoder import ImageEncoder

__all__ = ["ImageEncoder"]
