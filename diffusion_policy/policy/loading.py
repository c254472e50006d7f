"""Loading a trained policy to act with: no dataset, runner or workspace class is needed."""

from __future__ import annotations

import math
import os
import pathlib
from typing import Any

import torch
from omegaconf import OmegaConf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diffusion_policy.common.config_util import resolve_device
from diffusion_policy.common.errors import CheckpointError
from diffusion_policy.common.memory import readable_bytes
from diffusion_policy.policy.base_lowdim_policy import BaseLowdimPolicy
from diffusion_policy.policy.represented import build_policy
from diffusion_policy.storage import checkpoint_io, weights_io

#: What building a policy may allocate beside a few times its weights.
SPARE_BYTES = 1 << 30
#: The file or name of the weights that an image network starts from; needed to train, not to act.
PRETRAINED = "policy.obs_encoder.rgb_model.weights"


def load_policy(
    path: str | os.PathLike, device: str | torch.device = "auto", best: bool = False, trust: bool = False
) -> Any:
    """Load a policy to act with: in eval mode, on `device`, with the averaged weights if the run kept them.

    Args:
        path: a checkpoint (.ckpt), a run folder, a folder of exported weights, or an exported graph (.onnx).
        device: auto (cuda, then mps, then cpu), cpu, cuda, cuda:1, mps. A graph runs on the CPU.
        best: of a run folder, the checkpoint with the best monitored score instead of the latest.
        trust: open a pickled (upstream) checkpoint, or one that names classes of other packages. This runs code from
            the file.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or not trusted.
        ConfigError: this machine does not have the device.
    """
    where = resolve_device(str(device))
    return policy_of(checkpoint_io.load(find_checkpoint(path, best), trust=trust, sections=("policy",)), where)


def policy_of(payload: dict[str, Any], device: torch.device | str = "cpu") -> Any:
    """Return the policy of a loaded checkpoint, as `load_policy` does."""
    if "onnx" in payload:
        from diffusion_policy.policy.onnx_policy import onnx_policy

        return onnx_policy(payload["onnx"])
    weights = payload["state_dicts"][weights_io.acting_weights(payload)]
    cfg = OmegaConf.create(payload["cfg"])
    if OmegaConf.select(cfg, PRETRAINED) is not None:  # the checkpoint's weights replace them
        OmegaConf.update(cfg, PRETRAINED, None)
    with bounded_memory(weights):
        policy = build_policy(cfg)
    if not (isinstance(policy, torch.nn.Module) and hasattr(policy, "predict_action")):
        raise CheckpointError(f"the checkpoint holds a {type(policy).__name__}, which is not a policy")
    try:
        policy.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError, KeyError, ValueError) as error:
        text = " ".join(str(error).split())[:600]
        raise CheckpointError(f"the checkpoint's weights do not fit its configuration: {text}") from error
    check_normalizer(policy)
    return policy.to(device).eval()


class _Allocations(TorchDispatchMode):
    """Raises as soon as the tensors that are made take more than `limit` bytes."""

    def __init__(self, limit: int):
        super().__init__()
        self.limit, self.used = limit, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {id(value) for value in tree_leaves((args, kwargs))}
        made = [value for value in tree_leaves(out) if isinstance(value, torch.Tensor) and id(value) not in given]
        self.used += sum(value.untyped_storage().nbytes() for value in made if value._base is None)
        if self.used > self.limit:
            raise CheckpointError(
                f"the checkpoint's config describes a policy of more than {readable_bytes(self.limit)}, far more than "
                "its weights: it is damaged or malicious"
            )
        return out


def bounded_memory(weights: dict[str, Any]) -> _Allocations:
    """Limit what building a policy may allocate to a few times the weights in its file.

    Sizes in a config multiply: each can be plausible and the network still larger than the memory.
    """
    size = sum(value.nbytes for value in weights.values() if isinstance(value, torch.Tensor))
    return _Allocations(int(SPARE_BYTES + 10 * size))


def check_normalizer(policy: Any) -> None:
    """Raise unless the loaded normaliser fits the policy; it takes any shape that a state dict has."""
    fields = getattr(getattr(policy, "normalizer", None), "params_dict", {})
    widths = {"action": getattr(policy, "action_dim", None)}
    if isinstance(policy, BaseLowdimPolicy):
        widths["obs"] = getattr(policy, "obs_dim", None)
    for name, field in fields.items():
        try:
            scale, offset = field["scale"], field["offset"]
            shapes = {tuple(value.shape) for value in (scale, offset, *field["input_stats"].values())}
            finite = bool(torch.isfinite(torch.cat([scale, offset])).all()) and (name != "action" or bool(scale.all()))
        except (KeyError, TypeError, AttributeError, RuntimeError):
            shapes, finite = set(), False
        width = widths.get(name)
        allowed = {(len(scale),)} if finite and width is None else {(1,), (width,)}
        if not finite or len(shapes) != 1 or not shapes <= allowed:
            raise CheckpointError(
                f"the checkpoint's normaliser for {name!r} does not fit: scale, offset and input_stats must be vectors "
                f"of one length{'' if width is None else f', {width}'}, with finite numbers and no scale of zero"
            )


# ---------------------------------------------------------------------- run folders
def find_checkpoint(path: str | os.PathLike, best: bool = False) -> pathlib.Path:
    """Return what `path` stands for: itself, or of a run folder its latest or its best checkpoint."""
    path = pathlib.Path(path)
    if not path.is_dir() or (path / weights_io.CONFIG).is_file():
        if best:
            raise CheckpointError(f"{path} is not a run folder, so it has no best checkpoint")
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    latest = folder / "latest.ckpt"
    if not latest.is_file():
        raise CheckpointError(
            f"{path} is neither a run folder (no checkpoints/latest.ckpt) nor exported weights (no {weights_io.CONFIG})"
        )
    return _best(latest) if best else latest


def _best(latest: pathlib.Path) -> pathlib.Path:
    """Return the checkpoint with the best monitored score, by the list that the latest one holds."""
    payload = checkpoint_io.load(latest, check_config=False)
    values = payload["state_dicts"].get("topk", {}).get("values")
    scores = {
        latest.with_name(pathlib.Path(name).name): value
        for name, value in (values.items() if isinstance(values, dict) else ())
        if isinstance(name, str) and isinstance(value, (int, float)) and math.isfinite(value)
    }
    found = [path for path in scores if path.is_file()]
    if not found:
        raise CheckpointError(f"{latest.parent} has no checkpoint with a monitored score; omit best to take the latest")
    highest = OmegaConf.select(OmegaConf.create(payload["cfg"]), "checkpoint.topk.mode") != "min"
    return (max if highest else min)(found, key=scores.__getitem__)
