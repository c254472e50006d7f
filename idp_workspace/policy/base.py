"""Base of all objectives: the generator, normalisation, and the interface of upstream's policies."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from diffusion_policy.model.common.normalizer import LinearNormalizer
from diffusion_policy.policy.base_image_policy import BaseImagePolicy
from diffusion_policy.policy.base_lowdim_policy import BaseLowdimPolicy
from idp_workspace.observation import all_finite, as_floats, check_chunks, check_observation, check_sample
from idp_workspace.options import Options, split_options
from idp_workspace.upstream_arguments import UpstreamArguments, build_generator


class GeneratorPolicy(BaseLowdimPolicy, BaseImagePolicy):
    """A policy made of a generator and an objective.

    A subclass declares its options in a dataclass `Options` and defines two methods on normalised tensors:

        loss(cond, actions (B, H, D)) -> scalar          how the generator is trained
        sample(cond, batch) -> (batch, H, D)             how it acts

    Options are given as one object, `IDPPolicy(IDPOptions(tau=0.5), ...)`, or as keywords, `IDPPolicy(tau=0.5, ...)`,
    as a config does. The other keywords are upstream's: networks, sizes, conditioning (`UpstreamArguments`).
    State-dict keys: model.*, obs_encoder.*, normalizer.*.
    """

    Options: ClassVar[type] = Options
    two_times: ClassVar[bool] = False
    """Whether the objective calls the generator with two times, f(o, a, s, t)."""

    def __init__(self, options: Any = None, **arguments: Unpack[UpstreamArguments]) -> None:
        super().__init__()
        rest: dict[str, Any] = dict(arguments)
        names = [field.name for field in dataclasses.fields(self.Options)] if options is None else []
        if options is None:
            options, rest = split_options(self.Options, rest)
        self.options: Any = options
        self.generator = build_generator(type(self).__name__, names, **rest)
        if self.two_times:
            self.generator.check_two_times()
        self.model = self.generator.model
        self.obs_encoder = self.generator.obs_encoder
        self.normalizer = LinearNormalizer()
        self.horizon = self.generator.window
        self.obs_dim = self.generator.obs_dim
        self.action_dim = self.generator.action_dim
        self.n_obs_steps = self.generator.n_obs_steps
        self.n_action_steps: int = rest["n_action_steps"]
        self.oa_step_convention: bool = rest.get("oa_step_convention", True)
        self.pred_action_steps_only: bool = rest.get("pred_action_steps_only", False)
        self.progress: float | None = None  # the share of the training that is done, if the training loop tells it
        self.num_inference_steps = 1  # upstream's robot scripts write it
        self.nfe = self.default_nfe()

    # ------------------------------------------------------------------ training
    def loss(self, cond: Tensor, actions: Tensor) -> Tensor:
        """Return the scalar loss for a condition and normalised expert chunks (B, H, D)."""
        raise NotImplementedError

    def compute_loss(self, batch: dict[str, Any]) -> Tensor:
        """Return the scalar loss of a batch {'obs': (B, >=To, Do) or {key: (B, >=To, *shape)}, 'action': (B, T, Da)}.

        The batch is in the units of the dataset.
        """
        first, last = self.generator.start, self.generator.start + self.generator.horizon
        check_chunks(batch, last, self.horizon, self.action_dim)
        actions = self.normalizer["action"].normalize(batch["action"])[:, first:last]
        return self.loss_of(self.normalise_observation(batch["obs"], finite=False), actions)

    def loss_of(self, obs: Tensor | dict[str, Tensor], actions: Tensor) -> Tensor:
        """Return the loss from normalised observations, for objectives that need them in more than one encoding."""
        return self.loss(self.generator.encode(obs), actions)

    def normalise_observation(self, obs: Any, finite: bool = True) -> Tensor | dict[str, Tensor]:
        """Check an observation in the units of the dataset, and normalise it for `generator.encode`."""
        g = self.generator
        check_observation({"obs": obs} if g.obs_dim is not None else obs, g.entries, g.n_obs_steps, finite)
        return self.normalised(obs)

    def normalised(self, obs: Any) -> Tensor | dict[str, Tensor]:
        """Normalise an observation that is known to fit."""
        g = self.generator
        if g.obs_dim is not None:
            return self.normalizer["obs"].normalize(obs)
        floats = as_floats(obs, g.entries, g.n_obs_steps)
        return {key: self.normalizer[key].normalize(value) for key, value in floats.items()}

    def set_normalizer(self, normalizer: LinearNormalizer) -> None:
        self.normalizer.load_state_dict(normalizer.state_dict())
        if self.obs_dim is not None and hasattr(self.obs_encoder, "set_normalizer"):
            self.obs_encoder.set_normalizer(self.normalizer["obs"])  # type: ignore[operator, union-attr]

    def get_optimizer(
        self,
        learning_rate: float,
        weight_decay: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        transformer_weight_decay: float | None = None,
        obs_encoder_weight_decay: float | None = None,
    ) -> torch.optim.Optimizer:
        """Return AdamW as upstream's transformer workspaces ask for it: no decay of biases, norms and embeddings."""
        decay = next((d for d in (transformer_weight_decay, weight_decay) if d is not None), 1e-3)
        if hasattr(self.model, "get_optim_groups"):
            groups = list(self.model.get_optim_groups(weight_decay=decay))  # type: ignore[operator]
        else:
            groups = [{"params": list(self.model.parameters()), "weight_decay": decay}]
        if self.obs_encoder is not None:
            encoder_decay = decay if obs_encoder_weight_decay is None else obs_encoder_weight_decay
            groups.append({"params": list(self.obs_encoder.parameters()), "weight_decay": encoder_decay})
        return torch.optim.AdamW(groups, lr=learning_rate, betas=tuple(betas))  # type: ignore[arg-type]

    # ------------------------------------------------------------------ what a training loop may tell and ask
    # Defined here as well as in the host's base classes: those of upstream's own tree do not have them.
    def on_train_start(self) -> None:
        """Prepare for training, after the normaliser is set."""

    def set_average(self, policy: Any) -> None:
        """Receive the policy with the averaged weights, or None."""

    def set_progress(self, fraction: float) -> None:
        """Set the share of the training that is done, in [0, 1]."""
        self.progress = fraction

    def metrics(self) -> dict[str, float]:
        """Return numbers to log about the last batch."""
        return {}

    # ------------------------------------------------------------------ acting
    def obs_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each entry of an observation at one step."""
        return {key: tuple(entry.shape) for key, entry in self.generator.entries.items()}

    @property
    def rgb_keys(self) -> set[str]:
        """The entries of an observation that are images."""
        return {key for key, entry in self.generator.entries.items() if entry.rgb}

    def sample(self, cond: Tensor, batch: int) -> Tensor:
        """Return normalised action chunks (batch, H, D) for a condition."""
        raise NotImplementedError

    @torch.no_grad()
    def predict_action(self, obs_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Turn {'obs': (B, >=To, Do)} or {key: (B, >=To, *shape)} into actions, all in the units of the dataset.

        Images are uint8, or floats in [0, 1]. Returns 'action' (B, Ta, Da), to execute, and 'action_pred' (B, H, Da).
        """
        check_observation(obs_dict, self.generator.entries, self.n_obs_steps)
        result = self.act(obs_dict)
        if not all_finite(result["action_pred"]):
            raise ValueError(
                f"{type(self).__name__} predicted non-finite actions from a finite observation: the observation is far "
                "outside the dataset, or the weights are broken; use an earlier checkpoint"
            )
        return result

    def act(self, obs_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Compute `predict_action` without looking at values, so that it can be compiled or exported as one graph."""
        cond = self.generator.encode(self.normalised(obs_dict if self.obs_dim is None else obs_dict["obs"]))
        batch = cond.shape[0]
        chunk = self.sample(cond, batch)
        check_sample(type(self).__name__, chunk, (batch, self.generator.horizon, self.action_dim))
        prediction = self.normalizer["action"].unnormalize(chunk)
        if self.pred_action_steps_only:
            return {"action": prediction, "action_pred": prediction}
        first = self.n_obs_steps - 1 if self.oa_step_convention else self.n_obs_steps
        return {"action": prediction[:, first : first + self.n_action_steps], "action_pred": prediction}

    def zeros(self, batch: int) -> Tensor:
        """Return the action (batch, H, D) that a proposal starts from."""
        return torch.zeros(batch, self.generator.horizon, self.action_dim, device=self.device, dtype=self.dtype)

    @property
    def nfe(self) -> int:
        """Network calls per action chunk."""
        return self._nfe

    @nfe.setter
    def nfe(self, calls: int) -> None:
        self.check_nfe(calls)
        self._nfe = calls

    def default_nfe(self) -> int:
        return getattr(self.options, "nfe", 1)

    def check_nfe(self, nfe: int) -> None:
        """Raise ValueError for a number of network calls that the objective cannot act with."""
        if nfe != 1:
            raise ValueError(f"nfe={nfe}: {type(self).__name__} acts with one network call")
