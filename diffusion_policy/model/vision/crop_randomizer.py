"""Crops of images: random ones to train with, the central one to act with."""

import torch
from torch import nn

from diffusion_policy.common.errors import ConfigError


class CropRandomizer(nn.Module):
    """Images (B, C, H, W) -> crops (B * num_crops, C, crop_height, crop_width), those of one image next to each other.

    In training the corner of a crop is floor(u * (H - crop_height)), floor(v * (W - crop_width)) with u, v ~ U[0, 1) for each crop,
    drawn on the images' device by torch's global generator, all u before all v; the last position is therefore never chosen. In
    evaluation every crop is the central one. `pos_enc` appends two channels with the row / H and the column / W of each pixel.
    """

    def __init__(self, input_shape, crop_height: int, crop_width: int, num_crops: int = 1, pos_enc: bool = False):
        super().__init__()
        channels, height, width = input_shape
        if not (0 < crop_height < height and 0 < crop_width < width):
            raise ConfigError(
                f"A crop of {crop_height} x {crop_width} must be smaller than the image, {height} x {width}."
            )
        if num_crops < 1:
            raise ConfigError(f"num_crops is at least 1, not {num_crops}.")
        self.input_shape = (channels, height, width)
        self.crop_height, self.crop_width = crop_height, crop_width
        self.num_crops, self.pos_enc = num_crops, pos_enc

    def output_shape_in(self, input_shape=None) -> list:
        """[C, crop_height, crop_width] of a crop."""
        return [self.input_shape[0] + 2 * self.pos_enc, self.crop_height, self.crop_width]

    def output_shape_out(self, input_shape) -> list:
        """What `forward_out` makes of features of this shape, batch not counted."""
        return list(input_shape)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.forward_in(inputs)

    def forward_in(self, inputs: torch.Tensor) -> torch.Tensor:
        if inputs.shape[-3:] != self.input_shape:
            raise ValueError(
                f"images of shape {self.input_shape} are cropped here, not of shape {tuple(inputs.shape[-3:])}"
            )
        if self.pos_enc:
            inputs = torch.cat([inputs, positions(inputs)], dim=-3)
        top, left = self.corners(inputs, self.training)
        # A view of all windows, from which one gather takes those at (top, left).
        windows = inputs.unfold(-2, self.crop_height, 1).unfold(
            -2, self.crop_width, 1
        )  # (B, C, H', W', crop_height, crop_width)
        image = torch.arange(len(inputs), device=inputs.device).repeat_interleave(self.num_crops)
        return windows[image, :, top, left]

    def corners(self, images: torch.Tensor, random: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """First row and first column (B * num_crops,) of each crop."""
        count = len(images), self.num_crops
        room = images.shape[-2] - self.crop_height, images.shape[-1] - self.crop_width
        if random:
            top, left = ((torch.rand(count, device=images.device) * free).long() for free in room)
        else:
            top, left = (torch.full(count, round(free / 2), device=images.device) for free in room)
        return top.flatten(), left.flatten()

    def forward_out(self, inputs: torch.Tensor) -> torch.Tensor:
        """Features (B * num_crops, ...) -> their means over the crops of an image (B, ...)."""
        return inputs if self.num_crops == 1 else inputs.unflatten(0, (-1, self.num_crops)).mean(1)


class CenterCrop(CropRandomizer):
    """The central crop, in training too."""

    def corners(self, images: torch.Tensor, random: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return super().corners(images, random=False)


def positions(images: torch.Tensor) -> torch.Tensor:
    """(B, 2, H, W) for images (B, C, H, W): row / H and column / W of each pixel."""
    height, width = images.shape[-2:]
    row = torch.arange(height, device=images.device, dtype=images.dtype) / height
    column = torch.arange(width, device=images.device, dtype=images.dtype) / width
    return torch.stack(torch.meshgrid(row, column, indexing="ij")).expand(len(images), -1, -1, -1)
