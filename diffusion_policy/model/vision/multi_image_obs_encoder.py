"""Encoder of the images and low-dim observations of one frame into one vector."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.common.pytorch_util import replace_submodules
from diffusion_policy.model.common.module_attr_mixin import ModuleAttrMixin
from diffusion_policy.model.vision.crop_randomizer import CenterCrop, CropRandomizer

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CHANNELS_PER_GROUP = 16

T = TypeVar("T")


class Resize(nn.Module):
    """(B, C, H, W) -> (B, C, *size), bilinear."""

    def __init__(self, size: Sequence[int]):
        super().__init__()
        self.size = tuple(size)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.interpolate(images, self.size, mode="bilinear", align_corners=False)


class Standardize(nn.Module):
    """(x - mean) / std for each channel."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(std)[:, None, None], persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (images - self.mean) / self.std


class MultiImageObsEncoder(ModuleAttrMixin):
    """{key: (B, *shape)} -> (B, F): image features, then low-dim observations, each in the order of sorted keys.

    Args:
        shape_meta: {'obs': {key: {shape, type: rgb | low_dim}}}; the default type is low_dim.
        rgb_model: a network, copied for each image key (shared with `share_rgb_model`), or a dict of networks by key.
        resize_shape, crop_shape: (height, width), or a dict of them by key. Crops are random in training and central in
            evaluation.
        random_crop: if false, the crop is central in training, too. (Upstream does not crop at all then.)
        use_group_norm: replace batch normalisation by groups of 16 channels. A shared network keeps batch
            normalisation, as in upstream's checkpoints.
        imagenet_norm: standardise with ImageNet's mean and deviation; the images should be in [0, 1].
    """

    def __init__(
        self,
        shape_meta: Mapping,
        rgb_model: nn.Module | Mapping[str, nn.Module],
        resize_shape: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
        crop_shape: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
        random_crop: bool = True,
        use_group_norm: bool = False,
        share_rgb_model: bool = False,
        imagenet_norm: bool = False,
    ):
        super().__init__()
        obs = {key: (tuple(entry["shape"]), entry.get("type", "low_dim")) for key, entry in shape_meta["obs"].items()}
        for key, (_, kind) in obs.items():
            if kind not in ("rgb", "low_dim"):
                raise ConfigError(f"shape_meta.obs.{key}.type must be rgb or low_dim, not {kind!r}.")
        self.rgb_keys = sorted(key for key, (_, kind) in obs.items() if kind == "rgb")
        self.low_dim_keys = sorted(key for key, (_, kind) in obs.items() if kind == "low_dim")
        self.key_shape_map = {key: shape for key, (shape, _) in obs.items()}
        self.share_rgb_model = share_rgb_model
        if share_rgb_model and (
            isinstance(rgb_model, Mapping) or len({self.key_shape_map[key] for key in self.rgb_keys}) > 1
        ):
            raise ConfigError("share_rgb_model needs one network and images of one shape.")

        self.key_model_map, self.key_transform_map = nn.ModuleDict(), nn.ModuleDict()
        if share_rgb_model:
            self.key_model_map["rgb"] = rgb_model  # type: ignore[assignment]
        for key, (shape, kind) in obs.items():
            if kind != "rgb":
                continue
            if not share_rgb_model:
                model = rgb_model[key] if isinstance(rgb_model, Mapping) else copy.deepcopy(rgb_model)
                self.key_model_map[key] = with_group_norm(model) if use_group_norm else model
            self.key_transform_map[key] = image_transform(
                shape, _of(resize_shape, key), _of(crop_shape, key), random_crop, imagenet_norm
            )

    def train(self, mode: bool = True) -> "MultiImageObsEncoder":
        """Set the mode, but keep frozen networks in evaluation mode, so that their batch statistics do not change."""
        super().train(mode)
        if not any(parameter.requires_grad for parameter in self.key_model_map.parameters()):
            self.key_model_map.eval()
        return self

    def forward(self, obs_dict: Mapping[str, torch.Tensor]) -> torch.Tensor:
        for key, shape in self.key_shape_map.items():
            if obs_dict[key].shape[1:] != shape:
                raise ValueError(
                    f"observation {key!r} must have shape (batch, {', '.join(map(str, shape))}), "
                    f"got {tuple(obs_dict[key].shape)}"
                )
        images = {key: self.key_transform_map[key](obs_dict[key]) for key in self.rgb_keys}
        if self.share_rgb_model and images:
            features = list(self.key_model_map["rgb"](torch.cat(list(images.values()))).chunk(len(images)))
        else:
            features = [self.key_model_map[key](image) for key, image in images.items()]
        return torch.cat(features + [obs_dict[key].flatten(1) for key in self.low_dim_keys], dim=-1)

    @torch.no_grad()
    def output_shape(self) -> tuple[int, ...]:
        """(F,)."""
        mode = self.training
        example = {
            key: torch.zeros((1, *shape), dtype=self.dtype, device=self.device)
            for key, shape in self.key_shape_map.items()
        }
        try:
            return tuple(self.eval()(example).shape[1:])  # training mode would draw crops and update batch statistics
        finally:
            self.train(mode)


def image_transform(
    shape: Sequence[int],
    resize_shape: Sequence[int] | None,
    crop_shape: Sequence[int] | None,
    random_crop: bool,
    imagenet_norm: bool,
) -> nn.Sequential:
    """Build the preprocessing of images of `shape` (C, H, W): resize, crop, standardise."""
    steps: list[nn.Module] = []
    if resize_shape is not None:
        steps.append(Resize(resize_shape))
        shape = (shape[0], *resize_shape)
    if crop_shape is not None:
        height, width = crop_shape
        steps.append((CropRandomizer if random_crop else CenterCrop)(shape, height, width))
    if imagenet_norm:
        steps.append(Standardize(IMAGENET_MEAN, IMAGENET_STD))
    return nn.Sequential(*steps)


def with_group_norm(model: nn.Module) -> nn.Module:
    """Replace each BatchNorm2d of C channels by a GroupNorm of C / 16 groups."""

    def group_norm(norm: Any) -> nn.GroupNorm:
        return nn.GroupNorm(max(1, norm.num_features // CHANNELS_PER_GROUP), norm.num_features)

    return replace_submodules(model, lambda module: isinstance(module, nn.BatchNorm2d), group_norm)


def _of(value: T | Mapping[str, T], key: str) -> T:
    """The entry of `key` if values are given by key, else the common value."""
    return value[key] if isinstance(value, Mapping) else value
