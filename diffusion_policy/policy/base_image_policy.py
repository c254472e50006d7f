"""The interface of image policies."""

import torch

from diffusion_policy.model.common.module_attr_mixin import ModuleAttrMixin
from diffusion_policy.model.common.normalizer import LinearNormalizer
from diffusion_policy.policy.training_hooks import TrainingHooks


class BaseImagePolicy(ModuleAttrMixin, TrainingHooks):
    """A policy in the units of the dataset; normalisation is internal.

    B: batch, T: horizon, To: observation steps, Ta: executed steps, Da: action width.
    """

    def predict_action(self, obs_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """{key: (B, To, ...)}, images channel-first in [0, 1] -> {'action': (B, Ta, Da), 'action_pred': (B, T, Da)}."""
        raise NotImplementedError

    def reset(self) -> None:
        """Clear the state kept between predictions; policies without state do nothing."""

    def set_normalizer(self, normalizer: LinearNormalizer) -> None:
        """Copy the normaliser of the dataset; called once before training."""
        raise NotImplementedError
