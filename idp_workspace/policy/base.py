"""What every objective shares: normalisation, the generator, the interface of upstream's policies."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from diffusion_policy.model.common.normalizer import LinearNormalizer
from diffusion_policy.policy.base_image_policy import BaseImagePolicy
from diffusion_policy.policy.base_lowdim_policy import BaseLowdimPolicy
from idp_workspace.generator import all_finite, build_generator
from idp_workspace.options import split_options


class GeneratorPolicy(BaseLowdimPolicy, BaseImagePolicy):
    """A policy made of a generator and an objective.

    A subclass names its arguments in the dataclass `Options` and defines two methods on normalised tensors:

        loss(cond, actions (B, H, D)) -> scalar          how the generator is trained
        sample(cond, batch) -> (batch, H, D)             how it acts

    The observation is one vector 'obs' of obs_dim numbers, or, with shape_meta, images and vectors by key: the generator's concern.
    It accepts what upstream's policy constructors accept. State-dict keys: model.*, obs_encoder.*, normalizer.*.
    """

    @dataclasses.dataclass(frozen=True)
    class Options:
        pass

    def __init__(self, **arguments: Any):
        super().__init__()
        self.options, rest = split_options(self.Options, arguments)
        names = tuple(field.name for field in dataclasses.fields(self.Options))
        self.generator = build_generator(type(self).__name__, known_options=names, **rest)
        self.model = self.generator.model
        self.obs_encoder = self.generator.obs_encoder
        self.normalizer = LinearNormalizer()
        self.horizon = self.generator.window
        self.obs_dim = self.generator.obs_dim
        self.action_dim = self.generator.action_dim
        self.n_obs_steps = self.generator.n_obs_steps
        self.n_action_steps = rest["n_action_steps"]
        self.oa_step_convention = rest.get("oa_step_convention", True)
        self.pred_action_steps_only = rest.get("pred_action_steps_only", False)
        self.progress = 0.0
        self.num_inference_steps = 1  # written by upstream's robot scripts; one call is all there is

    # ------------------------------------------------------------------ training
    def loss(self, cond: Tensor, actions: Tensor) -> Tensor:
        raise NotImplementedError("an objective defines how its generator is trained")

    def compute_loss(self, batch: dict[str, Any]) -> Tensor:
        """Scalar loss of a batch {'obs': (B, >=To, Do) or {key: (B, >=To, *shape)}, 'action': (B, T, Da)} in the units of the dataset."""
        for name in ("obs", "action"):
            if name not in batch:
                raise ValueError(f"the batch has no entry {name!r} (it has: {', '.join(map(str, batch)) or 'none'})")
        first = self.generator.start
        actions = self.normalizer["action"].normalize(batch["action"])[:, first : first + self.generator.horizon]
        if actions.shape[1:] != (self.generator.horizon, self.action_dim):
            raise ValueError(
                f"the batch has action chunks of shape {tuple(batch['action'].shape[1:])}, the policy is built for "
                f"({self.horizon}, {self.action_dim})"
            )
        # On an accelerator, a look at the values would hold up every step; the training loop reads the loss instead.
        obs = self.normalise_observation(batch["obs"], finite=batch["action"].device.type == "cpu")
        return self.loss_of(obs, actions)

    def normalise_observation(self, obs: Any, finite: bool = True) -> Tensor | dict[str, Tensor]:
        """(B, >=To, Do) or {key: (B, >=To, *shape)}, in the units of the dataset -> normalised, for `generator.encode`. Checked first."""
        obs = self.generator.check_observation(obs, finite)
        if isinstance(obs, dict):
            return {key: self.normalizer[key].normalize(value) for key, value in obs.items()}
        return self.normalizer["obs"].normalize(obs)

    def loss_of(self, obs: Tensor | dict[str, Tensor], actions: Tensor) -> Tensor:
        """The loss from normalised observations, for objectives to which the observation matters in more than one encoding."""
        return self.loss(self.generator.encode(obs), actions)

    def set_progress(self, fraction: float) -> None:
        """Told by the training loop before each step: the share of training that is done, in [0, 1]."""
        self.progress = fraction

    def metrics(self) -> dict[str, float]:
        """Numbers worth logging about the last batch; asked for by the training loop at its log interval."""
        return {}

    def set_normalizer(self, normalizer: LinearNormalizer) -> None:
        self.normalizer.load_state_dict(normalizer.state_dict())

    def get_optimizer(
        self,
        learning_rate: float,
        weight_decay: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        transformer_weight_decay: float | None = None,
        obs_encoder_weight_decay: float | None = None,
    ) -> torch.optim.Optimizer:
        """AdamW as upstream's transformer workspaces ask for it: no decay on biases, norms and embeddings of the backbone."""
        decay = next((d for d in (transformer_weight_decay, weight_decay) if d is not None), 1e-3)
        if hasattr(self.model, "get_optim_groups"):
            groups = list(self.model.get_optim_groups(weight_decay=decay))
        else:
            groups = [{"params": list(self.model.parameters()), "weight_decay": decay}]
        if self.obs_encoder is not None:
            groups.append(
                {
                    "params": list(self.obs_encoder.parameters()),
                    "weight_decay": decay if obs_encoder_weight_decay is None else obs_encoder_weight_decay,
                }
            )
        return torch.optim.AdamW(groups, lr=learning_rate, betas=tuple(betas))

    # ------------------------------------------------------------------ acting
    def sample(self, cond: Tensor, batch: int) -> Tensor:
        raise NotImplementedError("an objective defines how its generator acts")

    @torch.no_grad()
    def predict_action(self, obs_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """{'obs': (B, >=To, Do)} or {key: (B, >=To, *shape)} -> {'action': (B, Ta, Da) to execute, 'action_pred': (B, H, Da)}.

        All in the units of the dataset. Images are uint8, or floats in [0, 1].
        """
        self.generator.check_keys(obs_dict)
        cond = self.generator.encode(self.normalise_observation(obs_dict if self.obs_dim is None else obs_dict["obs"]))
        prediction = self.normalizer["action"].unnormalize(self.sample(cond, len(cond)))
        if not all_finite(prediction):
            raise ValueError(
                f"{type(self).__name__} predicted actions that are not finite from an observation that is: either that holds numbers "
                "far beyond those of the dataset, or the weights are broken and an earlier checkpoint is needed"
            )
        if self.pred_action_steps_only:
            return {"action": prediction, "action_pred": prediction}
        first = self.n_obs_steps - 1 if self.oa_step_convention else self.n_obs_steps
        return {"action": prediction[:, first : first + self.n_action_steps], "action_pred": prediction}

    def zeros(self, batch: int) -> Tensor:
        """The action (batch, H, D) that the proposal starts from."""
        return torch.zeros(batch, self.generator.horizon, self.action_dim, device=self.device, dtype=self.dtype)
