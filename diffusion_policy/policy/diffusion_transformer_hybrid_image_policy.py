"""Diffusion policy on images with a transformer and robomimic's encoder."""

from collections.abc import Mapping, Sequence

import torch

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.model.diffusion.transformer_for_diffusion import TransformerForDiffusion
from diffusion_policy.model.vision.robomimic_obs_encoder import ObservationEncoder
from diffusion_policy.policy.diffusion_image_policy import DiffusionImagePolicy, action_width


class DiffusionTransformerHybridImagePolicy(DiffusionImagePolicy):
    """Encoded observations are condition tokens (`obs_as_cond`) or in-painted.

    ObservationEncoder describes the encoder's arguments. `obs_encoder_width`, the width of its ResNet's first stage, is
    an addition to upstream's arguments, for small runs.
    """

    def __init__(
        self,
        shape_meta: Mapping,
        noise_scheduler,
        horizon: int,
        n_action_steps: int,
        n_obs_steps: int,
        num_inference_steps: int | None = None,
        crop_shape: Sequence[int] | None = (76, 76),
        obs_encoder_group_norm: bool = False,
        eval_fixed_crop: bool = False,
        n_layer: int = 8,
        n_cond_layers: int = 0,
        n_head: int = 4,
        n_emb: int = 256,
        p_drop_emb: float = 0.0,
        p_drop_attn: float = 0.3,
        causal_attn: bool = True,
        time_as_cond: bool = True,
        obs_as_cond: bool = True,
        pred_action_steps_only: bool = False,
        obs_encoder_width: int = 64,
        **kwargs,
    ):
        if pred_action_steps_only and not obs_as_cond:
            raise ConfigError("pred_action_steps_only=True needs obs_as_cond=True.")
        obs_encoder = ObservationEncoder(
            shape_meta, crop_shape, obs_encoder_group_norm, eval_fixed_crop, obs_encoder_width
        )
        action_dim, features = action_width(shape_meta), obs_encoder.output_shape()[0]
        width = action_dim if obs_as_cond else action_dim + features
        model = TransformerForDiffusion(
            input_dim=width,
            output_dim=width,
            # A causal mask has the size of the prediction; upstream uses the horizon and fails.
            horizon=n_action_steps if pred_action_steps_only and causal_attn else horizon,
            n_obs_steps=n_obs_steps,
            cond_dim=features if obs_as_cond else 0,
            n_layer=n_layer,
            n_head=n_head,
            n_emb=n_emb,
            p_drop_emb=p_drop_emb,
            p_drop_attn=p_drop_attn,
            causal_attn=causal_attn,
            time_as_cond=time_as_cond,
            obs_as_cond=obs_as_cond,
            n_cond_layers=n_cond_layers,
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
            inpainting=not obs_as_cond,
            pred_action_steps_only=pred_action_steps_only,
            **kwargs,
        )
        self.obs_as_cond = obs_as_cond

    def condition(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        """features: (B, To, F) -> cond: the same, as tokens."""
        return {"cond": features} if self.obs_as_cond else {}

    def get_optimizer(
        self,
        transformer_weight_decay: float,
        obs_encoder_weight_decay: float,
        learning_rate: float,
        betas: tuple[float, float],
    ) -> torch.optim.Optimizer:
        """AdamW on three groups: the transformer's decaying weights, its other parameters, and the encoder."""
        groups = self.model.get_optim_groups(weight_decay=transformer_weight_decay)  # type: ignore[operator]
        groups.append({"params": list(self.obs_encoder.parameters()), "weight_decay": obs_encoder_weight_decay})
        return torch.optim.AdamW(groups, lr=learning_rate, betas=tuple(betas))  # type: ignore[arg-type]
