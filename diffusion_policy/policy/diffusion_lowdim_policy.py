"""Diffusion policy on low-dimensional observations, for any network."""

import torch

from diffusion_policy.policy.base_lowdim_policy import BaseLowdimPolicy
from diffusion_policy.policy.diffusion_base_policy import DiffusionBasePolicy


class DiffusionLowdimPolicy(DiffusionBasePolicy, BaseLowdimPolicy):
    """The observation is one vector 'obs' (B, T, Do).

    In-painting also predicts {'action_obs_pred': (B, Ta, Do), 'obs_pred': (B, T, Do)}.
    """

    def obs_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"obs": (self.obs_dim,)}

    def observation_of(self, obs_dict: dict[str, torch.Tensor]) -> torch.Tensor:
        return obs_dict["obs"]

    def encode(self, obs: torch.Tensor, n_step: int) -> torch.Tensor:
        return self.normalizer["obs"].normalize(obs[:, :n_step])

    def predicted_obs(self, sample: torch.Tensor) -> dict[str, torch.Tensor]:
        if not self.inpainting:
            return {}
        obs_pred = self.normalizer["obs"].unnormalize(sample[..., self.action_dim :])
        return {"action_obs_pred": obs_pred[:, self.executed], "obs_pred": obs_pred}
