"""Policies exported as ONNX, run by ONNX Runtime."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from diffusion_policy.common.errors import CheckpointError, ConfigError
from diffusion_policy.common.memory import available_bytes
from diffusion_policy.export.signature import Signature, from_json
from diffusion_policy.policy.graph_policy import GraphPolicy


def onnx_policy(content: Mapping[str, Any]) -> GraphPolicy:
    """Return the policy of a file that `onnx_io` has read and checked."""
    where = content["where"]
    signature = from_json(content["about"].get("signature"), where)
    session = open_session(content["data"], where)
    names = [field.name for field in signature.outputs]
    given = [(node.name, node.type, node.shape[1:]) for node in session.get_inputs()]
    types = {torch.float32: "tensor(float)", torch.uint8: "tensor(uint8)"}
    expected = [(field.name, types[field.dtype], [*field.shape]) for field in signature.inputs]
    if given != expected or [node.name for node in session.get_outputs()] != names:
        raise CheckpointError(f"the graph of {where} has other inputs or outputs than its metadata say")
    check_outputs(session, signature, where)
    return GraphPolicy(signature, functools.partial(session.run, names))


def open_session(data: bytes, where: str) -> Any:
    """Open a checked ONNX file in ONNX Runtime, on the CPU, with as many threads as torch has."""
    ort = require_runtime()
    limit_memory()
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.add_session_config_entry("session.use_env_allocators", "1")
    try:
        return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime has many classes for a graph that it cannot use
        text = " ".join(str(error).split())[:300]
        raise CheckpointError(f"ONNX Runtime cannot use {where}: {text}") from error


def check_outputs(session: Any, signature: Signature, where: str) -> None:
    """Raise unless one call with zeros gives actions of the shapes in the metadata."""
    feeds = {f.name: torch.zeros(1, *f.shape, dtype=f.dtype).numpy() for f in signature.inputs}
    try:
        found = [(value.dtype, value.shape) for value in session.run(None, feeds)]
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise CheckpointError(f"the graph of {where} fails: {text}") from error
    if found != [(np.float32, (1, *field.shape)) for field in signature.outputs]:
        raise CheckpointError(f"the graph of {where} gives other shapes than its metadata say")


def require_runtime() -> Any:
    """Import onnxruntime, or say how to install it."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ConfigError("an ONNX file needs ONNX Runtime to act: pip install onnx onnxruntime") from error
    return onnxruntime


@functools.cache
def limit_memory() -> None:
    """Give ONNX Runtime half of the free memory at most: a small graph can ask for any amount."""
    ort = require_runtime()
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(memory, ort.OrtArenaCfg({"max_mem": int(min(available_bytes() / 2, 1 << 40))}))
