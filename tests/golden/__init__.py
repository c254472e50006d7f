"""Reference numbers for upstream and MIP; README.md says how each file was computed."""

import gzip
import json
import math
import pathlib
import zlib
from typing import Any

import numpy as np
import torch

FOLDER = pathlib.Path(__file__).resolve().parent


def read(name: str) -> Any:
    """Read `name` from this folder: a .json, .json.gz or .npz file, as nested dicts with arrays and tensors."""
    if (path := FOLDER / f"{name}.json").is_file():
        return json.loads(path.read_text())
    if (path := FOLDER / f"{name}.json.gz").is_file():
        return json.loads(gzip.decompress(path.read_bytes()))
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
        if "tree" not in file:
            return dict(file)
        return unpack(json.loads(file["tree"].tobytes()), file)


def write_tree(name: str, tree: Any) -> None:
    """Write nested dicts and lists with arrays and tensors as one .npz file without pickles."""
    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(pack(tree, arrays), separators=(",", ":")).encode()
    np.savez_compressed(FOLDER / f"{name}.npz", tree=np.frombuffer(text, np.uint8), **arrays)


def pack(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Replace arrays by references and collect them in `arrays`."""
    if isinstance(value, dict):
        return {key: pack(child, arrays) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [pack(child, arrays) for child in value]
    if isinstance(value, torch.Tensor | np.ndarray):
        name = str(len(arrays))
        arrays[name] = np.asarray(value)
        return {"tensor" if isinstance(value, torch.Tensor) else "array": name}
    return value


def unpack(value: Any, arrays: Any) -> Any:
    """Inverse of `pack`."""
    if isinstance(value, dict):
        if set(value) == {"tensor"}:
            return torch.from_numpy(arrays[value["tensor"]])
        if set(value) == {"array"}:
            return arrays[value["array"]]
        return {key: unpack(child, arrays) for key, child in value.items()}
    if isinstance(value, list):
        return [unpack(child, arrays) for child in value]
    return value


def drawn_weights(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Weights of one model case by the rule they were drawn with, which is shorter than the weights.

    All parameters in order come from one seeded generator: scale * N(0, 1), plus one for weights of normalisation.
    """
    generator = torch.Generator().manual_seed(case["weights"]["seed"])
    scale, ones = case["weights"]["scale"], set(case["weights"]["ones"])
    weights = {}
    for key, shape in case["weights"]["shapes"].items():
        if key in case["buffers"]:
            weights[key] = case["buffers"][key]
        else:
            weights[key] = torch.randn(shape, generator=generator) * scale + (1.0 if key in ones else 0.0)
    total = sum(value.double().abs().sum().item() for key, value in weights.items() if key not in case["buffers"])
    if abs(total - case["weights"]["sum_abs"]) > 1e-6 * total:
        raise RuntimeError("this torch draws other random numbers than the one the weights were drawn with")
    return weights


def named_weights(shapes: dict[str, Any], scale: float | None = None) -> dict[str, torch.Tensor]:
    """Weights that follow from their names and shapes.

    They are uniform random numbers in [-scale, scale]. Without a scale, the outputs of a layer are about as large as
    its inputs, and weights of normalisations are around 1. Every version of numpy and torch gives the same numbers.
    """
    weights = {}
    for name, shape in shapes.items():
        numbers = np.random.RandomState(zlib.crc32(name.encode())).uniform(-1, 1, shape)
        if scale is not None:
            numbers *= scale
        elif len(shape) > 1:
            numbers *= math.sqrt(3 / math.prod(shape[1:]))
        else:
            numbers = 0.1 * numbers + name.endswith("weight")
        weights[name] = torch.from_numpy(numbers).float()
    return weights
