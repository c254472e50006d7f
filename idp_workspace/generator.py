"""The generator f(o, a, t) or f(o, a, s, t): an observation and a (noisy) action become an action, over any backbone and encoder.

Objectives train and sample a generator and know nothing of what is inside; `build_generator` is the only place that knows the
argument families of upstream's policy constructors.
"""
from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from torch import Tensor, nn

from idp_workspace.options import unknown_argument

log = logging.getLogger(__name__)

#: Ways to hand the observation to the backbone, by the name of upstream's flag: (keyword of its forward).
CONDITIONING = {"obs_as_cond": "cond", "obs_as_global_cond": "global_cond", "obs_as_local_cond": "local_cond"}

#: Arguments of upstream's policies that configure a denoising sampler, which these objectives do not have.
WITHOUT_MEANING = ("noise_scheduler", "num_inference_steps")


@dataclasses.dataclass
class Generator:
    """Binds a backbone and an optional observation encoder. Owns no parameters: the policy registers `model` and `obs_encoder`.

    horizon is the number of steps the backbone generates; `start` is where, in a window of the dataset, they begin.
    """

    model: nn.Module
    obs_encoder: nn.Module | None
    conditioning: str
    horizon: int
    window: int
    start: int
    obs_dim: int
    action_dim: int
    n_obs_steps: int

    def encode(self, obs: Tensor) -> Tensor:
        """Condition from normalised observations (B, >=To, Do).

        (B, To, E) with an encoder, the observations (B, To, Do) without one; for local conditioning (B, H, Do), zero after To.
        """
        obs = obs[:, : self.n_obs_steps]
        if self.obs_encoder is not None:
            return self.obs_encoder(obs)
        if self.conditioning == "obs_as_local_cond":
            cond = obs.new_zeros(len(obs), self.horizon, self.obs_dim)
            cond[:, : self.n_obs_steps] = obs
            return cond
        return obs

    def embedding(self, cond: Tensor) -> Tensor:
        """phi(o) (B, F), detached: what the backbone is told of the observation, flattened over observation steps.

        With an encoder, its output. Without one, a transformer's observation tokens, or the normalised observation itself.
        """
        with torch.no_grad():
            if self.obs_encoder is None and self.conditioning == "obs_as_cond":
                cond = self.model.cond_obs_emb(cond)
            return cond.detach().flatten(1)

    def __call__(self, cond: Tensor, action: Tensor, t: float | Tensor, s: float | Tensor | None = None) -> Tensor:
        """f(o, action (B, H, D), t) -> (B, H, D). Time is raw, one number or one per sample.

        With s it is f(o, action, s, t), a function of the interval from s to t, as flow maps need; without, s = t.
        """
        def per_sample(time: float | Tensor) -> Tensor:
            return torch.as_tensor(time, dtype=action.dtype, device=action.device).expand(len(action))

        if self.conditioning == "obs_as_global_cond":
            cond = cond.flatten(1)
        # Only networks that are asked for two times need to know of the second.
        second = {} if s is None else {"start_time": per_sample(s)}
        return self.model(action, per_sample(t), **{CONDITIONING[self.conditioning]: cond}, **second)

    def check_observation(self, obs: Any) -> None:
        """Raise ValueError unless obs is a float tensor (B, >=To, Do)."""
        want = f"(batch, at least {self.n_obs_steps} steps, {self.obs_dim} numbers)"
        if not isinstance(obs, Tensor):
            raise ValueError(f"obs must be a tensor {want}, got {type(obs).__name__}")
        if obs.ndim != 3 or obs.shape[1] < self.n_obs_steps or obs.shape[2] != self.obs_dim:
            raise ValueError(f"obs must have shape {want}, got {tuple(obs.shape)}")

    def check_sizes(self) -> None:
        """Run the network once on zeros, so that sizes that do not fit are found before anything is trained or written."""
        modules = [module for module in (self.model, self.obs_encoder) if module is not None]
        training = [module.training for module in modules]
        parameter = next((p for module in modules for p in module.parameters() if p.numel()), torch.zeros(1))
        try:
            for module in modules:
                module.eval()
            with torch.no_grad():
                obs = parameter.new_zeros(1, self.n_obs_steps, self.obs_dim)
                action = parameter.new_zeros(1, self.horizon, self.action_dim)
                out = self(self.encode(obs), action, 0.0)
        except (RuntimeError, AssertionError, ValueError) as error:
            raise ValueError(
                f"the network does not fit the policy's sizes (horizon {self.horizon}, obs_dim {self.obs_dim}, n_obs_steps "
                f"{self.n_obs_steps}, action_dim {self.action_dim}, {self.conditioning}): {error}"
            ) from error
        finally:
            for module, mode in zip(modules, training):
                module.train(mode)
        if out.shape != action.shape:
            raise ValueError(f"the network returns {tuple(out.shape)} for an action chunk of shape {tuple(action.shape)}")


