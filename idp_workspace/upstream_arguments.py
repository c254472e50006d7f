"""The adapter from upstream's constructor arguments to a generator.

Upstream has five policy constructors, for vectors and for images. Every policy of this package accepts the arguments of
all five, so that a config needs only another `policy._target_`. No other file knows these argument families.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from diffusion_policy.model.diffusion.conditional_unet1d import ConditionalUnet1D
from idp_workspace.generator import CONDITIONING, Generator
from idp_workspace.observation import Entry, read_shape_meta
from idp_workspace.options import unknown_argument

log = logging.getLogger(__name__)


class UpstreamArguments(TypedDict, total=False):
    """Arguments of upstream's policies, and `obs_encoder` for vectors too."""

    horizon: int
    n_obs_steps: int
    n_action_steps: int
    obs_dim: int | None
    action_dim: int | None
    shape_meta: Mapping[str, Any] | None
    """Describes an observation of images and vectors by key, and the action, instead of obs_dim and action_dim."""
    model: nn.Module | None
    obs_encoder: nn.Module | None
    obs_as_cond: bool | None
    obs_as_global_cond: bool | None
    obs_as_local_cond: bool | None
    pred_action_steps_only: bool
    oa_step_convention: bool
    """False starts the executed actions one step later, as upstream's UNet policy does."""
    noise_scheduler: Any
    num_inference_steps: int | None
    # What upstream's image policies build themselves: a UNet,
    diffusion_step_embed_dim: int
    down_dims: Iterable[int]
    kernel_size: int
    n_groups: int
    cond_predict_scale: bool
    # a transformer,
    n_layer: int
    n_cond_layers: int
    n_head: int
    n_emb: int
    p_drop_emb: float
    p_drop_attn: float
    causal_attn: bool
    time_as_cond: bool
    # and robomimic's image encoder.
    crop_shape: Iterable[int]
    obs_encoder_group_norm: bool
    eval_fixed_crop: bool
    obs_encoder_width: int


#: They configure a denoising sampler: accepted, so that a config can be reused, and ignored.
SAMPLER = ("noise_scheduler", "num_inference_steps")

#: Defaults of the UNet that upstream's image policies build.
UNET = {
    "diffusion_step_embed_dim": 256,
    "down_dims": (256, 512, 1024),
    "kernel_size": 5,
    "n_groups": 8,
    "cond_predict_scale": True,
}
TRANSFORMER = (
    "n_layer", "n_cond_layers", "n_head", "n_emb", "p_drop_emb", "p_drop_attn", "causal_attn", "time_as_cond",
)  # fmt: skip
ENCODER = ("crop_shape", "obs_encoder_group_norm", "eval_fixed_crop", "obs_encoder_width")
PARTS = {
    **dict.fromkeys(UNET, "UNet"),
    **dict.fromkeys(TRANSFORMER, "transformer"),
    **dict.fromkeys(ENCODER, "encoder"),
}


def build_generator(owner: str, known_options: Iterable[str] = (), **arguments: Unpack[UpstreamArguments]) -> Generator:
    """Build a generator from upstream's arguments. Errors name the argument; `owner` is the policy in messages.

    With `shape_meta` the observation is a dictionary, and missing networks are built as upstream builds them: without a
    `model`, a ConditionalUnet1D; without an `obs_encoder` as well, robomimic's encoder, and a TransformerForDiffusion
    instead of the UNet if obs_as_cond or one of its arguments is given.
    """
    given: dict[str, Any] = dict(arguments)
    builds_model = given.get("shape_meta") is not None and given.get("model") is None
    hybrid = builds_model and given.get("obs_encoder") is None
    transformer = hybrid and (bool(given.get("obs_as_cond")) or any(name in given for name in TRANSFORMER))
    used = (*(TRANSFORMER if transformer else UNET), *(ENCODER if hybrid else ())) if builds_model else ()
    check_names(owner, given, used, known_options)
    entries, obs_dim, action_dim = read_sizes(owner, given, needs_encoder=not hybrid)
    if in_paints(given):
        log.info(
            "%s does not in-paint: its UNet is built again with the observation as a condition (obs_as_global_cond)",
            owner,
        )
        given["model"], given["obs_as_global_cond"] = conditioned_unet(**given), True
    conditioning = read_conditioning(owner, given, default="obs_as_cond" if transformer else "obs_as_global_cond")
    horizon, n_obs_steps, n_action_steps = given["horizon"], given["n_obs_steps"], given["n_action_steps"]
    start = n_obs_steps - 1 if given.get("oa_step_convention", True) else n_obs_steps
    if start + n_action_steps > horizon:
        raise ValueError(
            f"actions {start}..{start + n_action_steps - 1} are executed but the horizon is {horizon}: "
            "lower n_action_steps or raise horizon"
        )
    executed_only = bool(given.get("pred_action_steps_only", False))

    model: Any = given.get("model")
    obs_encoder: Any = given.get("obs_encoder")
    per_frame = hybrid
    parts = {name: given[name] for name in used if name in given}
    if hybrid:
        if transformer:
            parts["pred_action_steps_only"] = executed_only
        sizes = {name: given[name] for name in ("shape_meta", "horizon", "n_action_steps", "n_obs_steps")}
        model, obs_encoder = hybrid_networks(transformer, **sizes, **parts)
    elif obs_dim is None:
        per_frame, features = probe_encoder(obs_encoder, entries, n_obs_steps)
        if builds_model:
            model = ConditionalUnet1D(input_dim=action_dim, global_cond_dim=features * n_obs_steps, **{**UNET, **parts})
    generator = Generator(
        model=model,
        obs_encoder=obs_encoder,
        conditioning=conditioning,
        horizon=n_action_steps if executed_only else horizon,
        window=horizon,
        start=start if executed_only else 0,
        obs_dim=obs_dim,
        entries=entries,
        action_dim=action_dim,
        n_obs_steps=n_obs_steps,
        per_frame=per_frame,
    )
    check_fit(generator)
    return generator


