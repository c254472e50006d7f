"""Diffusion policy on images with a UNet and robomimic's encoder."""

from collections.abc import Mapping, Sequence

from diffusion_policy.model.vision.robomimic_obs_encoder import ObservationEncoder
from diffusion_policy.policy.diffusion_unet_image_policy import DiffusionUnetImagePolicy


class DiffusionUnetHybridImagePolicy(DiffusionUnetImagePolicy):
    """DiffusionUnetImagePolicy with robomimic's encoder.

    ObservationEncoder describes the encoder's arguments: crop_shape, obs_encoder_group_norm, eval_fixed_crop, and
    `obs_encoder_width`, an addition to upstream's: the width of its ResNet's first stage, for small runs.
    """

    def __init__(
        self,
        shape_meta: Mapping,
        noise_scheduler,
        horizon: int,
        n_action_steps: int,
        n_obs_steps: int,
        num_inference_steps: int | None = None,
        obs_as_global_cond: bool = True,
        crop_shape: Sequence[int] | None = (76, 76),
        diffusion_step_embed_dim: int = 256,
        down_dims: Sequence[int] = (256, 512, 1024),
        kernel_size: int = 5,
        n_groups: int = 8,
        cond_predict_scale: bool = True,
        obs_encoder_group_norm: bool = False,
        eval_fixed_crop: bool = False,
        obs_encoder_width: int = 64,
        **kwargs,
    ):
        obs_encoder = ObservationEncoder(
            shape_meta, crop_shape, obs_encoder_group_norm, eval_fixed_crop, obs_encoder_width
        )
        super().__init__(
            shape_meta,
            noise_scheduler,
            obs_encoder,
            horizon,
            n_action_steps,
            n_obs_steps,
            num_inference_steps,
            obs_as_global_cond,
            diffusion_step_embed_dim,
            down_dims,
            kernel_size,
            n_groups,
            cond_predict_scale,
            **kwargs,
        )
