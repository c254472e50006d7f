"""robomimic's encoder of images and low-dim observations, as used by Diffusion Policy's hybrid policies.

Parameters have robomimic's names.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from einops import rearrange
from torch import nn

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.model.vision.crop_randomizer import CropRandomizer
from diffusion_policy.model.vision.model_getter import get_resnet
from diffusion_policy.model.vision.multi_image_obs_encoder import with_group_norm

FEATURE_DIMENSION = 64  # of an image, in robomimic


class RandomCrop(CropRandomizer):
    """Takes a random crop in evaluation, too, as robomimic 0.2.0 does: two predictions from one image differ."""

    def is_random(self) -> bool:
        return True


class ResNet18Conv(nn.Module):
    """ResNet-18 without pooling and last layer: (B, 3, H, W) -> (B, 8 width, ceil(H / 32), ceil(W / 32))."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.nets = nn.Sequential(*list(get_resnet("resnet18", width=width).children())[:-2])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.nets(images)


class SpatialSoftmax(nn.Module):
    """Features (B, C, H, W) -> keypoints (B, K, 2): the expected image position under each of K attention maps.

    (x_k, y_k) = sum_hw p_khw (x_w, y_h),    p_k = softmax_hw(map_k / temperature),    x_w, y_h from -1 to 1

    The maps are a 1 x 1 convolution of the features.
    """

    temperature: torch.Tensor
    pos_x: torch.Tensor
    pos_y: torch.Tensor

    def __init__(self, input_shape: Sequence[int], num_kp: int = 32):
        super().__init__()
        channels, height, width = input_shape
        self.nets = nn.Conv2d(channels, num_kp, kernel_size=1)
        y, x = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
        self.register_buffer("temperature", torch.ones(1))
        self.register_buffer("pos_x", rearrange(x, "h w -> 1 (h w)"))
        self.register_buffer("pos_y", rearrange(y, "h w -> 1 (h w)"))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        maps = rearrange(self.nets(features), "b k h w -> b k (h w)")
        attention = (maps / self.temperature).softmax(dim=-1)
        return torch.stack([(attention * self.pos_x).sum(-1), (attention * self.pos_y).sum(-1)], dim=-1)


class VisualCore(nn.Module):
    """Images (B, 3, H, W) -> (B, FEATURE_DIMENSION): Linear(keypoints of the ResNet's features).

    `backbone` and `pool` are also the first two entries of `nets`: a state dict has them under both names, as
    robomimic's checkpoints do.
    """

    def __init__(self, input_shape: Sequence[int], num_kp: int = 32, width: int = 64):
        super().__init__()
        self.backbone = ResNet18Conv(width)
        self.pool = SpatialSoftmax((8 * width, *(math.ceil(size / 32) for size in input_shape[1:])), num_kp)
        self.nets = nn.Sequential(self.backbone, self.pool, nn.Flatten(), nn.Linear(2 * num_kp, FEATURE_DIMENSION))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.nets(images)


class ObservationEncoder(nn.Module):
    """{key: (B, *shape)} -> (B, F), concatenated in the order of shape_meta.

    Images become relu(VisualCore(crop(image))); low-dim observations are not changed.

    Args:
        shape_meta: {'obs': {key: {shape, type: rgb | low_dim}}}; the default type is low_dim.
        crop_shape: (height, width) of the crops, random in training; None for whole images.
        obs_encoder_group_norm: replace batch normalisation by groups of 16 channels.
        eval_fixed_crop: take the central crop in evaluation. Without it the crop is random there, too, as in robomimic.
        width: channels of the ResNet's first stage; 64 in robomimic.
    """

    def __init__(
        self,
        shape_meta: Mapping,
        crop_shape: Sequence[int] | None = (76, 76),
        obs_encoder_group_norm: bool = False,
        eval_fixed_crop: bool = False,
        width: int = 64,
    ):
        super().__init__()
        self.obs_shapes = {key: tuple(entry["shape"]) for key, entry in shape_meta["obs"].items()}
        self.obs_nets, self.obs_randomizers = nn.ModuleDict(), nn.ModuleDict()
        for key, entry in shape_meta["obs"].items():
            kind, shape = entry.get("type", "low_dim"), self.obs_shapes[key]
            if kind not in ("rgb", "low_dim"):
                raise ConfigError(f"shape_meta.obs.{key}.type must be rgb or low_dim, not {kind!r}.")
            if kind == "low_dim":
                continue
            if crop_shape is not None:
                crop = CropRandomizer if eval_fixed_crop else RandomCrop
                self.obs_randomizers[key] = crop(shape, crop_shape[0], crop_shape[1])
                shape = (shape[0], *crop_shape)
            core = VisualCore(shape, width=width)
            self.obs_nets[key] = with_group_norm(core) if obs_encoder_group_norm else core
        self.activation = nn.ReLU()

    def forward(self, obs_dict: Mapping[str, torch.Tensor]) -> torch.Tensor:
        features = []
        for key, shape in self.obs_shapes.items():
            x = obs_dict[key]
            if x.shape[1:] != shape:
                raise ValueError(
                    f"observation {key!r} must have shape (batch, {', '.join(map(str, shape))}), got {tuple(x.shape)}"
                )
            if key in self.obs_randomizers:
                x = self.obs_randomizers[key](x)
            if key in self.obs_nets:
                x = self.activation(self.obs_nets[key](x))
            features.append(x.flatten(1))
        return torch.cat(features, dim=-1)

    def output_shape(self) -> list[int]:
        """[F]."""
        sizes = (
            FEATURE_DIMENSION if key in self.obs_nets else math.prod(shape) for key, shape in self.obs_shapes.items()
        )
        return [sum(sizes)]
