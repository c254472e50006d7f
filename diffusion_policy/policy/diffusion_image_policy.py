"""Diffusion policy on images and vectors, for any network."""

from collections.abc import Mapping

import torch
from torch import nn

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.policy.base_image_policy import BaseImagePolicy
from diffusion_policy.policy.diffusion_base_policy import DiffusionBasePolicy


class DiffusionImagePolicy(DiffusionBasePolicy, BaseImagePolicy):
    """The observation is {key: (B, T, *shape)} by shape_meta, images as uint8 or in [0, 1]; each step is encoded alone.

    The first executed action belongs to the last observation. With in-painting the features are targets and the encoder
    gets no gradient: it keeps its initial weights.
    """

    def __init__(
        self,
        shape_meta: Mapping,
        obs_encoder: nn.Module,
        model: nn.Module,
        noise_scheduler,
        horizon: int,
        n_action_steps: int,
        n_obs_steps: int,
        num_inference_steps: int | None,
        inpainting: bool,
        pred_action_steps_only: bool = False,
        **kwargs,
    ):
        super().__init__(
            model,
            noise_scheduler,
            horizon,
            obs_encoder.output_shape()[0],  # type: ignore[operator]
            action_width(shape_meta),
            n_action_steps,
            n_obs_steps,
            num_inference_steps,
            inpainting,
            pred_action_steps_only,
            action_start=n_obs_steps - 1,
            obs_encoder=obs_encoder,
            **kwargs,
        )
        self.obs_feature_dim = self.obs_dim
        self.shapes = {key: tuple(entry["shape"]) for key, entry in shape_meta["obs"].items()}
        self._rgb_keys = {key for key, entry in shape_meta["obs"].items() if entry.get("type") == "rgb"}

    @property
    def rgb_keys(self) -> set[str]:
        return self._rgb_keys

    def obs_shapes(self) -> dict[str, tuple[int, ...]]:
        return self.shapes

    def encode(self, obs: dict[str, torch.Tensor], n_step: int) -> torch.Tensor:
        frames = {}
        for key in self.shapes:
            value = obs[key][:, :n_step]
            if value.shape[1] < n_step:
                raise ConfigError(
                    f"'{key}' is observed for {value.shape[1]} steps, but {n_step} are needed: in-painting needs the "
                    "observations of the whole horizon (task.dataset.n_obs_steps=null)."
                )
            if key in self.rgb_keys and value.dtype == torch.uint8:
                value = value.float().div_(255)
            frames[key] = self.normalizer[key].normalize(value).flatten(0, 1)
        return self.obs_encoder(frames).unflatten(0, (-1, n_step))


def action_width(shape_meta: Mapping) -> int:
    """Da, from {'action': {'shape': [Da]}}."""
    shape = shape_meta["action"]["shape"]
    if len(shape) != 1:
        raise ConfigError(f"shape_meta.action.shape must have one dimension, not {list(shape)}.")
    return shape[0]
