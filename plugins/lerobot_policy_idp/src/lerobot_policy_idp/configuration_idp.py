"""Settings of IDP in LeRobot: `--policy.NAME=VALUE`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lerobot.configs import FeatureType, NormalizationMode, PreTrainedConfig
from lerobot.optim import AdamWConfig, OptimizerConfig
from lerobot.optim.schedulers import DiffuserSchedulerConfig

from idp_workspace import lerobot, padding
from idp_workspace.policy.idp_options import IDPOptions
from lerobot_policy_idp.optimizer_idp import MuonConfig

OPTIMIZERS = ("muon", "adamw")


@PreTrainedConfig.register_subclass("idp")
@dataclass
class IDPConfig(PreTrainedConfig):
    """Implicit Drifting Policy: one network call per chunk of actions, trained with conditional expert geometry.

    The recipe's defaults are those of the small preset, which learns in minutes; docs/lerobot.md lists the paper's. The
    geometry compares the samples of a batch: train with batches of 64 or more.
    """

    # What goes in and out: `n_obs_steps` observations, the last of them now; a chunk of `horizon` steps from the first
    # of these observations on, of which `n_action_steps` are executed, from now on.
    n_obs_steps: int = 2
    horizon: int = 16
    n_action_steps: int = 8
    normalization_mapping: dict[str, NormalizationMode] = field(
        default_factory=lambda: {
            "VISUAL": NormalizationMode.IDENTITY,  # images are in [0, 1]; the policy maps them to [-1, 1]
            "STATE": NormalizationMode.MIN_MAX,
            "ENV": NormalizationMode.MIN_MAX,
            "ACTION": NormalizationMode.MIN_MAX,
        }
    )

    # The networks.
    backbone: str = "transformer"
    """transformer, unet or mlp."""
    n_emb: int = 256
    """Width of the backbone, and of an encoded observation; of the UNet, of its condition."""
    n_layer: int = 4
    """Layers of the transformer and the MLP."""
    n_head: int = 4
    """Heads of the transformer."""
    dropout: float = 0.0
    """In the transformer's attention and in the MLP."""
    down_dims: tuple[int, ...] = (64, 128)
    """Channels of the UNet's levels."""
    kernel_size: int = 5
    n_groups: int = 8

    # Images: one ResNet-18 per camera.
    resize_shape: tuple[int, int] | None = None
    """Height and width to which images are resized."""
    crop_shape: tuple[int, int] | None = None
    """Height and width of crops, random in training, central when the policy acts."""
    vision_width: int = 64
    """Channels of the ResNet's first stage; 64 is the usual size."""

    # The objective.
    energy_power: float = 0.25
    """Exponent of the potential; 1 is the paper's."""
    lambda_prox: float | None = 1.0
    """Weight of the probe; null is the paper's (t*/(1-t*))^2 = 81."""
    probe_fraction: float = 0.25
    """Share of the batch with a probe; 1 is the paper's."""
    t_star: float = 0.9
    """Time of the probe."""
    geometry: bool = True
    """False sets m = 0: regression with a probe."""
    nfe: int = 1
    """Network calls per chunk: 1, or 2 to refine the proposal with the probe."""
    switches: dict[str, Any] = field(default_factory=dict)
    """Other options of IDP by name, such as {"tau": 0.5}."""

    # Training presets.
    optimizer_type: str = "muon"
    """muon or adamw."""
    optimizer_lr: float = 1e-3
    """Of AdamW; with muon, of the parameters that it leaves to AdamW."""
    optimizer_muon_lr: float = 0.02
    optimizer_betas: tuple[float, float] = (0.9, 0.999)
    optimizer_eps: float = 1e-8
    optimizer_weight_decay: float = 1e-5
    optimizer_grad_clip_norm: float = 10.0
    scheduler_name: str = "cosine"
    scheduler_warmup_steps: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, known in (
            ("backbone", self.backbone, lerobot.BACKBONES),
            ("optimizer_type", self.optimizer_type, OPTIMIZERS),
        ):
            if value not in known:
                raise ValueError(f"policy.{name}={value!r} is not one of {', '.join(known)}")
        for name in ("n_obs_steps", "horizon", "n_action_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"policy.{name}={getattr(self, name)} must be at least 1")
        if self.n_action_steps > self.chunk_size:
            raise ValueError(
                f"policy.n_action_steps={self.n_action_steps} is more than the {self.chunk_size} steps that a chunk "
                f"has from now on (horizon {self.horizon} - n_obs_steps {self.n_obs_steps} + 1)"
            )
        if self.backbone == "unet" and self.horizon % 2 ** (len(self.down_dims) - 1):
            raise ValueError(
                f"policy.horizon={self.horizon} must be divisible by {2 ** (len(self.down_dims) - 1)} for a unet of "
                f"{len(self.down_dims)} levels"
            )
        self.check_options()

    def check_options(self) -> None:
        """Raise ValueError for options that are unknown, or that need what LeRobot does not tell a policy."""
        if taken := [name for name in self.switches if name in lerobot.OPTIONS]:
            raise ValueError(f"policy.switches: {taken[0]} is a setting of its own, policy.{taken[0]}")
        try:
            options = IDPOptions(**{name: getattr(self, name) for name in lerobot.OPTIONS}, **self.switches)
        except TypeError as error:
            raise ValueError(f"policy.switches has an option that IDP does not have: {error}") from error
        padding.check_switches(options)
        if options.bank_size or not options.proposal.is_paper:
            raise ValueError("policy.switches: bank_size and proposal do not know padded steps")
        if options.lambda_schedule != "constant":
            raise ValueError("policy.switches: LeRobot does not tell a policy how far the training is; no ramp")
        if options.reference == "dataset":
            raise ValueError("policy.switches: reference=dataset needs normalised statistics; use ema or batch")

    @property
    def chunk_size(self) -> int:
        """Steps of a chunk from now on."""
        return self.horizon - self.n_obs_steps + 1

    @property
    def settings(self) -> dict[str, Any]:
        """These settings as in config.json."""
        described = {
            name: {key: {"type": x.type.value, "shape": list(x.shape)} for key, x in (features or {}).items()}
            for name, features in (
                ("input_features", self.input_features),
                ("output_features", self.output_features),
            )
        }
        return vars(self) | described

    def validate_features(self) -> None:
        """Raise ValueError unless there is an action, a state, and images that fit."""
        if self.action_feature is None or len(self.action_feature.shape) != 1:
            raise ValueError(f"IDP needs one action, a vector called {lerobot.ACTION!r}; got {self.output_features}")
        features = self.input_features or {}
        vectors = [key for key, x in features.items() if x.type in (FeatureType.STATE, FeatureType.ENV)]
        if not vectors:
            raise ValueError(
                f"IDP needs a state, such as {lerobot.STATE!r}, among the inputs; got {', '.join(features) or 'none'}"
            )
        for key in vectors:
            if len(features[key].shape) != 1:
                raise ValueError(f"{key} must be a vector, got the shape {tuple(features[key].shape)}")
        mapping = {str(getattr(k, "value", k)): v for k, v in self.normalization_mapping.items()}
        if self.image_features and mapping.get("VISUAL", NormalizationMode.IDENTITY) is not NormalizationMode.IDENTITY:
            raise ValueError("policy.normalization_mapping: IDP maps images itself, VISUAL must be IDENTITY")
        for key, image in self.image_features.items():
            size = tuple(self.resize_shape or image.shape[1:])
            if self.crop_shape and any(crop > side for crop, side in zip(self.crop_shape, size, strict=True)):
                raise ValueError(f"policy.crop_shape={tuple(self.crop_shape)} does not fit {key} of size {size}")

    @property
    def observation_delta_indices(self) -> list[int]:
        return list(range(1 - self.n_obs_steps, 1))

    @property
    def action_delta_indices(self) -> list[int]:
        return list(range(1 - self.n_obs_steps, 1 - self.n_obs_steps + self.horizon))

    @property
    def reward_delta_indices(self) -> None:
        return None

    def get_optimizer_preset(self) -> OptimizerConfig:
        shared: dict[str, Any] = {
            "lr": self.optimizer_lr,
            "betas": tuple(self.optimizer_betas),
            "eps": self.optimizer_eps,
            "weight_decay": self.optimizer_weight_decay,
            "grad_clip_norm": self.optimizer_grad_clip_norm,
        }
        if self.optimizer_type == "adamw":
            return AdamWConfig(**shared)
        return MuonConfig(**shared, muon_lr=self.optimizer_muon_lr)

    def get_scheduler_preset(self) -> DiffuserSchedulerConfig:
        return DiffuserSchedulerConfig(name=self.scheduler_name, num_warmup_steps=self.scheduler_warmup_steps)
