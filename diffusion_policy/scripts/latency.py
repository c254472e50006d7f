"""Measure how long a policy takes to answer, beside the iterative methods on the same network.

    python -m diffusion_policy.scripts.latency --checkpoint run
    python -m diffusion_policy.scripts.latency --checkpoint run --baseline mip_run --baseline dp_run --threads 2

One observation in, one action chunk out, everything between included: eager, compiled, and in ONNX Runtime. Without
--baseline, DP (100 DDPM steps), DDIM (10), Flow (9) and MIP (2) run on an untrained network of the same shape. Writes
latency.json and latency.png, and prints the table.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from diffusion_policy.common.command_line import Parser, reporting
from diffusion_policy.common.errors import ConfigError
from diffusion_policy.scripts.export import count

if TYPE_CHECKING:
    from diffusion_policy.latency.report import Row


def parser() -> argparse.ArgumentParser:
    out = Parser(prog="latency", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("-c", "--checkpoint", required=True, help="a .ckpt file, a run folder or exported weights")
    out.add_argument(
        "-b", "--baseline", action="append", default=[], metavar="PATH", help="a trained policy to compare with"
    )
    out.add_argument("-o", "--output", type=pathlib.Path, help="folder (default: latency in the run folder)")
    out.add_argument("--threads", type=count, default=1, help="default: 1")
    out.add_argument("--windows", type=count, default=5, help="each number is the median over windows (default: 5)")
    out.add_argument("--calls", type=count, default=200, help="per window, fewer if they are slow (default: 200)")
    out.add_argument("--seconds", type=float, default=2.0, help="of a window at most (default: 2)")
    out.add_argument("--trust-checkpoint", action="store_true", help="open a pickled (upstream) checkpoint")
    return out


def contestants(options: argparse.Namespace, checkpoint: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the policies by label, and the recorded observation that all of them get."""
    from omegaconf import OmegaConf

    from diffusion_policy.export.bundle import Bundle
    from diffusion_policy.export.parity import recorded
    from diffusion_policy.latency.variants import METHODS, stand_in
    from diffusion_policy.policy.loading import find_checkpoint

    bundle = Bundle.open(checkpoint, options.trust_checkpoint)
    obs, _ = recorded(bundle.signature, bundle.payload["cfg"], bundle.where)
    policies = {name_of(bundle): bundle.policy}
    for path in options.baseline:
        other = Bundle.open(find_checkpoint(path), options.trust_checkpoint)
        if other.policy.obs_shapes() != bundle.policy.obs_shapes():
            raise ConfigError(f"--baseline {path} has other observations than {options.checkpoint}")
        policies[f"{name_of(other)} ({path})"] = other.policy
    if not options.baseline:
        section = OmegaConf.create(bundle.payload["cfg"]).policy
        for label in METHODS:
            policies[label] = stand_in(label, bundle.policy, section)
    return policies, {key: value[:1] for key, value in obs.items()}


def name_of(bundle: Any) -> str:
    return bundle.signature.policy.removesuffix("Policy")


def compare(
    policies: dict[str, Any],
    obs: dict[str, Any],
    windows: int,
    calls: int,
    seconds: float,
    wanted: Callable[[str], Sequence[str]] | None = None,
) -> list[Row]:
    """Time each policy on each backend, or on those that wanted(label) names."""
    import functools

    from diffusion_policy.latency.report import Row
    from diffusion_policy.latency.timing import measure
    from diffusion_policy.latency.variants import BACKENDS, backends, trial

    rows: list[Row] = []
    tasks: dict[Any, Any] = {}
    first: dict[int, float] = {}
    for label, policy in policies.items():
        for backend, found in backends(policy, BACKENDS if wanted is None else wanted(label)).items():
            first_ms, reason = (0.0, found) if isinstance(found, str) else trial(found, obs)
            if not reason:
                tasks[len(rows)] = functools.partial(found.predict_action, obs)
                first[len(rows)] = first_ms
            rows.append(Row(label, backend, policy.nfe, None, reason))
    for number, timing in measure(tasks, windows, calls, seconds).items():
        timing.first_ms = first[number]
        rows[number].timing = timing
    return rows


def main(arguments: list[str] | None = None) -> None:
    with reporting():
        options = parser().parse_args(arguments)
        import torch

        from diffusion_policy.common.config_util import register_resolvers
        from diffusion_policy.latency import report
        from diffusion_policy.policy.loading import find_checkpoint

        torch.set_num_threads(options.threads)
        register_resolvers()
        checkpoint = find_checkpoint(options.checkpoint)
        run = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent
        output = options.output or run / "latency"
        policies, obs = contestants(options, checkpoint)
        rows = compare(policies, obs, options.windows, options.calls, options.seconds)
        about = {"checkpoint": str(checkpoint), "stand_ins": [] if options.baseline else list(policies)[1:]}
        described = [row.described() for row in rows]
        report.write(described, output, f"{next(iter(policies))}, {options.threads} thread(s)", about)
        print(report.table(described))
        if not options.baseline:
            print(f"{', '.join(about['stand_ins'])}: untrained, on a network of the same shape; only their time counts")
        warm = max((row.timing.warmup_seconds for row in rows if row.timing is not None), default=0.0)
        print(f"warm-up    not counted, at most {warm:.1f} s; latency.json has each\nwritten to {output}")


if __name__ == "__main__":
    main()