# ------------------------------------------------------------------ reading the arguments
def check_names(owner: str, given: dict[str, Any], used: Iterable[str], known_options: Iterable[str]) -> None:
    """Raise TypeError for unknown arguments; log those of a sampler, which are ignored."""
    for name in given:
        if name in PARTS and name not in used:
            raise TypeError(
                f"{owner} uses {name} only to build upstream's {PARTS[name]} from shape_meta; "
                "this network is given, or another one is built"
            )
        if name not in UpstreamArguments.__annotations__:
            raise unknown_argument(name, {*UpstreamArguments.__annotations__, *known_options}, owner)
    ignored = [name for name in SAMPLER if given.get(name) is not None]
    if ignored:
        log.info("%s does not denoise: %s ignored", owner, ", ".join(ignored))


def read_sizes(owner: str, given: dict[str, Any], needs_encoder: bool) -> tuple[dict[str, Entry], int | None, int]:
    """Return the entries of the observation, its size if it is a vector, and the size of the action."""
    required = ["horizon", "n_obs_steps", "n_action_steps"]
    obs_dim, action_dim = given.get("obs_dim"), given.get("action_dim")
    if given.get("shape_meta") is not None:
        entries, width = read_shape_meta(given["shape_meta"])
        if obs_dim is not None or action_dim not in (None, width):
            raise ValueError(
                f"shape_meta describes the observation and an action of size {width}, but obs_dim={obs_dim} and "
                f"action_dim={action_dim} are given too: remove both"
            )
        action_dim = width
        required += ["obs_encoder"] if needs_encoder else []
    else:
        entries = {"obs": Entry((obs_dim,))}  # type: ignore[arg-type]
        required += ["model", "obs_dim", "action_dim"]
    missing = [name for name in required if given.get(name) is None]
    if missing:
        raise TypeError(f"{owner} needs the arguments {', '.join(missing)}")
    return entries, obs_dim, action_dim  # type: ignore[return-value]


def read_conditioning(owner: str, given: dict[str, Any], default: str) -> str:
    """Return the one flag in CONDITIONING that is set; `default` if shape_meta is given and no flag is."""
    flags = {name: given.get(name) for name in CONDITIONING}
    if given.get("shape_meta") is not None and all(value is None for value in flags.values()):
        return default
    chosen = [name for name, value in flags.items() if value]
    if len(chosen) != 1:
        raise ValueError(
            f"{owner} needs the observation as a condition: set exactly one of {', '.join(flags)} "
            f"(set: {', '.join(chosen) or 'none'}); a one-step generator cannot in-paint the observation"
        )
    return chosen[0]


# ------------------------------------------------------------------ networks
def in_paints(given: dict[str, Any]) -> bool:
    """Return whether a config in-paints the observation: no condition, and a UNet of actions and observations."""
    model = given.get("model")
    if not isinstance(model, ConditionalUnet1D) or given.get("obs_dim") is None:
        return False
    if any(given.get(name) for name in CONDITIONING):
        return False
    channels: Any = model.final_conv[-1]
    return channels.out_channels == given["action_dim"] + given["obs_dim"]


