"""What every image policy offers."""

import torch

from diffusion_policy.model.common.module_attr_mixin import ModuleAttrMixin
from diffusion_policy.model.common.normalizer import LinearNormalizer
from diffusion_policy.policy.training_hooks import TrainingHooks


class BaseImagePolicy(ModuleAttrMixin, TrainingHooks):
    """B: batch, T: horizon, To: observation steps, Ta: executed steps, Da: action width. Nothing outside is normalised."""

    def predict_action(self, obs_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """{key: (B, To, ...)}, images channel-first in [0, 1] -> {'action': (B, Ta, Da), 'action_pred': (B, T, Da)}."""
        raise NotImplementedError

    def reset(self):
        """Forget what is kept from one prediction to the next; a policy without memory has nothing to do."""

    def set_normalizer(self, normalizer: LinearNormalizer):
        raise NotImplementedError
