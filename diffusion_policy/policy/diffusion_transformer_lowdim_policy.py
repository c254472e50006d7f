"""Diffusion policy on low-dimensional observations with a transformer."""

import torch

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.model.diffusion.transformer_for_diffusion import TransformerForDiffusion
from diffusion_policy.policy.diffusion_lowdim_policy import DiffusionLowdimPolicy


class DiffusionTransformerLowdimPolicy(DiffusionLowdimPolicy):
    """Observations are condition tokens (`obs_as_cond`) or in-painted.

    The first executed action belongs to the last observation.
    """

    def __init__(
        self,
        model: TransformerForDiffusion,
        noise_scheduler,
        horizon: int,
        obs_dim: int,
        action_dim: int,
        n_action_steps: int,
        n_obs_steps: int,
        num_inference_steps: int | None = None,
        obs_as_cond: bool = False,
        pred_action_steps_only: bool = False,
        **kwargs,
    ):
        if pred_action_steps_only and not obs_as_cond:
            raise ConfigError("pred_action_steps_only=True needs obs_as_cond=True.")
        super().__init__(
            model,
            noise_scheduler,
            horizon,
            obs_dim,
            action_dim,
            n_action_steps,
            n_obs_steps,
            num_inference_steps,
            inpainting=not obs_as_cond,
            pred_action_steps_only=pred_action_steps_only,
            action_start=n_obs_steps - 1,
            **kwargs,
        )
        self.obs_as_cond = obs_as_cond

    def condition(self, nobs: torch.Tensor) -> dict[str, torch.Tensor]:
        """nobs: (B, To, Do) -> cond: the same, as tokens."""
        return {"cond": nobs} if self.obs_as_cond else {}

    def get_optimizer(
        self, weight_decay: float, learning_rate: float, betas: tuple[float, float]
    ) -> torch.optim.Optimizer:
        return self.model.configure_optimizers(  # type: ignore[operator]
            learning_rate=learning_rate, weight_decay=weight_decay, betas=tuple(betas)
        )
