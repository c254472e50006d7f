"""IDP's settings in LeRobot, and the same policy as a section of a config here. LeRobot itself is not needed.

LeRobot keeps the settings of a policy in `config.json`; those of IDP are the fields of `IDPConfig` in
plugins/lerobot_policy_idp, which builds its networks and its loss from `policy_section`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.dataset.recorded_keys import short_names
from idp_workspace.options import split_options
from idp_workspace.policy.idp_options import IDPOptions

STATE = "observation.state"
ACTION = "action"
VECTORS = ("STATE", "ENV")
IMAGE = "VISUAL"
TARGET = "idp_workspace.policy.IDPPolicy"
NETWORKS = "diffusion_policy.model.diffusion.mip_networks"
IMAGE_ENCODER = "diffusion_policy.model.vision.mip_image_encoder.ImageEncoder"
#: Fields that are options of the objective, under the same names; others are in the field `switches`.
OPTIONS = ("t_star", "lambda_prox", "energy_power", "probe_fraction", "geometry", "nfe")
SIZES = ("horizon", "n_obs_steps", "n_action_steps")
UNET = ("down_dims", "kernel_size", "n_groups")
DEFAULT_OPTIONS = dataclasses.asdict(IDPOptions())
#: Fields that a policy may lack because its networks do not have them.
EXAMPLE: dict[str, Any] = {
    **dict.fromkeys((*SIZES, "n_emb", "n_layer", "n_head"), 1),
    "dropout": 0.0,
    "down_dims": [64, 128],
    "kernel_size": 5,
    "n_groups": 8,
    "vision_width": 64,
}

Settings = Mapping[str, Any]


def inputs(settings: Settings) -> dict[str, dict[str, Any]]:
    """{feature: {type, shape}} of what the policy observes: vectors, the robot's state first, then images."""
    features = settings["input_features"]
    kept = {key: value for key, value in features.items() if value["type"] in (*VECTORS, IMAGE)}
    return dict(sorted(kept.items(), key=lambda item: (item[1]["type"] == IMAGE, item[0] != STATE, item[0])))


def cameras(settings: Settings) -> list[str]:
    """The features that are images."""
    return [key for key, feature in inputs(settings).items() if feature["type"] == IMAGE]


def names(settings: Settings) -> dict[str, str]:
    """{feature: entry of an observation here}: observation.images.front is `front`."""
    return short_names(list(inputs(settings)))


def policy_section(settings: Settings) -> dict[str, Any]:
    """Return the section `policy` of a config here, for LeRobot's settings of IDP.

    Without images the observation is one vector, the features side by side in the order of `inputs`.
    """
    features, entries = inputs(settings), names(settings)
    action_dim = settings["output_features"][ACTION]["shape"][0]
    backbone, n_emb, n_obs_steps = settings["backbone"], settings["n_emb"], settings["n_obs_steps"]
    section = {"_target_": TARGET, **{name: settings[name] for name in SIZES}, "action_dim": action_dim}
    if cameras(settings):
        kinds = {key: {"type": "rgb"} if key in cameras(settings) else {} for key in features}
        obs = {entries[key]: {"shape": list(feature["shape"])} | kinds[key] for key, feature in features.items()}
        shape_meta = {"obs": obs, "action": {"shape": [action_dim]}}
        section |= {"shape_meta": shape_meta, "obs_encoder": image_encoder(settings, shape_meta)}
    else:
        obs_dim = sum(feature["shape"][0] for feature in features.values())
        encoder = {"_target_": f"{NETWORKS}.StateEncoder", "obs_dim": obs_dim}
        encoder |= {"n_obs_steps": n_obs_steps, "emb_dim": n_emb}
        section |= {"obs_dim": obs_dim, "obs_encoder": encoder}
    make, conditioning = BACKBONES[backbone]
    section |= {"model": make(settings, action_dim), conditioning: True}
    return section | {name: settings[name] for name in OPTIONS} | dict(settings["switches"])


def image_encoder(settings: Settings, shape_meta: dict[str, Any]) -> dict[str, Any]:
    out = {"_target_": IMAGE_ENCODER, "shape_meta": shape_meta, "emb_dim": settings["n_emb"]}
    shapes = {name: settings[name] and list(settings[name]) for name in ("resize_shape", "crop_shape")}
    return out | shapes | {"width": settings["vision_width"]}


def sequence(settings: Settings, action_dim: int) -> dict[str, Any]:
    """Arguments of the networks of sequences."""
    sizes = {"horizon": settings["horizon"], "n_obs_steps": settings["n_obs_steps"], "cond_dim": settings["n_emb"]}
    depth = {"n_layer": settings["n_layer"], "n_emb": settings["n_emb"]}
    return {"input_dim": action_dim, "output_dim": action_dim, **sizes, **depth}


