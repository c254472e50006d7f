"""Training and sampling of a diffusion policy, for any network and any observation."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.model.common.module_attr_mixin import ModuleAttrMixin
from diffusion_policy.model.common.normalizer import LinearNormalizer
from diffusion_policy.model.diffusion.mask_generator import LowdimMaskGenerator
from diffusion_policy.policy.training_hooks import TrainingHooks


class DiffusionBasePolicy(ModuleAttrMixin, TrainingHooks):
    """DDPM over action sequences, all quantities normalised.

        x_k = sqrt(abar_k) x_0 + sqrt(1 - abar_k) eps,    L = mean |model(x_k, k, obs) - target|^2,

    where the target is eps or x_0, by the scheduler's prediction_type. A subclass defines in `encode` how an
    observation becomes a vector of `obs_dim` numbers per step, and in `condition` how the vectors reach the network.
    With `inpainting` they are part of the trajectory instead: x = [action | obs], and the observed entries replace the
    noisy ones in every call and count as zeros in the mean. `action_start` is the index of the first executed action.
    Unknown keyword arguments go to `noise_scheduler.step`.
    """

    def __init__(
        self,
        model: nn.Module,
        noise_scheduler: Any,
        horizon: int,
        obs_dim: int,
        action_dim: int,
        n_action_steps: int,
        n_obs_steps: int,
        num_inference_steps: int | None,
        inpainting: bool,
        pred_action_steps_only: bool,
        action_start: int,
        obs_encoder: nn.Module | None = None,
        **kwargs: Any,
    ):
        super().__init__()
        if action_start + n_action_steps > horizon:
            raise ConfigError(
                f"Executed actions are steps {action_start} to {action_start + n_action_steps - 1} of the prediction, "
                f"which has only horizon = {horizon} steps."
            )
        if obs_encoder is not None:
            self.obs_encoder = obs_encoder  # before the network: checkpoints have this order
        self.model = model
        self.noise_scheduler = noise_scheduler
        self.mask_generator = LowdimMaskGenerator(
            action_dim=action_dim, obs_dim=obs_dim if inpainting else 0, max_n_obs_steps=n_obs_steps
        )
        self.normalizer = LinearNormalizer()
        self.horizon = horizon
        self.obs_dim = obs_dim
        self.action_dim = action_dim
        self.n_action_steps = n_action_steps
        self.n_obs_steps = n_obs_steps
        self.inpainting = inpainting
        self.pred_action_steps_only = pred_action_steps_only
        self.action_start = action_start
        self.kwargs = kwargs
        if num_inference_steps is None:
            num_inference_steps = noise_scheduler.config.num_train_timesteps
        self.num_inference_steps = num_inference_steps

    @property
    def nfe(self) -> int:
        """Network calls per action chunk, one per denoising step."""
        return self.num_inference_steps

    @nfe.setter
    def nfe(self, steps: int) -> None:
        self.num_inference_steps = steps

    @property
    def rgb_keys(self) -> set[str]:
        """Entries of an observation that are images."""
        return set()

    def obs_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each entry of an observation at one step."""
        raise NotImplementedError

    def encode(self, obs: Any, n_step: int) -> torch.Tensor:
        """Observation (B, >=n_step, ...), in the dataset's units -> its first steps, encoded: (B, n_step, obs_dim)."""
        raise NotImplementedError

    def condition(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        """features: (B, To, obs_dim), encoded observations -> keyword arguments for the network."""
        raise NotImplementedError

    def set_normalizer(self, normalizer: LinearNormalizer) -> None:
        self.normalizer.load_state_dict(normalizer.state_dict())

    # ========= inference =========

    def conditional_sample(
        self,
        condition_data: torch.Tensor,
        condition_mask: torch.Tensor,
        cond: torch.Tensor | None = None,
        local_cond: torch.Tensor | None = None,
        global_cond: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Denoise from N(0, I) with the entries of `condition_mask` fixed to `condition_data`, both (B, T, D).

        Draws one normal (B, T, D), then the scheduler's noise; `kwargs` go to `noise_scheduler.step`.
        """
        conditions = {"cond": cond, "local_cond": local_cond, "global_cond": global_cond}
        conditions = {name: value for name, value in conditions.items() if value is not None}
        trajectory = torch.randn(
            condition_data.shape, dtype=condition_data.dtype, device=condition_data.device, generator=generator
        )
        self.noise_scheduler.set_timesteps(self.num_inference_steps)
        for timestep in self.noise_scheduler.timesteps:
            trajectory = torch.where(condition_mask, condition_data, trajectory)
            output = self.model(trajectory, timestep, **conditions)
            trajectory = self.noise_scheduler.step(
                output, timestep, trajectory, generator=generator, **kwargs
            ).prev_sample
        return torch.where(condition_mask, condition_data, trajectory)

    def sample(self, features: torch.Tensor) -> torch.Tensor:
        """Features (B, To, obs_dim) -> normalised trajectory (B, T, D); with in-painting, D = action_dim + obs_dim."""
        n_step = self.n_action_steps if self.pred_action_steps_only else self.horizon
        width = self.action_dim + (self.obs_dim if self.inpainting else 0)
        data = torch.zeros(features.shape[0], n_step, width, dtype=features.dtype, device=features.device)
        mask = torch.zeros_like(data, dtype=torch.bool)
        if self.inpainting:
            data[:, : self.n_obs_steps, self.action_dim :] = features
            mask[:, : self.n_obs_steps, self.action_dim :] = True
        conditions: dict[str, Any] = dict(self.condition(features))
        return self.conditional_sample(data, mask, **conditions, **self.kwargs)

    @torch.no_grad()
    def predict_action(self, obs_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """{key: (B, >=To, ...)} -> {'action': (B, Ta, Da), 'action_pred': (B, T, Da)}, with `predicted_obs`."""
        self.check_obs(obs_dict)
        result = self.act(obs_dict)
        if not bool(torch.isfinite(result["action_pred"]).all()):
            raise ConfigError(
                "The predicted actions are not finite: either the observation holds numbers far beyond those of the "
                "dataset, or the weights are broken and an earlier checkpoint is needed."
            )
        return result

    def act(self, obs_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Compute `predict_action` without looking at values, so that it can be compiled or exported as one graph."""
        sample = self.sample(self.encode(self.observation_of(obs_dict), self.n_obs_steps))
        action_pred = self.normalizer["action"].unnormalize(sample[..., : self.action_dim])
        action = action_pred if self.pred_action_steps_only else action_pred[:, self.executed]
        return {"action": action, "action_pred": action_pred, **self.predicted_obs(sample)}

    @property
    def executed(self) -> slice:
        """The steps of a prediction that are executed."""
        return slice(self.action_start, self.action_start + self.n_action_steps)

    def observation_of(self, obs_dict: dict[str, torch.Tensor]) -> Any:
        """The argument of `encode`, from that of `predict_action`."""
        return obs_dict

    def predicted_obs(self, sample: torch.Tensor) -> dict[str, torch.Tensor]:
        """Further predictions in a trajectory (B, T, D), beside the actions."""
        return {}

    def check_obs(self, obs_dict: dict[str, torch.Tensor]) -> None:
        """Raise ConfigError unless every entry is a tensor (B, >=To, *shape) of one batch size."""
        shapes = self.obs_shapes()
        names = f"key{'s' * (len(shapes) > 1)} " + ", ".join(f"'{key}'" for key in shapes)
        if not isinstance(obs_dict, Mapping):
            raise ConfigError(f"predict_action takes a dictionary with the {names}, not a {type(obs_dict).__name__}.")
        if "past_action" in obs_dict:
            raise ConfigError("This policy cannot use 'past_action': set past_action_visible=False.")
        if not set(shapes) <= set(obs_dict):
            raise ConfigError(f"predict_action needs the {names}, but got: {', '.join(map(str, obs_dict)) or 'none'}.")
        for key, shape in shapes.items():
            obs = obs_dict[key]
            if (
                not isinstance(obs, torch.Tensor)
                or obs.layout is not torch.strided
                or obs.device.type == "meta"
                or obs.is_complex()
            ):
                kind = (
                    f"{obs.dtype} in {obs.layout} on {obs.device}"
                    if isinstance(obs, torch.Tensor)
                    else type(obs).__name__
                )
                raise ConfigError(f"predict_action expects '{key}' as a dense tensor of real numbers, but got {kind}.")
            if obs.ndim != 2 + len(shape) or len(obs) == 0 or obs.shape[1] < self.n_obs_steps or obs.shape[2:] != shape:
                size = f"{key}_dim = {shape[0]}" if len(shape) == 1 else ", ".join(map(str, shape))
                raise ConfigError(
                    f"predict_action expects '{key}' of shape (B, n_obs_steps >= {self.n_obs_steps}, {size}), "
                    f"but got {tuple(obs.shape)}."
                )
            if not bool(torch.isfinite(self.normalizer[key].normalize(obs[:, : self.n_obs_steps])).all()):
                raise ConfigError(f"'{key}' holds NaN, infinity, or numbers too large to normalise.")
        sizes = {key: len(obs_dict[key]) for key in shapes}
        if len(set(sizes.values())) > 1:
            raise ConfigError(f"The entries of an observation must have one batch size, but got {sizes}.")

    # ========= training =========

    def compute_loss(self, batch: dict[str, Any]) -> torch.Tensor:
        """{'obs': observation (B, >=To, ...), 'action': (B, T, Da)} -> scalar; in-painting needs T observed steps.

        Draws the encoder's random numbers (crops), a normal of the trajectory's shape, and (B,) diffusion steps.
        """
        if "valid_mask" in batch:
            raise ConfigError("This policy cannot use 'valid_mask'.")
        trajectory = self.normalizer["action"].normalize(batch["action"])
        if self.pred_action_steps_only:
            trajectory = trajectory[:, self.executed]
        features = self.encode(batch["obs"], trajectory.shape[1] if self.inpainting else self.n_obs_steps)
        if self.inpainting:
            # Detached: the encoder would otherwise learn features that are easy to predict.
            trajectory = torch.cat([trajectory, features.detach()], dim=-1)
        mask = self.mask_generator(trajectory.shape)

        noise = torch.randn(trajectory.shape, device=trajectory.device)
        timesteps = torch.randint(
            0, self.noise_scheduler.config.num_train_timesteps, (len(trajectory),), device=trajectory.device
        )
        noisy = self.noise_scheduler.add_noise(trajectory, noise, timesteps)
        noisy = torch.where(mask, trajectory, noisy)
        output = self.model(noisy, timesteps, **self.condition(features))

        targets = {"epsilon": noise, "sample": trajectory}
        prediction_type = self.noise_scheduler.config.prediction_type
        if prediction_type not in targets:
            raise ConfigError(
                f"prediction_type = {prediction_type!r} is not supported: use one of {', '.join(targets)}."
            )
        error = F.mse_loss(output, targets[prediction_type], reduction="none")
        return error.masked_fill(mask, 0).mean()
