"""The image encoder of the MIP protocol."""

from collections.abc import Mapping

import torch
from torch import nn

from diffusion_policy.model.vision.model_getter import get_resnet
from diffusion_policy.model.vision.multi_image_obs_encoder import MultiImageObsEncoder


class ImageEncoder(nn.Module):
    """{key: (B, To, *shape)} -> (B, To, emb_dim), each frame for itself.

    A frame's images go through a ResNet-18 with group normalisation each; their averaged features and the numbers, side by side,
    through Linear, LeakyReLU, Linear. Crops are drawn anew for each frame and image key. `width` is the ResNet's, 64 being its
    published size; shape_meta and crop_shape are those of MultiImageObsEncoder.
    """

    def __init__(self, shape_meta: Mapping, emb_dim: int = 256, crop_shape=None, width: int = 64):
        super().__init__()
        self.output_dim = emb_dim
        self.frame = MultiImageObsEncoder(
            shape_meta, get_resnet("resnet18", width=width), crop_shape=crop_shape, use_group_norm=True
        )
        self.mlp = nn.Sequential(
            nn.Linear(*self.frame.output_shape(), emb_dim), nn.LeakyReLU(), nn.Linear(emb_dim, emb_dim)
        )

    def forward(self, obs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        steps = obs[next(iter(self.frame.key_shape_map))].shape[:2]
        features = self.frame({key: value.flatten(0, 1) for key, value in obs.items()})  # (B * To, F)
        return self.mlp(features).unflatten(0, steps)
