"""Policies exported as ONNX: one file with the graph, and as its metadata what it takes, gives and was made from.

The file may come from an untrusted source. It is checked before ONNX Runtime sees it: one graph of standard operators,
without control flow, and every number inside the file. Such a graph computes; it cannot open a file or call anything.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from diffusion_policy.common.errors import CheckpointError, ConfigError
from diffusion_policy.storage import checkpoint_io

SUFFIX = ".onnx"
#: Name of the metadata in the file.
KEY = "diffusion_policy"
FORMAT = 1
MAX_METADATA_BYTES = 4_000_000
#: Domains of the operators that are part of ONNX itself.
STANDARD = ("", "ai.onnx")


def require_onnx() -> Any:
    """Import onnx, or say how to install it."""
    try:
        import onnx
    except ImportError as error:
        raise ConfigError("ONNX files need three more packages: pip install onnx onnxscript onnxruntime") from error
    return onnx


def pack(model: Any, about: dict[str, Any]) -> bytes:
    """Return the file of a graph (onnx.ModelProto), with `about` as its only metadata."""
    _strip(model)
    text = json.dumps({**about, "format": FORMAT, "sha256": _digest(model)})
    model.metadata_props.add(key=KEY, value=text)
    return model.SerializeToString(deterministic=True)


def read(path: str | os.PathLike) -> dict[str, Any]:
    """Return the payload of a file, with the keys of a checkpoint's, and `onnx`: its bytes and its metadata."""
    path = pathlib.Path(path)
    checkpoint_io.require_memory(path)
    return unpack(path.read_bytes(), str(path))


def unpack(data: bytes, where: str) -> dict[str, Any]:
    """As `read`, for the content of a file."""
    model = parse(data, where)
    about = _metadata(model, where)
    check_graph(model, where)
    if about.get("sha256") != _digest(model):
        raise CheckpointError(f"{where} is damaged, or another program changed it: its checksum does not fit its graph")
    return {
        "format": about.get("format"),
        "cfg": about.get("cfg"),
        "state_dicts": {},
        "attributes": about.get("attributes", {}),
        "versions": about.get("versions", {}),
        "onnx": {"data": data, "about": about, "where": where},
    }


def parse(data: bytes, where: str) -> Any:
    """Return the onnx.ModelProto of a file."""
    onnx = require_onnx()
    try:
        return onnx.load_model_from_string(data)
    except Exception as error:  # of protobuf, and of the library that parses it
        raise CheckpointError(f"{where} cannot be read, it is not an ONNX file, or it is damaged") from error


def _metadata(model: Any, where: str) -> dict[str, Any]:
    texts = [entry.value for entry in model.metadata_props if entry.key == KEY]
    if len(texts) != 1:
        raise CheckpointError(
            f"{where} was not exported by this project: it lacks the metadata that say what it takes and gives. Export "
            "the checkpoint with python -m diffusion_policy.scripts.export"
        )
    if len(texts[0]) > MAX_METADATA_BYTES:
        raise CheckpointError(f"{where} has metadata of more than {MAX_METADATA_BYTES:,} characters")
    try:
        about = json.loads(texts[0])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} has metadata that are not JSON") from error
    if not isinstance(about, dict):
        raise CheckpointError(f"{where} has metadata of another structure")
    return about


def check_graph(model: Any, where: str) -> None:
    """Raise unless the file is one graph of standard operators, without control flow, that holds all its numbers."""
    onnx = require_onnx()
    odd = None
    if model.functions or model.training_info:
        odd = "functions of its own"
    elif any(entry.domain not in STANDARD for entry in model.opset_import):
        odd = "operators that are not part of ONNX"
    elif model.graph.sparse_initializer or model.graph.quantization_annotation:
        odd = "sparse numbers"
    for node in model.graph.node:
        if node.domain not in STANDARD:
            odd = f"the operator {node.domain[:50]}.{node.op_type[:50]}"
        if any(_is_graph(attribute) for attribute in node.attribute):
            odd = f"control flow ({node.op_type[:50]})"
    for tensor in _tensors(model):
        if tensor.data_location != onnx.TensorProto.DEFAULT or tensor.external_data:
            odd = "numbers in other files"
    if odd is not None:
        raise CheckpointError(f"{where} has {odd}, which an exported policy does not: it is not opened")


def _is_graph(attribute: Any) -> bool:
    return attribute.HasField("g") or bool(attribute.graphs) or attribute.HasField("sparse_tensor")


def _tensors(model: Any) -> Iterator[Any]:
    """All constants of a graph without control flow."""
    yield from model.graph.initializer
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


def _digest(model: Any) -> str:
    """SHA-256 of the graph and of the versions of its operators."""
    versions = json.dumps([(entry.domain, entry.version) for entry in model.opset_import])
    return hashlib.sha256(model.graph.SerializeToString(deterministic=True) + versions.encode()).hexdigest()


def _strip(model: Any) -> None:
    """Remove what the exporter notes about the source code: paths of this machine, several times the graph's size."""
    del model.metadata_props[:]
    del model.graph.metadata_props[:]
    model.graph.doc_string = model.doc_string = ""
    for items in (model.graph.node, model.graph.value_info, model.graph.input, model.graph.output):
        for item in items:
            del item.metadata_props[:]
            item.doc_string = ""
    for tensor in _tensors(model):
        del tensor.metadata_props[:]
        tensor.doc_string = ""
