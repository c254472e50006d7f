"""Exported graphs: bytes changed, graphs changed with a correct checksum, metadata of other types, foreign files."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import onnx
import torch

from benchmarks.common import make_policy
from benchmarks.fuzz import Finding
from benchmarks.fuzz_targets.mutate import SIZES, FileTarget, mutate_bytes, mutate_structure, pick
from benchmarks.fuzz_targets.small import config
from diffusion_policy.common.errors import CheckpointError
from diffusion_policy.export import graph, writers
from diffusion_policy.policy.loading import load_policy
from diffusion_policy.storage import checkpoint_io, onnx_io

RUNNER = {"_target_": "diffusion_policy.env_runner.pusht_state_runner.PushTStateRunner", "n_test": 2}
OPERATORS = ("Gemm", "MatMul", "Reshape", "Gather", "Expand", "Tile", "ConstantOfShape", "Concat", "Loop", "If",
             "Slice", "Transpose", "Squeeze", "Split", "Pad", "Range", "NonZero", "Evil", "")  # fmt: skip
OBS = {"obs": torch.zeros(1, 2, 5)}


class OnnxTarget(FileTarget):
    """Oracle: changed bytes give an error or the same actions; a changed graph an error or finite actions."""

    def __init__(self, folder: pathlib.Path, canary: pathlib.Path):
        self.path, self.canary = folder / "case.onnx", canary
        policy = make_policy(config("train_idp_mlp_lowdim", ["preset=debug"]).policy).eval()
        signature = graph.describe(policy)
        model = writers.to_onnx(graph.capture(policy, signature), signature)
        cfg = {"policy": {}, "task": {"env_runner": RUNNER}, "training": {"seed": 0}}
        self.about = json.loads(json.dumps({"signature": signature.described(), "cfg": cfg}))
        self.data = onnx_io.pack(model, self.about)
        self.graph = model.SerializeToString()
        self.path.write_bytes(self.data)
        self.action = load_policy(self.path).predict_action(OBS)["action"]

    def check(self, value: tuple[int, int]) -> str:
        rng = self.rng(value)
        kind = pick(rng, ["bytes"] * 4 + ["rebuilt"] * 3 + ["nodes"] * 4 + ["metadata"] * 3 + ["external", "whole"])
        self.path.write_bytes(getattr(self, f"_{kind}")(rng))
        try:
            checkpoint_io.load(self.path, sections=("policy", "task.env_runner"))
            action = load_policy(self.path).predict_action(OBS)["action"]
        except CheckpointError as error:
            if len(str(error)) < 20 or "\n" in str(error):
                raise Finding(f"the message is not one clear line: {error}") from error
            return type(error).__name__
        except ValueError as error:  # of a graph that is read and does not fit the observation
            return type(error).__name__
        if kind == "bytes" and not torch.equal(action, self.action):
            raise Finding("changed bytes were read as another graph")
        if kind == "external":
            raise Finding("numbers in another file were read")
        return "read"

    def _bytes(self, rng: np.random.Generator) -> bytes:
        return mutate_bytes(rng, self.data)

    def _rebuilt(self, rng: np.random.Generator) -> bytes:
        """Change the bytes of a graph; if it still is one, its checksum is correct."""
        changed = mutate_bytes(rng, self.graph)
        try:
            return onnx_io.pack(onnx.load_model_from_string(changed), self.about)
        except Exception:
            return changed

    def _nodes(self, rng: np.random.Generator) -> bytes:
        model = onnx.load_model_from_string(self.graph)
        for _ in range(int(rng.choice([1, 1, 2, 5]))):
            node = pick(rng, model.graph.node)
            match int(rng.integers(6)):
                case 0:
                    node.op_type = pick(rng, OPERATORS)
                case 1 if node.input:
                    node.input[int(rng.integers(len(node.input)))] = pick(rng, self._values(model))
                case 2:
                    tensor = pick(rng, model.graph.initializer)
                    tensor.dims[:] = [int(np.clip(pick(rng, SIZES), -(2**63), 2**63 - 1))] * int(rng.integers(4))
                case 3:
                    node.domain = pick(rng, ["com.microsoft", "my.lib", "ai.onnx.ml"])
                case 4:
                    node.attribute.add(name=pick(rng, ["axis", "perm", "to", "shape"]), i=int(rng.integers(99)), type=2)
                case _:
                    sizes = np.array([int(pick(rng, SIZES[:13]))] * int(rng.integers(1, 4)), np.int64)
                    pick(rng, model.graph.initializer).CopyFrom(
                        onnx.numpy_helper.from_array(sizes, pick(rng, model.graph.initializer).name)
                    )
        return onnx_io.pack(model, self.about)

    @staticmethod
    def _values(model: Any) -> list[str]:
        return [
            "obs",
            "",
            *(tensor.name for tensor in model.graph.initializer),
            *(n.output[0] for n in model.graph.node),
        ]

    def _metadata(self, rng: np.random.Generator) -> bytes:
        model = onnx.load_model_from_string(self.graph)
        about = mutate_structure(rng, self.about)
        if not isinstance(about, dict):
            model.metadata_props.add(key=onnx_io.KEY, value=json.dumps(about))
            return model.SerializeToString()
        return onnx_io.pack(model, about)

    def _external(self, rng: np.random.Generator) -> bytes:
        self.path.with_name("other.bin").write_bytes(bytes(1 << 16))
        model = onnx.load_model_from_string(self.graph)
        tensor = pick(rng, model.graph.initializer)
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        place = pick(rng, ["other.bin", str(self.path.with_name("other.bin")), "../x", "/etc/passwd", "/dev/zero", ""])
        tensor.external_data.add(key="location", value=place)
        return onnx_io.pack(model, self.about)

    def _whole(self, rng: np.random.Generator) -> bytes:
        return pick(
            rng, [b"", rng.bytes(int(rng.integers(3000))), b"PK\x03\x04", bytes(5000), self.data[:-1], self.graph]
        )
