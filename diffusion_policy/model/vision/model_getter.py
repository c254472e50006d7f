"""Image networks by name."""

import os
import pickle
from typing import Any

import torch
from torch import nn

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.model.vision.resnet import ResNet

LAYERS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}


def get_resnet(name: str, weights: str | None = None, **kwargs: Any) -> ResNet:
    """Build a ResNet whose output is its features (B, 8 width); width, of the first stage, is 64 by default.

    `weights` is None for random weights, or the path of a state dict of torchvision's network of that name. Nothing is
    downloaded; `torch.save(torchvision.models.resnet18(weights="IMAGENET1K_V1").state_dict(), PATH)` writes it.
    """
    if name not in LAYERS:
        raise ConfigError(f"Unknown network {name!r}; use one of {', '.join(LAYERS)}.")
    network = ResNet(LAYERS[name], **kwargs)
    if weights is not None:
        load_weights(network, name, weights)
    network.fc = nn.Identity()
    return network


def load_weights(network: nn.Module, name: str, path: str) -> None:
    """Load torchvision's state dict at `path` into `network`."""
    if not os.path.isfile(path):
        raise ConfigError(
            f"weights={path!r} is not a file. It must be null or the path of a state dict of torchvision's {name}; "
            "weights are not downloaded."
        )
    try:
        network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except (RuntimeError, pickle.UnpicklingError, EOFError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"weights={path!r} is not a state dict of torchvision's {name}: {str(error)[:300]}"
        ) from error
