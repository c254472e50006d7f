"""Former path of `diffusion_policy.model.dp3.encoder`, which configs and checkpoints name."""

from diffusion_policy.model.dp3.encoder import DP3Encoder, PointNetEncoder

__all__ = ["DP3Encoder", "PointNetEncoder"]
