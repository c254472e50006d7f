"""Image crops: random in training, central in evaluation."""

from collections.abc import Sequence

import torch
from einops import reduce
from torch import nn

from diffusion_policy.common.errors import ConfigError


class CropRandomizer(nn.Module):
    """Images (B, C, H, W) -> crops (B * num_crops, C, crop_height, crop_width), grouped by image.

    In training, the corner of a crop is floor(u * (H - crop_height)), floor(v * (W - crop_width)) with u, v ~ U[0, 1)
    for each crop, so the last position is never chosen. They are drawn on the images' device by torch's global
    generator, all u before all v. In evaluation every crop is the central one. `pos_enc` appends two channels, row / H
    and column / W.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        crop_height: int,
        crop_width: int,
        num_crops: int = 1,
        pos_enc: bool = False,
    ):
        super().__init__()
        channels, height, width = input_shape
        if not (0 < crop_height < height and 0 < crop_width < width):
            raise ConfigError(
                f"A crop of {crop_height} x {crop_width} must be smaller than the image, {height} x {width}."
            )
        if num_crops < 1:
            raise ConfigError(f"num_crops must be at least 1, not {num_crops}.")
        self.input_shape = (channels, height, width)
        self.crop_height, self.crop_width = crop_height, crop_width
        self.num_crops, self.pos_enc = num_crops, pos_enc

    def output_shape_in(self, input_shape: Sequence[int] | None = None) -> list[int]:
        """Shape [C, crop_height, crop_width] of a crop."""
        return [self.input_shape[0] + 2 * self.pos_enc, self.crop_height, self.crop_width]

    def output_shape_out(self, input_shape: Sequence[int]) -> list[int]:
        """Shape of `forward_out` for features of this shape, both without the batch."""
        return list(input_shape)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.forward_in(inputs)

    def forward_in(self, inputs: torch.Tensor) -> torch.Tensor:
        """Crop images (B, C, H, W)."""
        if inputs.shape[-3:] != self.input_shape:
            raise ValueError(f"expected images of shape {self.input_shape}, got {tuple(inputs.shape[-3:])}")
        if self.pos_enc:
            inputs = torch.cat([inputs, positions(inputs)], dim=-3)
        return self.random_crops(inputs) if self.is_random() else self.central_crops(inputs)

    def random_crops(self, images: torch.Tensor) -> torch.Tensor:
        count = len(images), self.num_crops
        draws = [(torch.rand(count, device=images.device) * free).long() for free in self.room(images)]
        top, left = (draw.flatten() for draw in draws)
        # A view of all windows (B, C, H', W', crop_height, crop_width); one gather takes those at (top, left).
        windows = images.unfold(-2, self.crop_height, 1).unfold(-2, self.crop_width, 1)
        image = torch.arange(len(images), device=images.device).repeat_interleave(self.num_crops)
        return windows[image, :, top, left]

    def central_crops(self, images: torch.Tensor) -> torch.Tensor:
        top, left = (round(free / 2) for free in self.room(images))
        crops = images[..., top : top + self.crop_height, left : left + self.crop_width].contiguous()
        return crops if self.num_crops == 1 else crops.repeat_interleave(self.num_crops, dim=0)

    def is_random(self) -> bool:
        return self.training

    def room(self, images: torch.Tensor) -> tuple[int, int]:
        """Rows and columns by which the corner of a crop can move."""
        return images.shape[-2] - self.crop_height, images.shape[-1] - self.crop_width

    def forward_out(self, inputs: torch.Tensor) -> torch.Tensor:
        """Average features (B * num_crops, ...) over the crops of an image -> (B, ...)."""
        return inputs if self.num_crops == 1 else reduce(inputs, "(b n) ... -> b ...", "mean", n=self.num_crops)


class CenterCrop(CropRandomizer):
    """Takes the central crop, in training too."""

    def is_random(self) -> bool:
        return False


def positions(images: torch.Tensor) -> torch.Tensor:
    """Row / H and column / W of each pixel of images (B, C, H, W) -> (B, 2, H, W)."""
    height, width = images.shape[-2:]
    row = torch.arange(height, device=images.device, dtype=images.dtype) / height
    column = torch.arange(width, device=images.device, dtype=images.dtype) / width
    return torch.stack(torch.meshgrid(row, column, indexing="ij")).expand(len(images), -1, -1, -1)
