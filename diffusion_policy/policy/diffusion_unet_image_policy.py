"""Diffusion policy on images with a UNet and an encoder of the user's choice."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from diffusion_policy.model.diffusion.conditional_unet1d import ConditionalUnet1D
from diffusion_policy.policy.diffusion_image_policy import DiffusionImagePolicy, action_width


class DiffusionUnetImagePolicy(DiffusionImagePolicy):
    """Encoded observations are a global condition (`obs_as_global_cond`) or in-painted.

    obs_encoder: {key: (N, *shape)} -> (N, F), with `output_shape() -> (F,)`.
    """

    def __init__(
        self,
        shape_meta: Mapping,
        noise_scheduler,
        obs_encoder: nn.Module,
        horizon: int,
        n_action_steps: int,
        n_obs_steps: int,
        num_inference_steps: int | None = None,
        obs_as_global_cond: bool = True,
        diffusion_step_embed_dim: int = 256,
        down_dims: Sequence[int] = (256, 512, 1024),
        kernel_size: int = 5,
        n_groups: int = 8,
        cond_predict_scale: bool = True,
        **kwargs,
    ):
        action_dim = action_width(shape_meta)
        features = obs_encoder.output_shape()[0]  # type: ignore[operator]
        model = ConditionalUnet1D(
            input_dim=action_dim if obs_as_global_cond else action_dim + features,
            global_cond_dim=n_obs_steps * features if obs_as_global_cond else None,
            diffusion_step_embed_dim=diffusion_step_embed_dim,
            down_dims=down_dims,
            kernel_size=kernel_size,
            n_groups=n_groups,
            cond_predict_scale=cond_predict_scale,
        )
        super().__init__(
            shape_meta,
            obs_encoder,
            model,
            noise_scheduler,
            horizon,
            n_action_steps,
            n_obs_steps,
            num_inference_steps,
            inpainting=not obs_as_global_cond,
            **kwargs,
        )
        self.obs_as_global_cond = obs_as_global_cond

    def condition(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        """features: (B, To, F) -> global_cond (B, To * F)."""
        return {"global_cond": features.flatten(1)} if self.obs_as_global_cond else {}