def transformer(settings: Settings, action_dim: int) -> dict[str, Any]:
    rest = {"n_head": settings["n_head"], "p_drop_emb": 0.0, "p_drop_attn": settings["dropout"], "causal_attn": True}
    return {"_target_": f"{NETWORKS}.ChiTransformer", **sequence(settings, action_dim), **rest}


def mlp(settings: Settings, action_dim: int) -> dict[str, Any]:
    return {"_target_": f"{NETWORKS}.ResidualMLP", **sequence(settings, action_dim), "p_drop": settings["dropout"]}


def unet(settings: Settings, action_dim: int) -> dict[str, Any]:
    n_emb = settings["n_emb"]
    widths = {"global_cond_dim": settings["n_obs_steps"] * n_emb, "cond_embed_dim": n_emb}
    widths |= {"diffusion_step_embed_dim": n_emb, "down_dims": list(settings["down_dims"])}
    rest = {"kernel_size": settings["kernel_size"], "n_groups": settings["n_groups"], "cond_predict_scale": True}
    return {"_target_": f"{NETWORKS}.ChiUnet", "input_dim": action_dim, **widths, **rest}


#: The backbones of the settings, and how each takes the observation.
BACKBONES = {
    "transformer": (transformer, "obs_as_cond"),
    "unet": (unet, "obs_as_global_cond"),
    "mlp": (mlp, "obs_as_cond"),
}


# ------------------------------------------------------------------ the other way
def settings_of(section: Settings) -> dict[str, Any]:
    """Return LeRobot's settings of IDP for a section `policy` of a config here.

    Raises:
        ConfigError: the section describes a policy that LeRobot's settings cannot.
    """
    try:
        found = read_section(section)
        there = policy_section(found)
        own, other = comparable(section), comparable(there)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"LeRobot's IDP cannot hold this policy: {type(error).__name__}: {error}") from error
    for name in sorted({*own, *other}):
        if own.get(name) != other.get(name):
            values = " instead of ".join(str(x.get(name))[:300] for x in (own, other))
            raise ConfigError(f"LeRobot's IDP cannot hold this policy: {name} is {values}")
    return found


def read_section(section: Settings) -> dict[str, Any]:
    """Return the settings that a section seems to have; the caller compares what they give with it."""
    if section["_target_"] != TARGET:
        raise ValueError(f"it is a {section['_target_']}, not a {TARGET}")
    model, encoder = section["model"], section["obs_encoder"]
    backbones = {make(EXAMPLE, 1)["_target_"]: name for name, (make, _) in BACKBONES.items()}
    if section.get("shape_meta"):
        obs = section["shape_meta"]["obs"]
        images = {key for key, entry in obs.items() if entry.get("type") == "rgb"}
        features = {
            f"observation.{'images.' * (key in images)}{key}": {
                "type": IMAGE if key in images else "STATE",
                "shape": list(entry["shape"]),
            }
            for key, entry in obs.items()
        }
    else:
        features = {STATE: {"type": "STATE", "shape": [section["obs_dim"]]}}
    options, _ = split_options(IDPOptions, section)
    values = {name: value for name, value in dataclasses.asdict(options).items() if value != DEFAULT_OPTIONS[name]}
    found = EXAMPLE | {name: model[name] for name in ("n_layer", "n_head", *UNET) if name in model}
    found |= {
        "backbone": backbones[model["_target_"]],
        "n_emb": encoder["emb_dim"],
        "dropout": model.get("p_drop_attn", model.get("p_drop", 0.0)),
        "input_features": features,
        "output_features": {ACTION: {"type": "ACTION", "shape": [section["action_dim"]]}},
        "resize_shape": encoder.get("resize_shape"),
        "crop_shape": encoder.get("crop_shape"),
        "vision_width": encoder.get("width", EXAMPLE["vision_width"]),
        "switches": {name: value for name, value in values.items() if name not in OPTIONS},
    }
    return found | {name: section[name] for name in SIZES} | {name: getattr(options, name) for name in OPTIONS}


def comparable(section: Settings) -> dict[str, Any]:
    """Return a section with the options as one value, and without what is not set."""
    options, rest = split_options(IDPOptions, section)
    return {name: set_values(value) for name, value in rest.items() if value is not None} | {"options": options}


def set_values(value: Any) -> Any:
    """Return a value without the entries of mappings that are None or the default type of an observation."""
    if not isinstance(value, Mapping):
        return list(value) if isinstance(value, (list, tuple)) else value
    unset = (None, "low_dim")
    return {
        name: set_values(entry)
        for name, entry in value.items()
        if not (isinstance(entry, str | None) and entry in unset)
    }
