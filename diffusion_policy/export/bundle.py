"""A checkpoint to export: its policy, the policy's graph, and the metadata of the exported file."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

import torch
from omegaconf import OmegaConf

from diffusion_policy.common.config_util import build
from diffusion_policy.common.errors import ConfigError, UserError
from diffusion_policy.export import graph, parity, quantization, writers
from diffusion_policy.export.signature import Signature
from diffusion_policy.policy.graph_policy import GraphPolicy
from diffusion_policy.policy.loading import policy_of
from diffusion_policy.policy.onnx_policy import onnx_policy
from diffusion_policy.storage import checkpoint_io, onnx_io, weights_io
from diffusion_policy.storage.safe_config import checked_config
from diffusion_policy.workspace.measurement import set_nfe


@dataclasses.dataclass
class Bundle:
    """A policy, its signature, and the payload that it was loaded from."""

    policy: Any
    signature: Signature
    payload: dict[str, Any]
    where: str

    @classmethod
    def open(
        cls,
        checkpoint: pathlib.Path,
        trust: bool = False,
        nfe: int | None = None,
        ddim: int | None = None,
        rate_hz: float | None = None,
    ) -> Bundle:
        """Load a checkpoint. The arguments change how the policy acts: network calls, and DDIM in place of DDPM."""
        where = str(checkpoint)
        payload = checkpoint_io.load(checkpoint, trust=trust, check_config=False)
        cfg = payload["cfg"] if trust else checked_config(payload["cfg"], where, ("policy",))
        policy = policy_of({**payload, "cfg": cfg})
        if isinstance(policy, GraphPolicy):
            raise ConfigError(f"{where} is an exported graph already: export the checkpoint that it came from")
        if ddim is not None:
            use_ddim(policy, ddim)
        if nfe is not None:
            set_nfe(policy, nfe)
        if rate_hz is None:
            rate_hz = task_rate(payload["cfg"], where)
        return cls(policy, graph.describe(policy, rate_hz), payload, where)

    @functools.cached_property
    def program(self) -> torch.export.ExportedProgram:
        return graph.capture(self.policy, self.signature)

    def about(self, **further: Any) -> dict[str, Any]:
        """Return the file's metadata: the signature, the task's runner, and the description in the checkpoint."""
        attributes = self.payload.get("attributes", {})
        return {
            "signature": self.signature.described(),
            "cfg": weights_io.acting_config(self.payload["cfg"]) | {"policy": {}},
            "attributes": {key: attributes.get(key) for key in ("global_step", "epoch", "dataset")},
            "versions": checkpoint_io.versions(),
            **further,
        }

    def compared(self, exported: GraphPolicy) -> parity.Parity:
        return parity.compare(self.policy, exported, self.signature, self.payload["cfg"], self.where)

    def onnx(self) -> tuple[bytes, parity.Parity]:
        """Return the ONNX file and how well it agrees."""
        return self.checked(writers.to_onnx(self.program, self.signature))

    def checked(self, model: Any, **further: Any) -> tuple[bytes, parity.Parity]:
        found = self.compared(self.opened(onnx_io.pack(model, self.about())))
        return onnx_io.pack(model, self.about(check=dataclasses.asdict(found), **further)), found

    def opened(self, data: bytes) -> GraphPolicy:
        return onnx_policy(onnx_io.unpack(data, "the exported graph")["onnx"])

    def torchscript(self) -> tuple[bytes, parity.Parity]:
        """Return the TorchScript file and how well it agrees."""
        data = writers.to_torchscript(self.program, self.signature, self.about())
        return data, self.compared(writers.torchscript_policy(data, self.signature))

    def quantized(self, data: bytes, episodes: int | None) -> tuple[bytes, parity.Parity, quantization.Verdict]:
        """Return the file with int8 weights of an ONNX file, how well it agrees, and whether its score holds."""
        small, found = self.checked(quantization.quantize(data, self.where), quantized="int8")
        verdict = quantization.judge(self.opened(data), self.opened(small), self.payload["cfg"], self.where, episodes)
        return small, found, verdict


def onnx_of(policy: Any, int8: bool = False) -> GraphPolicy:
    """Return a policy that runs in ONNX Runtime, without a file."""
    signature = graph.describe(policy)
    about = {"signature": signature.described()}
    data = onnx_io.pack(writers.to_onnx(graph.capture(policy, signature), signature), about)
    if int8:
        data = onnx_io.pack(quantization.quantize(data, "the exported graph"), about)
    return onnx_policy(onnx_io.unpack(data, "the exported graph")["onnx"])


def use_ddim(policy: Any, steps: int) -> None:
    """Let a policy that was trained by DDPM act with `steps` DDIM steps."""
    from diffusers.schedulers.scheduling_ddim import DDIMScheduler

    if not hasattr(policy, "noise_scheduler"):
        raise ConfigError(f"--ddim is for diffusion policies; {type(policy).__name__} has no noise scheduler")
    policy.noise_scheduler = DDIMScheduler.from_config(policy.noise_scheduler.config)
    policy.num_inference_steps = steps


def task_rate(cfg: dict[str, Any], where: str) -> float | None:
    """Return the rate of the recording, or of the task's environment if it is known without building one."""
    fps = cfg["task"].get("fps") if isinstance(cfg.get("task"), dict) else None
    if isinstance(fps, (int, float)) and 0 < fps < 1e6:
        return float(fps)
    try:
        section = checked_config(cfg, where, ("policy", "task.env_runner"))
        if section["task"]["env_runner"] is None:
            return None
        return build(OmegaConf.create(section), "task.env_runner", output_dir=".").control_hz
    except (UserError, AttributeError, OSError, ImportError):
        return None
