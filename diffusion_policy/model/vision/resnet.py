"""ResNets of basic blocks (18 and 34 layers), with torchvision's parameter names and initialisation."""

from collections.abc import Sequence

import torch
from torch import nn


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class BasicBlock(nn.Module):
    """relu(x' + norm(conv(relu(norm(conv(x)))))), where x' is x, or `shortcut`(x) where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, shortcut: nn.Module | None = None):
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = conv(outputs, outputs, 3), nn.BatchNorm2d(outputs)
        self.downsample = shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """Images (B, 3, H, W) -> (B, num_classes).

    Replacing `fc` by an identity gives the features (B, 8 width), averaged over the image.

    Args:
        layers: number of blocks in each of the four stages, which have width, 2 width, 4 width, 8 width channels.
    """

    layer1: nn.Module
    layer2: nn.Module
    layer3: nn.Module
    layer4: nn.Module

    def __init__(self, layers: Sequence[int], width: int = 64, num_classes: int = 1000):
        super().__init__()
        self.conv1, self.bn1 = conv(3, width, 7, stride=2), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        channels = width
        for stage, count in enumerate(layers):
            outputs = width * 2**stage
            blocks = [self._first_block(channels, outputs, 2 if stage else 1)]
            blocks += [BasicBlock(outputs, outputs) for _ in range(count - 1)]
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
            channels = outputs
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc: nn.Module = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @staticmethod
    def _first_block(inputs: int, outputs: int, stride: int) -> BasicBlock:
        # torchvision makes the shortcut before the block; the same order gives the same weights for a seed.
        shortcut = None
        if stride != 1 or inputs != outputs:
            shortcut = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        return BasicBlock(inputs, outputs, stride, shortcut)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))
