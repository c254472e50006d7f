"""The generator f(o, a, t): it turns an observation and a (noisy) action into an action, with any backbone and encoder.

Objectives train and sample a generator and do not know what is inside.
"""

from __future__ import annotations

import dataclasses
import inspect

import torch
from torch import Tensor, nn

from idp_workspace.observation import Entry

#: Ways to pass the observation to the backbone, by upstream's flag: the keyword of the backbone's forward.
CONDITIONING = {"obs_as_cond": "cond", "obs_as_global_cond": "global_cond", "obs_as_local_cond": "local_cond"}


@dataclasses.dataclass
class Generator:
    """Binds a backbone and an observation encoder. It owns no parameters: the policy registers both networks.

    Build one directly, or from upstream's arguments with `upstream_arguments.build_generator`.
    """

    model: nn.Module
    obs_encoder: nn.Module | None
    conditioning: str
    """A key of CONDITIONING."""
    horizon: int
    """Number of steps that the backbone generates."""
    window: int
    """Number of steps in a window of the dataset."""
    start: int
    """Step of the window at which the generated steps begin."""
    obs_dim: int | None
    """Size of the observation vector; None if the observation is a dictionary."""
    entries: dict[str, Entry]
    """What the observation holds, by key; 'obs' for a vector."""
    action_dim: int
    n_obs_steps: int
    per_frame: bool = False
    """Whether the encoder takes single frames (N, ...), as upstream's do, instead of all steps (B, To, ...)."""

    def encode(self, obs: Tensor | dict[str, Tensor]) -> Tensor:
        """Return the condition for normalised observations (B, >=To, Do) or {key: (B, >=To, *shape)}.

        (B, To, E) with an encoder, else the observations (B, To, Do); (B, H, Do), zero after To, for local
        conditioning.
        """
        if isinstance(obs, dict):
            assert self.obs_encoder is not None
            frames = {key: obs[key][:, : self.n_obs_steps] for key in self.entries}
            if not self.per_frame:
                return self.obs_encoder(frames)
            features = self.obs_encoder({key: value.flatten(0, 1) for key, value in frames.items()})
            return features.unflatten(0, (-1, self.n_obs_steps))
        obs = obs[:, : self.n_obs_steps]
        if self.obs_encoder is not None:
            return self.obs_encoder(obs)
        if self.conditioning == "obs_as_local_cond":
            return nn.functional.pad(obs, (0, 0, 0, self.horizon - self.n_obs_steps))
        return obs

    @torch.no_grad()
    def embedding(self, cond: Tensor) -> Tensor:
        """Return phi(o) (B, F) without gradient: the encoder's output, flattened over observation steps.

        Without an encoder: the observation tokens of a transformer, or the normalised observation itself.
        """
        if self.obs_encoder is None and self.conditioning == "obs_as_cond":
            cond = self.model.cond_obs_emb(cond)  # type: ignore[operator]
        return cond.detach().flatten(1)

    def check_two_times(self) -> None:
        """Raise ValueError unless the backbone takes `start_time`; upstream's accept any keyword and ignore it."""
        if "start_time" not in inspect.signature(self.model.forward).parameters:
            raise ValueError(
                f"the objective needs a network of two times, but {type(self.model).__name__} would ignore the second "
                "(its forward has no argument start_time); use another backbone, or another objective"
            )

    def __call__(self, cond: Tensor, action: Tensor, t: float | Tensor, s: float | Tensor | None = None) -> Tensor:
        """Return f(o, action, t) (B, H, D). Time is raw, a number or (B,).

        With s it is f(o, action, s, t), a function of the interval from s to t, as flow maps need.
        """
        if self.conditioning == "obs_as_global_cond":
            cond = cond.flatten(1)
        condition = {CONDITIONING[self.conditioning]: cond}
        if s is not None:
            self.check_two_times()
            condition["start_time"] = per_sample(s, action)
        return self.model(action, per_sample(t, action), **condition)

    def together(self, *calls: tuple[Tensor, Tensor, float]) -> tuple[Tensor, ...]:
        """Return f(o, action, t) for several (o, action, t), with one call of the network."""
        cond, action, times = zip(*((c, a, per_sample(t, a)) for c, a, t in calls), strict=True)
        together = self(torch.cat(cond), torch.cat(action), torch.cat(times))
        return torch.split(together, [len(a) for a in action])


def per_sample(time: float | Tensor, action: Tensor) -> Tensor:
    """Return a time for each sample, (B,)."""
    return torch.as_tensor(time, dtype=action.dtype, device=action.device).expand(action.shape[0])
