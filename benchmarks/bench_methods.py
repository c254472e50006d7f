"""The training step of every method beside regression's, on the same network and batch."""

from __future__ import annotations

import pathlib
import tempfile

from omegaconf import OmegaConf

from benchmarks.common import TrainingStep, compose, interleaved, make_policy, ratio, row
from diffusion_policy.common.config_util import config_names
from diffusion_policy.storage import checkpoint_io
from idp_workspace.workspace.train_distillation_workspace import teacher_config

#: Large enough that the network, not the optimiser, is what costs.
BATCHES = {"transformer": 16, "unet": 16, "mlp": 256}


def methods(backbone: str) -> list[str]:
    """All methods with a config train_<method>_<backbone>_lowdim, regression first."""
    suffix = f"_{backbone}_lowdim"
    names = [name.removeprefix("train_").removesuffix(suffix) for name in config_names() if name.endswith(suffix)]
    return ["regression", *(name for name in names if name != "regression")]


def step(method: str, backbone: str, folder: pathlib.Path) -> TrainingStep:
    """A training step; a student gets an untrained teacher, which costs as much as a trained one."""
    config, overrides = f"train_{method}_{backbone}_lowdim", []
    cfg = compose(config)
    if "teacher" in cfg:
        teacher = teacher_config(cfg)
        state = make_policy(teacher.policy).state_dict()
        path = folder / f"{method}_{backbone}.ckpt"
        checkpoint_io.save(
            {
                "cfg": OmegaConf.to_container(teacher, resolve=True),
                "state_dicts": {"model": state, "ema_model": state},
                "attributes": {},
            },
            path,
        )
        overrides.append(f"policy.teacher_checkpoint={path}")
    return TrainingStep(config, *overrides, batch=BATCHES[backbone])


def run(quick: bool = False) -> list[dict]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for backbone in ("mlp",) if quick else ("transformer", "unet"):
            steps = {name: step(name, backbone, pathlib.Path(folder)) for name in methods(backbone)}
            times = interleaved(f"methods, {backbone}", steps, 3)
            base = times["regression"]
            rows += [
                row(
                    f"{name} step / regression step, {backbone}, batch {BATCHES[backbone]}",
                    ratio(time, base),
                    "x",
                    detail=f"{1000 * time.median:.0f} ms",
                )
                for name, time in times.items()
                if name != "regression"
            ]
    return rows
