"""Diffusion policy on low-dimensional observations with a UNet."""

import torch
from torch.nn import functional as F

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.model.diffusion.conditional_unet1d import ConditionalUnet1D
from diffusion_policy.policy.diffusion_lowdim_policy import DiffusionLowdimPolicy


class DiffusionUnetLowdimPolicy(DiffusionLowdimPolicy):
    """Observations are a global condition, a local condition per step, or in-painted.

    With `oa_step_convention` the first executed action belongs to the last observation, without it to the step after.
    """

    def __init__(
        self,
        model: ConditionalUnet1D,
        noise_scheduler,
        horizon: int,
        obs_dim: int,
        action_dim: int,
        n_action_steps: int,
        n_obs_steps: int,
        num_inference_steps: int | None = None,
        obs_as_local_cond: bool = False,
        obs_as_global_cond: bool = False,
        pred_action_steps_only: bool = False,
        oa_step_convention: bool = False,
        **kwargs,
    ):
        if obs_as_local_cond and obs_as_global_cond:
            raise ConfigError("obs_as_local_cond and obs_as_global_cond exclude each other: set one of them to False.")
        if pred_action_steps_only and not obs_as_global_cond:
            raise ConfigError("pred_action_steps_only=True needs obs_as_global_cond=True.")
        super().__init__(
            model,
            noise_scheduler,
            horizon,
            obs_dim,
            action_dim,
            n_action_steps,
            n_obs_steps,
            num_inference_steps,
            inpainting=not (obs_as_local_cond or obs_as_global_cond),
            pred_action_steps_only=pred_action_steps_only,
            action_start=n_obs_steps - 1 if oa_step_convention else n_obs_steps,
            **kwargs,
        )
        self.obs_as_local_cond = obs_as_local_cond
        self.obs_as_global_cond = obs_as_global_cond
        self.oa_step_convention = oa_step_convention

    def condition(self, nobs: torch.Tensor) -> dict[str, torch.Tensor]:
        """nobs: (B, To, Do) -> global_cond (B, To * Do), or local_cond (B, T, Do) with zeros after To."""
        if self.obs_as_global_cond:
            return {"global_cond": nobs.flatten(1)}
        if self.obs_as_local_cond:
            return {"local_cond": F.pad(nobs, (0, 0, 0, self.horizon - self.n_obs_steps))}
        return {}
