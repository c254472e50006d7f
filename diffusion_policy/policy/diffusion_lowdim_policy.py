"""Training and sampling of a low-dimensional diffusion policy, whatever its network."""
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.model.common.normalizer import LinearNormalizer
from diffusion_policy.model.diffusion.mask_generator import LowdimMaskGenerator
from diffusion_policy.policy.base_lowdim_policy import BaseLowdimPolicy


class DiffusionLowdimPolicy(BaseLowdimPolicy):
    """DDPM over action sequences, all quantities normalised:

        x_k = sqrt(abar_k) x_0 + sqrt(1 - abar_k) eps,    L = mean |model(x_k, k, obs) - target|^2,

    target being eps or x_0 as the scheduler's prediction_type says. A subclass says in `condition` how the observation
    reaches the network. Where it does not (`inpainting`), x = [action | obs] and the observed entries are given: they replace
    the noisy ones in every call and count as zeros in the mean. `action_start` is the index of the first executed action.
    Keyword arguments that are not known here go to `noise_scheduler.step`.
    """

    def __init__(self, model: nn.Module, noise_scheduler, horizon: int, obs_dim: int, action_dim: int, n_action_steps: int,
                 n_obs_steps: int, num_inference_steps: int | None, inpainting: bool, pred_action_steps_only: bool,
                 action_start: int, **kwargs):
        super().__init__()
        if action_start + n_action_steps > horizon:
            raise ConfigError(
                f"Executed actions are steps {action_start} to {action_start + n_action_steps - 1} of the prediction, "
                f"which has only horizon = {horizon} steps.")
        self.model = model
        self.noise_scheduler = noise_scheduler
        self.mask_generator = LowdimMaskGenerator(
            action_dim=action_dim, obs_dim=obs_dim if inpainting else 0, max_n_obs_steps=n_obs_steps)
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

    def condition(self, nobs: torch.Tensor) -> dict[str, torch.Tensor]:
        """nobs: (B, To, Do), normalised -> keyword arguments for the network."""
        raise NotImplementedError

    def set_normalizer(self, normalizer: LinearNormalizer):
        self.normalizer.load_state_dict(normalizer.state_dict())

    # ========= inference =========

    def conditional_sample(self, condition_data: torch.Tensor, condition_mask: torch.Tensor,
                           cond: torch.Tensor | None = None, local_cond: torch.Tensor | None = None,
                           global_cond: torch.Tensor | None = None, generator: torch.Generator | None = None,
                           **kwargs) -> torch.Tensor:
        """Denoise from N(0, I) with the entries of `condition_mask` held at `condition_data`, both (B, T, D) -> (B, T, D).

        Draws one normal (B, T, D), then what the scheduler draws; `kwargs` go to `noise_scheduler.step`.
        """
        conditions = {"cond": cond, "local_cond": local_cond, "global_cond": global_cond}
        conditions = {name: value for name, value in conditions.items() if value is not None}
        trajectory = torch.randn(
            condition_data.shape, dtype=condition_data.dtype, device=condition_data.device, generator=generator)
        self.noise_scheduler.set_timesteps(self.num_inference_steps)
        for timestep in self.noise_scheduler.timesteps:
            trajectory = torch.where(condition_mask, condition_data, trajectory)
            output = self.model(trajectory, timestep, **conditions)
            trajectory = self.noise_scheduler.step(output, timestep, trajectory, generator=generator, **kwargs).prev_sample
        return torch.where(condition_mask, condition_data, trajectory)

    @torch.no_grad()
    def predict_action(self, obs_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """{'obs': (B, >=To, Do)} -> {'action': (B, Ta, Da), 'action_pred': (B, T, Da)}.

        In-painting adds {'action_obs_pred': (B, Ta, Do), 'obs_pred': (B, T, Do)}.
        """
        obs = self._checked_obs(obs_dict)
        nobs = self.normalizer["obs"].normalize(obs)[:, :self.n_obs_steps]
        n_step = self.n_action_steps if self.pred_action_steps_only else self.horizon
        width = self.action_dim + (self.obs_dim if self.inpainting else 0)

        data = torch.zeros(len(nobs), n_step, width, dtype=nobs.dtype, device=nobs.device)
        mask = torch.zeros_like(data, dtype=torch.bool)
        if self.inpainting:
            data[:, :self.n_obs_steps, self.action_dim:] = nobs
            mask[:, :self.n_obs_steps, self.action_dim:] = True
        sample = self.conditional_sample(data, mask, **self.condition(nobs), **self.kwargs)

        action_pred = self.normalizer["action"].unnormalize(sample[..., :self.action_dim])
        if not bool(torch.isfinite(action_pred).all()):
            raise ConfigError("The predicted actions are not finite: either 'obs' holds numbers far beyond those of the dataset, or the weights are "
                              "broken and an earlier checkpoint is needed.")
        executed = slice(self.action_start, self.action_start + self.n_action_steps)
        action = action_pred if self.pred_action_steps_only else action_pred[:, executed]
        result = {"action": action, "action_pred": action_pred}
        if self.inpainting:
            obs_pred = self.normalizer["obs"].unnormalize(sample[..., self.action_dim:])
            result.update(action_obs_pred=obs_pred[:, executed], obs_pred=obs_pred)
        return result

    def _checked_obs(self, obs_dict: dict[str, torch.Tensor]) -> torch.Tensor:
        if not isinstance(obs_dict, Mapping):
            raise ConfigError(f"predict_action takes a dictionary with the key 'obs', not a {type(obs_dict).__name__}.")
        if "past_action" in obs_dict:
            raise ConfigError("This policy cannot use 'past_action': set past_action_visible=False.")
        if "obs" not in obs_dict:
            raise ConfigError(f"predict_action needs the key 'obs', but got: {', '.join(map(str, obs_dict)) or 'none'}.")
        obs = obs_dict["obs"]
        if not isinstance(obs, torch.Tensor) or obs.layout is not torch.strided or obs.device.type == "meta" or obs.is_complex():
            kind = f"{obs.dtype} in {obs.layout} on {obs.device}" if isinstance(obs, torch.Tensor) else type(obs).__name__
            raise ConfigError(f"predict_action expects 'obs' as a dense tensor of real numbers, but got {kind}.")
        if obs.ndim != 3 or len(obs) == 0 or obs.shape[1] < self.n_obs_steps or obs.shape[2] != self.obs_dim:
            raise ConfigError(
                f"predict_action expects 'obs' of shape (B, n_obs_steps >= {self.n_obs_steps}, obs_dim = {self.obs_dim}), "
                f"but got {tuple(obs.shape)}.")
        if not bool(torch.isfinite(self.normalizer["obs"].normalize(obs[:, :self.n_obs_steps])).all()):
            raise ConfigError("'obs' holds NaN, infinity, or numbers too large to normalise.")
        return obs

    # ========= training =========

    def compute_loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """{'obs': (B, T, Do), 'action': (B, T, Da)} -> scalar. Draws a normal of the trajectory's shape, then (B,) steps."""
        if "valid_mask" in batch:
            raise ConfigError("This policy cannot use 'valid_mask'.")
        nobs = self.normalizer["obs"].normalize(batch["obs"])
        trajectory = self.normalizer["action"].normalize(batch["action"])
        if self.pred_action_steps_only:
            trajectory = trajectory[:, self.action_start:self.action_start + self.n_action_steps]
        if self.inpainting:
            trajectory = torch.cat([trajectory, nobs], dim=-1)
        mask = self.mask_generator(trajectory.shape)

        noise = torch.randn(trajectory.shape, device=trajectory.device)
        timesteps = torch.randint(
            0, self.noise_scheduler.config.num_train_timesteps, (len(trajectory),), device=trajectory.device)
        noisy = self.noise_scheduler.add_noise(trajectory, noise, timesteps)
        noisy = torch.where(mask, trajectory, noisy)
        output = self.model(noisy, timesteps, **self.condition(nobs[:, :self.n_obs_steps]))

        targets = {"epsilon": noise, "sample": trajectory}
        prediction_type = self.noise_scheduler.config.prediction_type
        if prediction_type not in targets:
            raise ConfigError(f"prediction_type = {prediction_type!r} is not supported: use one of {', '.join(targets)}.")
        error = F.mse_loss(output, targets[prediction_type], reduction="none")
        return error.masked_fill(mask, 0).mean()
