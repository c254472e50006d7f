"""Implicit Drifting Policy as a policy of LeRobot: its batches, queues and checkpoints around `idp_workspace`'s policy.

Networks, geometry and loss are `idp_workspace.policy.IDPPolicy`, as `self.idp`. LeRobot's processors normalise, so its
own normaliser stays empty.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import ACTION
from omegaconf import OmegaConf
from safetensors import safe_open
from torch import Tensor

from diffusion_policy.model.common.muon import Muon
from diffusion_policy.policy.represented import build_policy
from idp_workspace import lerobot
from lerobot_policy_idp.configuration_idp import IDPConfig

PADDED = f"{ACTION}_is_pad"


class IDPPolicy(PreTrainedPolicy):
    """One network call turns the last observations into a chunk of actions."""

    config_class = IDPConfig
    name = "idp"

    def __init__(self, config: IDPConfig, dataset_meta: Any = None, **_: Any) -> None:
        super().__init__(config)
        config.validate_features()
        check_episodes(config, dataset_meta)
        self.config = config
        settings = config.settings
        self.entries = lerobot.names(settings)
        self.cameras = lerobot.cameras(settings)
        self.vectors = [key for key in self.entries if key not in self.cameras]
        self.idp = build_policy(OmegaConf.create({"policy": lerobot.policy_section(settings)}))
        self.reset()

    # ------------------------------------------------------------------ training
    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a normalised batch, and numbers to log. Steps beyond an episode's end do not count."""
        actions, shape = batch[ACTION], (self.config.horizon, self.idp.action_dim)
        if tuple(actions.shape[1:]) != shape:
            raise ValueError(f"the policy is built for chunks of shape {shape}, got actions {tuple(actions.shape)}")
        recorded = ~batch[PADDED] if PADDED in batch else None
        loss = self.idp.loss(self.idp.generator.encode(self.observation(batch)), actions, recorded)
        return loss, {name.replace("/", "_"): value for name, value in self.idp.metrics().items()}

    def get_optim_params(self) -> Any:
        """Return the parameters; with optimizer_type=muon, in groups by their role."""
        return Muon.parameter_groups(self.idp) if self.config.optimizer_type == "muon" else self.parameters()

    # ------------------------------------------------------------------ acting
    def reset(self) -> None:
        """Forget the observations and actions of an episode."""
        self._queues: dict[str, deque[Tensor]] = {key: deque(maxlen=self.config.n_obs_steps) for key in self.entries}
        self._queues[ACTION] = deque(maxlen=self.config.n_action_steps)

    @torch.no_grad()
    def select_action(self, batch: dict[str, Tensor], noise: Tensor | None = None, **_: Any) -> Tensor:
        """Return the next action (B, A). Call it at every control step: it keeps the observations of the last steps."""
        for key in self.entries:
            queue = self._queues[key]
            queue.extend([batch[key]] * (1 if queue else self.config.n_obs_steps))  # the first counts as all of them
        if not self._queues[ACTION]:
            history = {key: torch.stack(list(self._queues[key]), dim=1) for key in self.entries}
            chunk = self.predict_action_chunk(history)
            self._queues[ACTION].extend(chunk[:, : self.config.n_action_steps].unbind(dim=1))
        return self._queues[ACTION].popleft()

    @torch.no_grad()
    def predict_action_chunk(
        self,
        batch: dict[str, Tensor],
        noise: Tensor | None = None,
        inference_delay: int | None = None,
        prev_chunk_left_over: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the normalised actions (B, T, A) from now on, T = horizon - n_obs_steps + 1.

        An observation without a dimension of time counts for all of the last `n_obs_steps` steps.

        Args:
            batch: {feature: (B, n_obs_steps, ...)}, or (B, ...) of the current step.
            noise: ignored; a proposal starts from zero.
            inference_delay: how many steps of the previous chunk are executed before this one is there.
            prev_chunk_left_over: what is left of the previous chunk (T', A) or (B, T', A): see `continued`.
        """
        obs = self.observation(batch)
        size = len(batch[self.vectors[0]])
        chunk = self.idp.sample(self.idp.generator.encode(obs), size)[:, self.config.n_obs_steps - 1 :]
        return chunk if prev_chunk_left_over is None else continued(chunk, prev_chunk_left_over, inference_delay or 0)

    def supports_rtc(self) -> bool:
        """Whether `predict_action_chunk` takes what is left of the previous chunk."""
        return True

    # ------------------------------------------------------------------ observations
    def observation(self, batch: dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """Return a normalised observation as the generator takes it."""
        steps = {key: self.steps(key, batch) for key in self.entries}
        if not self.cameras:
            return torch.cat([steps[key] for key in self.vectors], dim=-1)
        images = {self.entries[key]: 2 * as_float(steps[key]) - 1 for key in self.cameras}
        return {self.entries[key]: steps[key] for key in self.vectors} | images

    def steps(self, key: str, batch: dict[str, Tensor]) -> Tensor:
        """Return a feature as (B, n_obs_steps, ...)."""
        if key not in batch:
            raise ValueError(f"the batch has no {key} (it has: {', '.join(map(str, batch))})")
        value, shape = batch[key], tuple(self.config.input_features[key].shape)
        if value.ndim == len(shape) + 1:
            value = value.unsqueeze(1).expand(-1, self.config.n_obs_steps, *value.shape[1:])
        if tuple(value.shape[1:]) != (self.config.n_obs_steps, *shape):
            raise ValueError(
                f"{key} must have shape (batch, {self.config.n_obs_steps}, {', '.join(map(str, shape))}), "
                f"got {tuple(value.shape)}"
            )
        return value

    # ------------------------------------------------------------------ checkpoints
    @classmethod
    def _load_as_safetensor(cls, model: Any, model_file: str, map_location: str, strict: bool) -> Any:
        check_weights(model, model_file)
        return super()._load_as_safetensor(model, model_file, map_location, strict)


def as_float(image: Tensor) -> Tensor:
    """Return an image in [0, 1]."""
    return image.float() / 255 if image.dtype == torch.uint8 else image


def continued(chunk: Tensor, before: Tensor, delay: int) -> Tensor:
    """Return a chunk that starts with what is left of the previous one, and passes over to its own actions.

    The robot executes `delay` more actions of the previous chunk before it has this one, so these are fixed; over the
    rest of what is left the weight of the previous chunk falls linearly to zero. Flow policies are steered towards
    these actions while they denoise; one network call has no such steps, so the actions themselves are mixed.
    """
    before = before.to(chunk) if before.ndim == 3 else before.to(chunk).unsqueeze(0)
    before = before[:, : chunk.shape[1]]
    rows = before.abs().sum(dim=(0, 2)).nonzero()  # LeRobot fills a short rest with zeros
    left = int(rows[-1]) + 1 if len(rows) else 0
    delay = min(delay, left)
    weight = torch.ones(left, device=chunk.device, dtype=chunk.dtype)
    weight[delay:] = torch.linspace(1, 0, left - delay + 2, device=chunk.device, dtype=chunk.dtype)[1:-1]
    start = torch.lerp(chunk[:, :left], before[:, :left].expand(len(chunk), -1, -1), weight[:, None])
    return torch.cat([start, chunk[:, left:]], dim=1)


def check_episodes(config: IDPConfig, dataset_meta: Any) -> None:
    """Raise ValueError if no episode of the dataset is as long as a chunk."""
    episodes = getattr(dataset_meta, "episodes", None)
    if episodes is None:
        return
    longest = max(int(length) for length in episodes["length"])
    if longest < config.chunk_size:
        raise ValueError(
            f"policy.horizon={config.horizon} is too long for this dataset: a chunk has {config.chunk_size} steps from "
            f"now on, the longest episode {longest}; lower policy.horizon"
        )


def check_weights(model: torch.nn.Module, file: str | Path) -> None:
    """Raise ValueError if the sizes of weights in a file are others than the model's."""
    with safe_open(file, framework="pt") as weights:
        sizes = {key: tuple(weights.get_slice(key).get_shape()) for key in weights.keys()}
    own = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    if missing := own.keys() ^ sizes.keys():
        raise ValueError(f"{file} does not fit the policy's settings: {min(missing)} is only in one of them")
    for key, shape in own.items():
        if sizes[key] != shape:
            raise ValueError(
                f"{file} does not fit the policy's settings: {key} has shape {sizes[key]}, the settings give {shape}. "
                "Has the dataset another state, action or camera than the one of this checkpoint?"
            )
