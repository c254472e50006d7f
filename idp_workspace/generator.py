"""The generator f(o, a, t) or f(o, a, s, t): an observation and a (noisy) action become an action, over any backbone and encoder.

Objectives train and sample a generator and know nothing of what is inside; `build_generator` is the only place that knows the
argument families of upstream's policy constructors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from diffusion_policy.model.diffusion.conditional_unet1d import ConditionalUnet1D
from idp_workspace.options import check_choices, unknown_argument

log = logging.getLogger(__name__)

#: Ways to hand the observation to the backbone, by the name of upstream's flag: (keyword of its forward).
CONDITIONING = {"obs_as_cond": "cond", "obs_as_global_cond": "global_cond", "obs_as_local_cond": "local_cond"}

#: Arguments of upstream's policies that configure a denoising sampler, which these objectives do not have.
WITHOUT_MEANING = ("noise_scheduler", "num_inference_steps")

#: Arguments of upstream's image policies for what they make themselves: a UNet (with its defaults), a transformer, robomimic's encoder.
UNET = {
    "diffusion_step_embed_dim": 256,
    "down_dims": (256, 512, 1024),
    "kernel_size": 5,
    "n_groups": 8,
    "cond_predict_scale": True,
}
TRANSFORMER = (
    "n_layer",
    "n_cond_layers",
    "n_head",
    "n_emb",
    "p_drop_emb",
    "p_drop_attn",
    "causal_attn",
    "time_as_cond",
)
ENCODER = ("crop_shape", "obs_encoder_group_norm", "eval_fixed_crop", "obs_encoder_width")
PARTS = {
    **dict.fromkeys(UNET, "UNet"),
    **dict.fromkeys(TRANSFORMER, "transformer"),
    **dict.fromkeys(ENCODER, "encoder"),
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """What an observation holds under one key at each step: numbers of this shape, points (P, C), or an image (C, H, W)."""

    shape: tuple[int, ...]
    rgb: bool = False


def read_shape_meta(shape_meta: Mapping) -> tuple[dict[str, Entry], int]:
    """Entries of the observation and width of the action, from {'obs': {key: {shape, type: rgb | low_dim | point_cloud}}, 'action': {shape}}."""
    entries = {}
    for key, entry in shape_meta["obs"].items():
        kind = entry.get("type", "low_dim")
        check_choices(
            {f"shape_meta.obs.{key}.type": kind}, {f"shape_meta.obs.{key}.type": ("rgb", "low_dim", "point_cloud")}
        )
        entries[key] = Entry(tuple(entry["shape"]), kind == "rgb")
    shape = tuple(shape_meta["action"]["shape"])
    if len(shape) != 1 or not entries:
        raise ValueError(
            f"shape_meta needs at least one observation and an action of one dimension, it has {len(entries)} and {shape}"
        )
    return entries, shape[0]


@dataclasses.dataclass
class Generator:
    """Binds a backbone and an optional observation encoder. Owns no parameters: the policy registers `model` and `obs_encoder`.

    The observation is one tensor of width `obs_dim`, or, when that is None, a dictionary; `entries` describes either by key.
    horizon is the number of steps the backbone generates; `start` is where, in a window of the dataset, they begin.
    """

    model: nn.Module
    obs_encoder: nn.Module | None
    conditioning: str
    horizon: int
    window: int
    start: int
    obs_dim: int | None
    entries: dict[str, Entry]
    action_dim: int
    n_obs_steps: int
    per_frame: bool = (
        False  # the encoder takes one frame (N, ...) at a time, as upstream's do, not all steps (B, To, ...)
    )

    def encode(self, obs: Tensor | dict[str, Tensor]) -> Tensor:
        """Condition from normalised observations (B, >=To, Do), or {key: (B, >=To, *shape)}.

        (B, To, E) with an encoder, the observations (B, To, Do) without one; for local conditioning (B, H, Do), zero after To.
        """
        if self.obs_dim is None:
            obs = {key: obs[key][:, : self.n_obs_steps] for key in self.entries}
            if not self.per_frame:
                return self.obs_encoder(obs)
            features = self.obs_encoder({key: value.flatten(0, 1) for key, value in obs.items()})
            return features.unflatten(0, (-1, self.n_obs_steps))
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

    def check_observation(self, obs: Any, finite: bool = True) -> Tensor | dict[str, Tensor]:
        """The observation in the units of the dataset, ready to be normalised; ValueError names the key, what was expected and what came.

        obs: a tensor (B, >=To, Do), returned as it is, or {key: (B, >=To, *shape)}, of which the first To steps of the keys in shape_meta
        are returned, images of bytes as floats in [0, 1]. That float images lie in [0, 1] is not checked. finite: also look for NaN and
        infinity in the first To steps, which waits for the device.
        """
        if self.obs_dim is not None:
            self._check_entry("obs", self.entries["obs"], obs, finite)
            return obs
        self.check_keys(obs)
        for key, entry in self.entries.items():
            self._check_entry(key, entry, obs[key], finite)
        sizes = {key: len(obs[key]) for key in self.entries}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"the entries of an observation must have one batch size, got {sizes}")
        seen = {key: obs[key][:, : self.n_obs_steps] for key in self.entries}
        return {
            key: value.float().div_(255) if self.entries[key].rgb and value.dtype == torch.uint8 else value
            for key, value in seen.items()
        }

    def check_keys(self, obs: Any) -> None:
        """Raise ValueError unless obs is a dictionary with every entry of the observation."""
        if not isinstance(obs, Mapping):
            raise ValueError(
                f"the observation must be a dictionary with the entries {', '.join(self.entries)}, got {type(obs).__name__}"
            )
        for key in self.entries:
            if key not in obs:
                raise ValueError(f"the observation has no entry {key!r} (it has: {', '.join(map(str, obs)) or 'none'})")

    def _check_entry(self, key: str, entry: Entry, value: Any, finite: bool) -> None:
        def expected() -> str:
            size = f"{entry.shape[0]} numbers" if len(entry.shape) == 1 else ", ".join(map(str, entry.shape))
            return f"(batch, at least {self.n_obs_steps} steps, {size})"

        if not isinstance(value, Tensor):
            raise ValueError(f"{key} must be a tensor {expected()}, got {type(value).__name__}")
        if value.layout is not torch.strided or value.device.type == "meta":
            raise ValueError(
                f"{key} must be a dense tensor with values {expected()}, got one in {value.layout} on {value.device}"
            )
        shape = value.shape
        if len(shape) != 2 + len(entry.shape) or shape[1] < self.n_obs_steps or shape[2:] != entry.shape:
            raise ValueError(f"{key} must have shape {expected()}, got {tuple(shape)}")
        if shape[0] == 0:
            raise ValueError(f"{key} must hold at least one sample {expected()}, got an empty batch {tuple(shape)}")
        if not value.is_floating_point():
            if value.dtype == torch.bool or value.is_complex() or (entry.rgb and value.dtype != torch.uint8):
                kinds = "uint8 (0 to 255) or floats (0 to 1)" if entry.rgb else "real numbers"
                raise ValueError(f"{key} must be {kinds}, got {value.dtype}")
        elif finite:
            seen = value if shape[1] == self.n_obs_steps else value[:, : self.n_obs_steps]
            if not all_finite(seen):
                raise ValueError(
                    f"{key} must be finite, got {int((~seen.isfinite()).sum())} NaN or infinite of {seen.numel()} numbers "
                    f"in the first {self.n_obs_steps} steps"
                )

    def check_sizes(self) -> None:
        """Run the network once on zeros, so that sizes that do not fit are found before anything is trained or written."""
        obs = zeros(self.entries, (1, self.n_obs_steps), self.model, self.obs_encoder)
        observation = obs if self.obs_dim is None else obs["obs"]
        action = obs[next(iter(obs))].new_zeros(1, self.horizon, self.action_dim)
        try:
            with evaluating(self.model, self.obs_encoder):
                out = self(self.encode(observation), action, 0.0)
        except (RuntimeError, AssertionError, ValueError) as error:
            raise ValueError(
                f"the network does not fit the policy's sizes (horizon {self.horizon}, obs_dim {self.obs_dim}, n_obs_steps "
                f"{self.n_obs_steps}, action_dim {self.action_dim}, {self.conditioning}): {error}"
            ) from error
        if out.shape != action.shape:
            raise ValueError(
                f"the network returns {tuple(out.shape)} for an action chunk of shape {tuple(action.shape)}"
            )


def all_finite(x: Tensor) -> bool:
    # A sum is finite only if all its terms are; the exact look is for sums that overflow.
    return math.isfinite(x.sum()) or bool(x.isfinite().all())


def zeros(entries: Mapping[str, Entry], lead: tuple[int, ...], *modules: nn.Module | None) -> dict[str, Tensor]:
    """An observation {key: (*lead, *shape)} of zeros where the parameters of the modules are."""
    parameter = next(
        (p for module in modules if module is not None for p in module.parameters() if p.numel()), torch.zeros(1)
    )
    return {key: parameter.new_zeros(*lead, *entry.shape) for key, entry in entries.items()}


@contextlib.contextmanager
def evaluating(*modules: nn.Module | None) -> Iterator[None]:
    """Inside, the modules are in evaluation mode, nothing is recorded for gradients, and random numbers that are drawn do not count."""
    modes = [(part, part.training) for module in modules if module is not None for part in module.modules()]
    try:
        for part, _ in modes:
            part.training = False
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        for part, mode in modes:
            part.training = mode


def probe_encoder(encoder: nn.Module, entries: Mapping[str, Entry], n_obs_steps: int) -> tuple[bool, int]:
    """Whether an encoder of dictionaries takes single frames, and the width E of its features, found out by giving it zeros.

    Ours turn {key: (B, To, *shape)} into (B, To, E), upstream's {key: (B * To, *shape)} into (B * To, E).
    """
    problems = []
    for lead in ((1, n_obs_steps), (n_obs_steps,)):
        try:
            with evaluating(encoder):
                shape = tuple(encoder(zeros(entries, lead, encoder)).shape)
        except Exception as error:
            problems.append(f"given (*{lead}, *shape) it fails: {error}")
            continue
        if shape[:-1] == lead:
            return len(lead) == 1, shape[-1]
        problems.append(f"given (*{lead}, *shape) it returns {shape}")
    raise ValueError(
        f"obs_encoder must turn {', '.join(entries)} of shape (batch, {n_obs_steps}, *shape) into (batch, {n_obs_steps}, width), "
        f"or (batch, *shape) into (batch, width); {'; '.join(problems)}"
    )


def hybrid_networks(transformer: bool, **arguments: Any) -> tuple[nn.Module, nn.Module]:
    """Backbone and encoder of upstream's hybrid policies, which have no other way to come by them: one is made and taken apart."""
    # Imported here: in upstream's own tree they bring all of robomimic along.
    if transformer:
        from diffusion_policy.policy.diffusion_transformer_hybrid_image_policy import (
            DiffusionTransformerHybridImagePolicy as Hybrid,
        )
    else:
        from diffusion_policy.policy.diffusion_unet_hybrid_image_policy import DiffusionUnetHybridImagePolicy as Hybrid
    policy = Hybrid(noise_scheduler=None, num_inference_steps=1, **arguments)
    return policy.model, policy.obs_encoder