def build_generator(
    owner: str,
    *,
    model: nn.Module | None = None,
    obs_encoder: nn.Module | None = None,
    horizon: int | None = None,
    obs_dim: int | None = None,
    action_dim: int | None = None,
    n_obs_steps: int | None = None,
    n_action_steps: int | None = None,
    obs_as_cond: bool | None = None,
    obs_as_global_cond: bool | None = None,
    obs_as_local_cond: bool | None = None,
    pred_action_steps_only: bool = False,
    oa_step_convention: bool = True,
    known_options: tuple[str, ...] = (),
    **rest: Any,
) -> Generator:
    """A generator from the arguments of upstream's low-dimensional policy constructors, plus `obs_encoder`.

    Arguments that configure a denoising sampler are accepted, so that a config can be reused, and said once in the log.
    `oa_step_convention: false` starts the executed actions one step later, as upstream's UNet policy does.
    """
    sizes = {"model": model, "horizon": horizon, "obs_dim": obs_dim, "action_dim": action_dim, "n_obs_steps": n_obs_steps,
             "n_action_steps": n_action_steps}
    flags = {"obs_as_cond": obs_as_cond, "obs_as_global_cond": obs_as_global_cond, "obs_as_local_cond": obs_as_local_cond}
    known = {*sizes, *flags, *WITHOUT_MEANING, *known_options, "obs_encoder", "pred_action_steps_only", "oa_step_convention"}
    for name in rest:
        if name not in WITHOUT_MEANING:
            raise unknown_argument(name, known, owner)
    ignored = [name for name in WITHOUT_MEANING if rest.get(name) is not None]
    if ignored:
        log.info("%s does not denoise: %s accepted and not used", owner, ", ".join(ignored))
    missing = [name for name, value in sizes.items() if value is None]
    if missing:
        raise TypeError(f"{owner} needs the arguments {', '.join(missing)}")
    chosen = [name for name, value in flags.items() if value]
    if len(chosen) != 1:
        raise ValueError(
            f"{owner} needs the observation as a condition: set exactly one of {', '.join(flags)} (set: {', '.join(chosen) or 'none'}); "
            "in-painting the observation into the trajectory has no meaning for a one-step generator"
        )
    start = n_obs_steps - 1 if oa_step_convention else n_obs_steps
    if start + n_action_steps > horizon:
        raise ValueError(f"actions {start}..{start + n_action_steps - 1} are executed but the horizon is {horizon}: "
                         f"lower n_action_steps or raise horizon")
    generator = Generator(
        model=model, obs_encoder=obs_encoder, conditioning=chosen[0], horizon=n_action_steps if pred_action_steps_only else horizon,
        window=horizon, start=start if pred_action_steps_only else 0, obs_dim=obs_dim, action_dim=action_dim, n_obs_steps=n_obs_steps,
    )
    generator.check_sizes()
    return generator
