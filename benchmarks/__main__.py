"""Run the benchmarks, print a table and write it to a file.

The table marks a missed target, but it is not an error: a busy machine can miss one. The targets are ratios measured in
interleaved rounds, so that they are comparable between machines.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import pathlib
import platform
import sys

#: name on the command line: what it measures. The module is bench_<name>.py.
BENCHMARKS = {
    "startup": "seconds until the help, and until the first training step",
    "geometry": "the geometry: share of a training step, growth with the batch, memory (18 GB unless --quick)",
    "step": "a training step of IDP and of Naive Drifting beside MIP's",
    "compile": "a training step with torch.compile, and proposal and probe in one network call, beside the plain ones",
    "distributed": "training over ranks: the path at one rank, bytes gathered, two ranks beside one, a cost model",
    "methods": "a training step of every method beside regression's",
    "data": "fetching a batch: share of a training step, gain over sample by sample, memory of images",
    "recordings": "recordings with videos: speed of decoding, share of a training step for a batch",
    "inference": "predict_action beside its bare network, Diffusion Policy beside IDP",
    "latency": "an action chunk at batch 1 on one core: IDP beside DP, DDIM and MIP, ONNX Runtime beside eager",
    "runtime": "the real-time loop at 50 and 200 Hz beside a policy: late steps, 20 s per case",
    "server": "the policy server: what it adds to a call, eight clients, bad input, memory",
    "env": "steps of the PushT environment beside gym-pusht's",
    "robomimic": "evaluations on robomimic's tasks: steps per second by task and workers",
    "pointcloud": "point clouds of MetaWorld: cost of a frame, share of an evaluation, sampling, encoder, workers",
}


def machine() -> dict:
    """The machine and the versions of a measurement."""
    import torch

    from diffusion_policy.storage.checkpoint_io import versions

    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "versions": versions(),
    }


def table(rows: list[dict]) -> str:
    """Format the rows as text: what, value, target, met."""
    cells = [("what", "value", "target", "met")]
    for r in rows:
        value = "not measured" if r["value"] is None else f"{r['value']:.3g} {r['unit']}".rstrip()
        cells.append((r["name"], value, r["target"] or "", {True: "yes", False: "NO", None: ""}[r["met"]]))
    widths = [max(len(line[i]) for line in cells) for i in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    lines.insert(1, "-" * (sum(widths) + 6))
    return "\n".join(lines)


def write(path: str | os.PathLike, rows: list[dict], about: dict) -> None:
    """Write {command, date, cpu, ..., rows} as JSON, atomically."""
    from diffusion_policy.storage.atomic import write_atomically

    text = json.dumps({**about, "rows": rows}, indent=2) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def main(argv: list[str] | None = None) -> None:
    listing = "\n".join(f"  {name:<10} {what}" for name, what in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"{__doc__}\nbenchmarks:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="name", help="which benchmarks to run; all without a name")
    parser.add_argument("--quick", action="store_true", help="smaller batches and fewer rounds; the table says which")
    parser.add_argument("--output", default="results/bench.json", help="where the JSON goes (default: %(default)s)")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"unknown benchmark {', '.join(unknown)}; choose from {', '.join(BENCHMARKS)}")

    command = "python -m benchmarks " + " ".join(sys.argv[1:] if argv is None else argv)
    about = {"command": command.strip(), "quick": arguments.quick, **machine()}
    rows = []
    for name in arguments.names or BENCHMARKS:
        print(f"{name}: {BENCHMARKS[name]} ...", file=sys.stderr, flush=True)
        rows += importlib.import_module(f"benchmarks.bench_{name}").run(arguments.quick)
        write(arguments.output, rows, about)  # after each one, so that an interrupted run keeps its results
    print(table(rows))
    print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
