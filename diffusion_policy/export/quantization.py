"""Weights in eight bits, kept only if the policy still solves its task."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from diffusion_policy.common.errors import ConfigError, EvaluationError
from diffusion_policy.common.random_state import seed_everything
from diffusion_policy.common.statistics import mean_interval
from diffusion_policy.export.writers import quiet
from diffusion_policy.scripts.eval import make_runner, parser
from diffusion_policy.storage import onnx_io
from diffusion_policy.storage.safe_config import checked_config

#: Operators whose weights are quantised. Convolutions are not: ONNX Runtime has no fast ones in eight bits on a CPU.
QUANTIZED = ["MatMul", "Gemm"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The mean scores on the same episodes before and after, and the 95 % interval of the first."""

    before: float
    low: float
    high: float
    after: float
    episodes: int

    @property
    def holds(self) -> bool:
        return self.low <= self.after <= self.high

    def __str__(self) -> str:
        interval = f"95 % interval {self.low:.3f} to {self.high:.3f}"
        return f"score {self.before:.3f} ({interval}) before, {self.after:.3f} after, on {self.episodes} episodes"


def quantize(data: bytes, where: str) -> Any:
    """Return the graph of an ONNX file with int8 weights and dynamically quantised inputs, as an onnx.ModelProto."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    onnx = onnx_io.require_onnx()
    model = onnx_io.parse(data, where)
    del model.graph.value_info[:]  # shapes that the rewritten products no longer have
    with tempfile.TemporaryDirectory() as folder, quiet():
        written = pathlib.Path(folder) / "int8.onnx"
        quantize_dynamic(model, written, weight_type=QuantType.QInt8, op_types_to_quantize=QUANTIZED)
        model = onnx.load(written)
    used = {node.domain for node in model.graph.node}
    for entry in [entry for entry in model.opset_import if entry.domain not in used]:
        model.opset_import.remove(entry)
    return model


def judge(before: Any, after: Any, cfg: dict[str, Any], where: str, episodes: int | None) -> Verdict:
    """Run the task's episodes with both policies."""
    section = OmegaConf.create(checked_config(cfg, where, ("policy", "task.env_runner")))
    if OmegaConf.select(section, "task.env_runner") is None:
        raise ConfigError("--quantize needs a task with a simulator, to see that the score holds; this one has none")
    if "n_test_vis" in section.task.env_runner:
        section.task.env_runner.n_test_vis = 0
    first, second = (scores(policy, section, episodes) for policy in (before, after))
    low, high = mean_interval(first)
    return Verdict(float(first.mean()), low, high, float(second.mean()), len(first))


def scores(policy: Any, cfg: DictConfig, episodes: int | None) -> np.ndarray:
    """Return the score of each test episode."""
    with tempfile.TemporaryDirectory() as folder:
        options = parser().parse_args(["--checkpoint", "unused", *(["-n", str(episodes)] if episodes else [])])
        runner = make_runner(cfg, options, pathlib.Path(folder))
        seed_everything(OmegaConf.select(cfg, "training.seed", default=0))
        try:
            runner.run(policy)
        finally:
            runner.close()
    if runner.lost:
        raise EvaluationError(f"{len(runner.lost)} episodes could not be run, so the scores cannot be compared")
    return np.array([episode["max_reward"] for episode in runner.episodes])
