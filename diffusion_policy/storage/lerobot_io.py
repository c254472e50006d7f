"""Checkpoints of LeRobot: a folder with config.json, model.safetensors, and the normalisation of its processors.

Nothing of LeRobot is needed, and no file can hold code. A plugin knows its policy under LeRobot's name of the type: the
module `lerobot` of the package that registers under this name (`safe_config.PLUGINS`) turns LeRobot's settings into a
section `policy` of a config (`policy_section`), and back (`settings_of`).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from diffusion_policy.common.errors import CheckpointError, ConfigError
from diffusion_policy.common.normalize_util import get_image_range_normalizer
from diffusion_policy.model.common.normalizer import LinearNormalizer, SingleFieldLinearNormalizer
from diffusion_policy.storage import atomic, checkpoint_io, weights_io
from diffusion_policy.storage.plain_config import plain_data
from diffusion_policy.storage.safe_config import PLUGINS

PROCESSORS = {"policy_preprocessor": "normalizer_processor", "policy_postprocessor": "unnormalizer_processor"}
#: Steps that change no number.
NEUTRAL = ("rename_observations_processor", "to_batch_processor", "device_processor")
#: Statistics at -1 and 1 of each normalisation.
RANGES = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}
STATS = ("min", "max", "mean", "std")
ACTION = "action"


def is_checkpoint(folder: pathlib.Path) -> bool:
    """Whether a folder is a checkpoint of LeRobot rather than exported weights."""
    return (folder / "policy_preprocessor.json").is_file() and (folder / weights_io.WEIGHTS).is_file()


def plugin(kind: Any, where: str) -> Any:
    """The module that knows LeRobot's policies of this type."""
    points = [point for point in importlib.metadata.entry_points(group=PLUGINS) if point.name == kind]
    if not points:
        raise CheckpointError(f"{where} holds a policy of type {str(kind)[:50]!r}, which no package here knows")
    return importlib.import_module(f"{points[0].value}.lerobot")


# ---------------------------------------------------------------------- reading
def read(folder: pathlib.Path) -> dict[str, Any]:
    """The payload of a checkpoint of LeRobot, with the keys of a checkpoint's."""
    where = str(folder)
    settings = read_json(folder / weights_io.CONFIG)
    try:
        known = plugin(settings["type"], where)
        section, names = known.policy_section(settings), known.names(settings)
        prefix = f"{settings['type']}."
        weights = {key.removeprefix(prefix): value for key, value in read_tensors(folder, weights_io.WEIGHTS).items()}
        fields = {key: affine(folder, key, settings) for key in (*names, ACTION)}
        weights |= normalizer(names, known.cameras(settings), fields).state_dict(prefix="normalizer.")
    except CheckpointError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, RuntimeError) as error:
        raise CheckpointError(f"{where} is not a whole checkpoint of LeRobot: {error!r}"[:600]) from error
    cfg = {
        "name": f"lerobot_{settings['type']}",
        "policy": section,
        "task": {"name": "lerobot"},
        "training": {"seed": 0, "use_ema": False},
        "lerobot": settings,
    }
    return {"format": checkpoint_io.FORMAT, "cfg": cfg, "state_dicts": {"model": weights}, "attributes": {}}


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """A mapping of plain data."""
    try:
        if file.stat().st_size > weights_io.MAX_CONFIG_BYTES:
            raise CheckpointError(f"{file} is too large: it is not a file of settings")
        value = plain_data(json.loads(file.read_bytes()), str(file))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__}, not a mapping of settings")
    return value


def read_tensors(folder: pathlib.Path, name: str) -> dict[str, Tensor]:
    """The tensors of a file in the folder itself."""
    file = folder / name
    if file.name != name or file.is_symlink() or not file.is_file():
        raise CheckpointError(f"{folder} has no file {name[:100]!r}")
    checkpoint_io.require_memory(file)
    try:
        return safetensors.torch.load_file(file)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {type(error).__name__}: {error}") from error


