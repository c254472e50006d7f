"""The files that a captured graph is written to: ONNX and TorchScript."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from diffusion_policy.export.signature import Signature
from diffusion_policy.policy.graph_policy import GraphPolicy
from diffusion_policy.storage import onnx_io

#: Name of the metadata inside a TorchScript file.
METADATA = "metadata.json"


def to_onnx(program: torch.export.ExportedProgram, signature: Signature) -> Any:
    """Return a graph as an onnx.ModelProto."""
    onnx_io.require_onnx()
    with quiet():
        exported = torch.onnx.export(
            program,
            input_names=[field.name for field in signature.inputs],
            output_names=[field.name for field in signature.outputs],
            dynamo=True,
            external_data=False,
            optimize=True,
            verbose=False,
        )
    assert exported is not None
    return exported.model_proto


def to_torchscript(program: torch.export.ExportedProgram, signature: Signature, about: dict[str, Any]) -> bytes:
    """Return the TorchScript file of a graph, with `about` in its extra file `metadata.json`."""
    module: Any = program.module()
    keep_sizes(module)
    example = tuple(field.example(2) for field in signature.inputs)
    with quiet(), torch.no_grad():
        traced = torch.jit.trace(module, example, check_trace=False)
        return traced.save_to_buffer(_extra_files={METADATA: json.dumps(about)})


def torchscript_policy(data: bytes, signature: Signature) -> GraphPolicy:
    """Return the policy of a TorchScript file that this process made; such a file is a program."""
    with quiet():
        module = torch.jit.load(io.BytesIO(data))

    @torch.no_grad()
    def call(feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        return [out.numpy() for out in module(*(torch.from_numpy(feeds[field.name]) for field in signature.inputs))]

    return GraphPolicy(signature, call)


def keep_sizes(module: Any) -> None:
    """Keep sizes variable in a trace of a captured graph: torch's functions record them, `torch.ops` fixes them."""
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.sym_size.int:
            node.target = size_of
        elif isinstance(node.target, torch._ops.OpOverload) and any(_is_size(item) for item in tree_leaves(node.args)):
            name = node.target._schema.name.removeprefix("aten::")
            node.target = getattr(torch.Tensor, name) if hasattr(torch.Tensor, name) else getattr(torch, name)
    module.recompile()


def _is_size(item: Any) -> bool:
    return isinstance(item, torch.fx.Node) and isinstance(item.meta.get("val"), torch.SymInt)


def size_of(x: torch.Tensor, dimension: int) -> int:
    return x.shape[dimension]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's warnings about its own deprecated parts."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
