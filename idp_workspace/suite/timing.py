"""Times of a finished run, for its times.json: `python -m idp_workspace.suite.timing FOLDER ...`."""

from __future__ import annotations

import itertools
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from omegaconf import OmegaConf

from diffusion_policy.common.config_util import get_class, register_resolvers
from diffusion_policy.common.pytorch_util import dict_apply
from diffusion_policy.storage import checkpoint_io
from diffusion_policy.workspace.base_workspace import BaseWorkspace
from diffusion_policy.workspace.measurement import counting
from idp_workspace.suite.jobs import write_json


def measure(folder: pathlib.Path, calls: int = 30) -> None:
    """Write times.json of a finished run: median times of a training step (without data loading) and predict_action.

    Processor time of this process on one thread: equal to wall-clock time on an idle machine, less affected by load.
    """
    register_resolvers()
    torch.set_num_threads(1)
    cfg = OmegaConf.create(checkpoint_io.load(folder / "checkpoints/latest.ckpt")["cfg"])

    def milliseconds(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(calls + 3):
            started = time.process_time()
            call()
            times.append(1000 * (time.process_time() - started))
        return statistics.median(times[3:])

    with tempfile.TemporaryDirectory() as output:
        workspace: Any = get_class(cfg._target_, BaseWorkspace)(cfg, output_dir=output)
        workspace.prepare()
        batch = workspace.stream.batch(0)
        step = milliseconds(lambda: workspace.optimise(itertools.repeat(batch)))
    policy = workspace.policy.eval()
    obs = dict_apply(batch["obs"] if isinstance(batch["obs"], dict) else {"obs": batch["obs"]}, lambda value: value[:1])
    with counting(policy) as counter:
        inference = milliseconds(lambda: policy.predict_action(obs))
    times = {"step_ms": step, "inference_ms": inference, "nfe": counter["network"] / counter["chunks"]}
    write_json(folder / "times.json", times)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        measure(pathlib.Path(name))
