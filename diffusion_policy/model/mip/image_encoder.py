"""The image encoder of the MIP protocol."""

from collections.abc import Mapping, Sequence

import torch
from einops import rearrange
from torch import nn

from diffusion_policy.model.vision.model_getter import get_resnet
from diffusion_policy.model.vision.multi_image_obs_encoder import MultiImageObsEncoder


class ImageEncoder(nn.Module):
    """{key: (B, To, *shape)} -> (B, To, emb_dim), each frame independently.

    Each image of a frame passes through its own ResNet-18 with group normalisation. The pooled features and the low-dim
    observations are concatenated and passed through Linear, LeakyReLU, Linear. Crops are drawn anew for each frame and
    image key.

    Args:
        shape_meta, crop_shape, resize_shape: as in MultiImageObsEncoder.
        width: channels of the ResNet's first stage; 64 is the published size.
    """

    def __init__(
        self,
        shape_meta: Mapping,
        emb_dim: int = 256,
        crop_shape: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
        width: int = 64,
        resize_shape: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ):
        super().__init__()
        self.output_dim = emb_dim
        self.frame = MultiImageObsEncoder(
            shape_meta,
            get_resnet("resnet18", width=width),
            resize_shape=resize_shape,
            crop_shape=crop_shape,
            use_group_norm=True,
        )
        (features,) = self.frame.output_shape()
        self.mlp = nn.Sequential(nn.Linear(features, emb_dim), nn.LeakyReLU(), nn.Linear(emb_dim, emb_dim))

    def forward(self, obs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        n_obs_steps = obs[next(iter(self.frame.key_shape_map))].shape[1]
        frames = {key: rearrange(value, "b to ... -> (b to) ...") for key, value in obs.items()}
        return rearrange(self.mlp(self.frame(frames)), "(b to) e -> b to e", to=n_obs_steps)
