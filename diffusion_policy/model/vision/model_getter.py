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

    `weights` is None for random weights, the path of a state dict of torchvision's network of that name, or
    torchvision's name of its weights, such as IMAGENET1K_V1, which torchvision downloads.
    """
    if name not in LAYERS:
        raise ConfigError(f"Unknown network {name!r}; use one of {', '.join(LAYERS)}.")
    network = ResNet(LAYERS[name], **kwargs)
    if weights is not None:
        load_weights(network, name, weights)
    network.fc = nn.Identity()
    return network


def load_weights(network: nn.Module, name: str, weights: str) -> None:
    """Load torchvision's weights, a file or a name, into `network`."""
    try:
        if os.path.isfile(weights):
            state = torch.load(weights, map_location="cpu", weights_only=True)
        else:
            state = torchvision_weights(name, weights)
        network.load_state_dict(state)
    except (RuntimeError, pickle.UnpicklingError, EOFError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"weights={weights!r} is not a state dict of torchvision's {name}: {str(error)[:300]}"
        ) from error


def torchvision_weights(name: str, weights: str) -> dict[str, torch.Tensor]:
    """The state dict that torchvision has, or downloads, under this name."""
    if not weights.isidentifier():  # a path, not a name
        raise ConfigError(
            f"weights={weights!r} is not a file. It must be null, the path of a state dict of torchvision's {name}, or "
            "the name of its weights: IMAGENET1K_V1."
        )
    try:
        import torchvision

        return torchvision.models.get_model(name, weights=weights).state_dict()
    except Exception as error:  # not installed, not usable with this torch, no such weights, no network
        file = f"{name}.pt"
        code = (
            f"import torch, torchvision; torch.save(torchvision.models.{name}(weights='{weights}').state_dict(), "
            f"'{file}')"
        )
        raise ConfigError(
            f"weights={weights} could not be taken from torchvision ({type(error).__name__}: {str(error)[:150]}): pip "
            f'install torchvision, or, on a machine that has it, write a file with python -c "{code}" and pass '
            f"weights={file} (policy.obs_encoder.rgb_model.weights)"
        ) from error