def affine(folder: pathlib.Path, key: str, settings: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """{scale, offset, min, max, mean, std} of a feature's normalisation y = x * scale + offset; None for none."""
    name = "policy_postprocessor" if key == ACTION else "policy_preprocessor"
    step = normalizing_step(folder, name)
    features, config = {**settings["input_features"], **settings["output_features"]}, step["config"]
    kind, (width, *_) = features[key]["type"], features[key]["shape"]
    mode = config["norm_map"].get(kind, "IDENTITY")
    if mode == "IDENTITY":
        return None
    stored = read_tensors(folder, step["state_file"])
    stats = {
        stat.rpartition(".")[2]: value.double() for stat, value in stored.items() if stat.rpartition(".")[0] == key
    }
    if mode == "MEAN_STD":
        scale = 1 / (stats["std"] + config["eps"])
        offset = -stats["mean"] * scale
    elif mode in RANGES:
        low, high = (stats[stat] for stat in RANGES[mode])
        span = torch.where(high == low, config["eps"], high - low)
        scale, offset = 2 / span, -2 * low / span - 1
    else:
        raise CheckpointError(f"{folder} normalises {key} by {str(mode)[:50]!r}, which is not known here")
    ends = {"min": (-1 - offset) / scale, "max": (1 - offset) / scale, "mean": -offset / scale, "std": 1 / scale}
    out = {"scale": scale, "offset": offset, **{stat: stats.get(stat, ends[stat]) for stat in STATS}}
    if any(tuple(value.shape) != (width,) for value in out.values()):
        raise CheckpointError(f"{folder}: the statistics of {key} are not {width} numbers each")
    return {stat: value.float() for stat, value in out.items()}


def normalizing_step(folder: pathlib.Path, name: str) -> dict[str, Any]:
    """The step of a pipeline of processors that normalises; all others must be neutral."""
    steps = read_json(folder / f"{name}.json")["steps"]
    kinds = [step.get("registry_name") for step in steps]
    odd = [kind for kind in kinds if kind not in (*NEUTRAL, PROCESSORS[name])]
    if odd or kinds.count(PROCESSORS[name]) != 1:
        raise CheckpointError(
            f"{folder / name}.json must have one {PROCESSORS[name]} and no steps that change numbers otherwise; it has "
            f"{', '.join(str(kind)[:50] for kind in kinds)}"
        )
    return steps[kinds.index(PROCESSORS[name])]


def normalizer(
    names: Mapping[str, str], cameras: list[str], fields: Mapping[str, dict[str, Tensor] | None]
) -> LinearNormalizer:
    """The normaliser of a policy that observes `names`: one vector, or entries if some of them are images."""
    out = LinearNormalizer()
    out["action"] = single([fields[ACTION]])
    if not cameras:
        out["obs"] = single([fields[key] for key in names])
        return out
    for key, name in names.items():
        out[name] = get_image_range_normalizer() if key in cameras else single([fields[key]])
    return out


def single(parts: list[dict[str, Tensor] | None]) -> SingleFieldLinearNormalizer:
    """The normaliser of features side by side."""
    if all(part is None for part in parts):
        return SingleFieldLinearNormalizer.create_identity()
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        raise CheckpointError("some of the vectors are normalised and others are not, which is not known here")
    joined = {name: torch.cat([part[name] for part in known]) for name in ("scale", "offset", *STATS)}
    stats: dict[str, Any] = {name: joined[name] for name in STATS}
    return SingleFieldLinearNormalizer.create_manual(joined["scale"], joined["offset"], stats)


# ---------------------------------------------------------------------- writing
def write(payload: dict[str, Any], folder: str | os.PathLike, kind: str = "idp") -> pathlib.Path:
    """Write the policy of a loaded checkpoint as one of LeRobot's; returns the folder."""
    folder = pathlib.Path(folder)
    cfg, weights = payload["cfg"], dict(payload["state_dicts"][weights_io.acting_weights(payload)])
    if (cfg.get("task") or {}).get("representation") is not None:
        raise ConfigError("LeRobot cannot hold this policy: it converts rotations or relative actions")
    known = plugin(kind, "the checkpoint")
    settings = cfg.get("lerobot") or known.settings_of(cfg["policy"])
    names, features = known.names(settings), {**settings["input_features"], **settings["output_features"]}
    values = {key: weights.pop(key) for key in list(weights) if key.startswith("normalizer.")}
    stats = statistics(values, names, known.cameras(settings), features)
    norm_map = {"VISUAL": "IDENTITY", "STATE": "MIN_MAX", "ENV": "MIN_MAX", "ACTION": "MIN_MAX"}
    settings = {**settings, "type": kind, "normalization_mapping": norm_map}
    config = {"eps": 1e-8, "features": features, "norm_map": norm_map}
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
    before = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        device,
    ]
    after = {**config, "features": {ACTION: features[ACTION]}}
    write_tensors(folder / weights_io.WEIGHTS, {f"{kind}.{key}": value for key, value in weights.items()})
    for name, steps, own, rest in (
        ("policy_preprocessor", before, config, []),
        ("policy_postprocessor", [], after, [device]),
    ):
        state = f"{name}_step_{len(steps)}_{PROCESSORS[name]}.safetensors"
        step = {"registry_name": PROCESSORS[name], "config": own, "state_file": state}
        write_tensors(folder / state, stats)
        atomic.write_text(folder / f"{name}.json", json.dumps({"name": name, "steps": [*steps, step, *rest]}, indent=2))
    atomic.write_text(folder / weights_io.CONFIG, json.dumps(settings, indent=4))  # last: then the folder is complete
    return folder


def write_tensors(file: pathlib.Path, tensors: Mapping[str, Tensor]) -> None:
    data = safetensors.torch.save({key: value.clone().contiguous() for key, value in tensors.items()})
    atomic.write_atomically(file, lambda out: out.write(data))


def statistics(
    values: Mapping[str, Tensor], names: Mapping[str, str], cameras: list[str], features: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The statistics '<feature>.<stat>' with which LeRobot's MIN_MAX is the policy's normalisation."""
    out: dict[str, Tensor] = {}
    start = 0
    for key in (*names, ACTION):
        if key in cameras:
            continue
        width = features[key]["shape"][0]
        name = "action" if key == ACTION else names[key] if cameras else "obs"
        field = {
            stat.removeprefix("input_stats."): values[f"normalizer.params_dict.{name}.{stat}"].double()
            for stat in ("scale", "offset", *(f"input_stats.{stat}" for stat in STATS))
        }
        if name == "obs":
            part, start = slice(start, start + width), start + width
            field = {
                stat: value.expand(part.stop if len(value) == 1 else len(value))[part] for stat, value in field.items()
            }
        field = {stat: value.expand(width).clone() for stat, value in field.items()}
        field["min"], field["max"] = ((end - field["offset"]) / field["scale"] for end in (-1, 1))
        out |= {f"{key}.{stat}": field[stat].float() for stat in STATS}
    return out