def build_generator(
    owner: str,
    *,
    model: nn.Module | None = None,
    obs_encoder: nn.Module | None = None,
    shape_meta: Mapping | None = None,
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
    """A generator from the arguments of upstream's low-dimensional policies, plus `obs_encoder`, or of its three image policies.

    With `shape_meta` the observation is a dictionary, and what is not given is made as upstream makes it: without a `model`, a
    ConditionalUnet1D from the arguments UNET; without an `obs_encoder` as well, robomimic's from the arguments ENCODER, and a
    TransformerForDiffusion in place of the UNet if any of the arguments TRANSFORMER, or `obs_as_cond`, is there. The condition is
    tokens for that transformer and global otherwise, unless another is asked for.
    Arguments that configure a denoising sampler are accepted, so that a config can be reused, and said once in the log.
    `oa_step_convention: false` starts the executed actions one step later, as upstream's UNet policy does.
    """
    flags = {
        "obs_as_cond": obs_as_cond,
        "obs_as_global_cond": obs_as_global_cond,
        "obs_as_local_cond": obs_as_local_cond,
    }
    sizes: dict[str, Any] = {"horizon": horizon, "n_obs_steps": n_obs_steps, "n_action_steps": n_action_steps}
    builds = shape_meta is not None and model is None
    hybrid = builds and obs_encoder is None
    transformer = hybrid and (bool(obs_as_cond) or any(name in rest for name in TRANSFORMER))
    if shape_meta is not None:
        entries, width = read_shape_meta(shape_meta)
        if obs_dim is not None or action_dim not in (None, width):
            raise ValueError(
                f"shape_meta describes the observation and an action of {width} numbers, but obs_dim={obs_dim} and "
                f"action_dim={action_dim} are given: leave both away"
            )
        action_dim = width
        if not hybrid:
            sizes["obs_encoder"] = obs_encoder
        if all(value is None for value in flags.values()):
            flags["obs_as_cond" if transformer else "obs_as_global_cond"] = True
    else:
        entries = {"obs": Entry((obs_dim,))}
        sizes |= {"model": model, "obs_dim": obs_dim, "action_dim": action_dim}
    makes = (*(TRANSFORMER if transformer else UNET), *(ENCODER if hybrid else ())) if builds else ()
    made = {name: rest.pop(name) for name in makes if name in rest}
    known = {
        *sizes,
        *flags,
        *WITHOUT_MEANING,
        *known_options,
        *PARTS,
        "model",
        "obs_dim",
        "action_dim",
        "shape_meta",
        "obs_encoder",
        "pred_action_steps_only",
        "oa_step_convention",
    }
    for name in rest:
        if name in PARTS:
            raise TypeError(
                f"{owner} uses {name} only to make a network from shape_meta, upstream's {PARTS[name]}; here that is given or "
                "another is made"
            )
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
        raise ValueError(
            f"actions {start}..{start + n_action_steps - 1} are executed but the horizon is {horizon}: "
            f"lower n_action_steps or raise horizon"
        )
    per_frame = hybrid
    if hybrid:
        if transformer:
            made["pred_action_steps_only"] = pred_action_steps_only
        model, obs_encoder = hybrid_networks(
            transformer,
            shape_meta=shape_meta,
            horizon=horizon,
            n_action_steps=n_action_steps,
            n_obs_steps=n_obs_steps,
            **made,
        )
    elif shape_meta is not None:
        per_frame, features = probe_encoder(obs_encoder, entries, n_obs_steps)
        if builds:
            model = ConditionalUnet1D(input_dim=action_dim, global_cond_dim=features * n_obs_steps, **{**UNET, **made})
    generator = Generator(
        model=model,
        obs_encoder=obs_encoder,
        conditioning=chosen[0],
        horizon=n_action_steps if pred_action_steps_only else horizon,
        window=horizon,
        start=start if pred_action_steps_only else 0,
        obs_dim=obs_dim,
        entries=entries,
        action_dim=action_dim,
        n_obs_steps=n_obs_steps,
        per_frame=per_frame,
    )
    generator.check_sizes()
    return generator