def conditioned_unet(model: Any, obs_dim: int, action_dim: int, n_obs_steps: int, **_: Any) -> ConditionalUnet1D:
    """Return a UNet of actions with the sizes of `model`, conditioned on the observation."""
    block = model.down_modules[0][0]
    convolution, norm = block.blocks[0].block[:2]
    return ConditionalUnet1D(
        input_dim=action_dim,
        global_cond_dim=obs_dim * n_obs_steps,
        diffusion_step_embed_dim=model.diffusion_step_encoder[1].in_features,
        down_dims=[level[0].blocks[0].block[0].out_channels for level in model.down_modules],
        kernel_size=convolution.kernel_size[0],
        n_groups=norm.num_groups,
        cond_predict_scale=block.cond_predict_scale,
    )


def hybrid_networks(transformer: bool, **arguments: Any) -> tuple[nn.Module, nn.Module]:
    """Return the backbone and encoder of upstream's hybrid policies. Only their constructors build them."""
    # Imported here: in upstream's own tree they import all of robomimic.
    if transformer:
        from diffusion_policy.policy.diffusion_transformer_hybrid_image_policy import (
            DiffusionTransformerHybridImagePolicy as Hybrid,
        )
    else:
        from diffusion_policy.policy.diffusion_unet_hybrid_image_policy import (  # type: ignore[assignment]
            DiffusionUnetHybridImagePolicy as Hybrid,
        )
    policy = Hybrid(noise_scheduler=None, num_inference_steps=1, **arguments)
    return policy.model, policy.obs_encoder


def probe_encoder(encoder: nn.Module, entries: Mapping[str, Entry], n_obs_steps: int) -> tuple[bool, int]:
    """Return whether an image encoder takes single frames, and the width E of its features, by a call on zeros.

    Ours turn {key: (B, To, *shape)} into (B, To, E), upstream's {key: (B * To, *shape)} into (B * To, E).
    """
    problems = []
    for lead in ((1, n_obs_steps), (n_obs_steps,)):
        try:
            with evaluating(encoder):
                shape = tuple(encoder(zeros(entries, lead, encoder)).shape)
        except Exception as error:  # any failure of a user's encoder becomes part of one message
            problems.append(f"given (*{lead}, *shape) it fails: {error}")
            continue
        if shape[:-1] == lead:
            return len(lead) == 1, shape[-1]
        problems.append(f"given (*{lead}, *shape) it returns {shape}")
    raise ValueError(
        f"obs_encoder must turn {', '.join(entries)} of shape (batch, {n_obs_steps}, *shape) into "
        f"(batch, {n_obs_steps}, width), or (batch, *shape) into (batch, width); {'; '.join(problems)}"
    )


def check_fit(generator: Generator) -> None:
    """Call the networks once on zeros, so that sizes that do not fit are found before training starts."""
    g = generator
    obs = zeros(g.entries, (1, g.n_obs_steps), g.model, g.obs_encoder)
    action = obs[next(iter(obs))].new_zeros(1, g.horizon, g.action_dim)
    try:
        with evaluating(g.model, g.obs_encoder):
            out = g(g.encode(obs if g.obs_dim is None else obs["obs"]), action, 0.0)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ValueError(
            f"the network does not fit the policy's sizes (horizon {g.horizon}, obs_dim {g.obs_dim}, n_obs_steps "
            f"{g.n_obs_steps}, action_dim {g.action_dim}, {g.conditioning}): {error}"
        ) from error
    if out.shape != action.shape:
        raise ValueError(f"the network returns {tuple(out.shape)} for an action chunk of shape {tuple(action.shape)}")


def zeros(entries: Mapping[str, Entry], lead: tuple[int, ...], *modules: nn.Module | None) -> dict[str, Tensor]:
    """Return an observation {key: (*lead, *shape)} of zeros on the device of the modules."""
    parameters = (p for module in modules if module is not None for p in module.parameters() if p.numel())
    parameter = next(parameters, torch.zeros(1))
    return {key: parameter.new_zeros(*lead, *entry.shape) for key, entry in entries.items()}


@contextlib.contextmanager
def evaluating(*modules: nn.Module | None) -> Iterator[None]:
    """Put the modules in evaluation mode without gradients, and restore modes and random numbers afterwards."""
    modes = [(part, part.training) for module in modules if module is not None for part in module.modules()]
    try:
        for part, _ in modes:
            part.training = False
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        for part, mode in modes:
            part.training = mode
