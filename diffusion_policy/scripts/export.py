"""Export a policy as one file that maps raw observations to raw actions, normalisation included.

    python -m diffusion_policy.scripts.export --checkpoint run
        writes run/latest.onnx, which ONNX Runtime runs anywhere, and eval.py and load_policy here
    python -m diffusion_policy.scripts.export --checkpoint run --format torchscript
        writes run/latest.pt, for libtorch
    python -m diffusion_policy.scripts.export --checkpoint run --format safetensors
        writes run/latest_weights/, which Python code of this project builds the policy from

Before a graph is written it is compared with PyTorch on observations of the dataset.
"""

from __future__ import annotations

import argparse
import pathlib
from typing import TYPE_CHECKING, Any

from diffusion_policy.common.command_line import Parser, reporting, shell_command
from diffusion_policy.common.errors import ConfigError, EvaluationError

if TYPE_CHECKING:
    from diffusion_policy.export.signature import Signature

SUFFIXES = {"onnx": ".onnx", "torchscript": ".pt", "safetensors": "_weights"}


def count(text: str) -> int:
    """Read a number of calls or episodes."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def rate(text: str) -> float:
    """Read a rate in Hz."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate in Hz")
    return value


def parser() -> argparse.ArgumentParser:
    out = Parser(prog="export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("-c", "--checkpoint", required=True, help="a .ckpt file, a run folder or exported weights")
    out.add_argument("-f", "--format", choices=SUFFIXES, default="onnx", help="default: onnx")
    out.add_argument("-o", "--output", type=pathlib.Path, help="default: beside the checkpoints, named after them")
    out.add_argument("--best", action="store_true", help="of a run folder: the checkpoint with the best score")
    out.add_argument("--nfe", type=count, help="network calls per action chunk, for policies that can choose")
    out.add_argument("--ddim", type=count, metavar="STEPS", help="act with DDIM steps, for policies trained by DDPM")
    out.add_argument("--rate", type=rate, metavar="HZ", help="rate of the actions (default: the task's, if known)")
    out.add_argument(
        "--quantize",
        action="store_true",
        help="onnx: also write a file with int8 weights, if its score on the task stays within the interval",
    )
    out.add_argument("-n", "--n_episodes", type=count, help="of --quantize (default: the task's n_test)")
    out.add_argument("--overwrite", action="store_true", help="replace an existing output")
    out.add_argument("--trust-checkpoint", action="store_true", help="open a pickled (upstream) checkpoint")
    return out


def default_output(checkpoint: pathlib.Path, kind: str) -> pathlib.Path:
    """Return the output of a checkpoint, in its run folder, or beside exported weights."""
    folder = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent
    return folder / f"{checkpoint.stem}{SUFFIXES[kind]}"


def export(options: argparse.Namespace) -> pathlib.Path:
    """Export the checkpoint that the options name; returns the file or folder."""
    from diffusion_policy.policy.loading import find_checkpoint
    from diffusion_policy.scripts.convert_checkpoint import convert

    if options.quantize and options.format != "onnx":
        raise ConfigError("--quantize is for --format onnx")
    checkpoint = find_checkpoint(options.checkpoint, options.best)
    output = options.output or default_output(checkpoint, options.format)
    if options.format == "safetensors":
        return convert(checkpoint, output, options.trust_checkpoint, options.overwrite)
    if output.suffix != SUFFIXES[options.format]:  # it says what a file is when it is opened again
        raise ConfigError(f"--output {output}: the name of this format ends in {SUFFIXES[options.format]}")
    for path in (output, int8_path(output)) if options.quantize else (output,):
        if path.exists() and not options.overwrite:
            raise ConfigError(f"{path} exists already: choose another --output, or pass --overwrite")
    export_graph(checkpoint, output, options)
    return output


def export_graph(checkpoint: pathlib.Path, output: pathlib.Path, options: argparse.Namespace) -> None:
    """Write a graph, if it acts as its policy does."""
    from diffusion_policy.export.bundle import Bundle
    from diffusion_policy.storage import atomic

    bundle = Bundle.open(checkpoint, options.trust_checkpoint, options.nfe, options.ddim, options.rate)
    show(bundle.signature)
    data, parity = bundle.onnx() if options.format == "onnx" else bundle.torchscript()
    print(f"check    largest error {parity}", flush=True)
    if not parity.holds:
        raise ConfigError(f"the exported graph differs from PyTorch by {parity}: nothing was written")
    atomic.write_atomically(output, lambda file: file.write(data))
    print(f"written  {output} ({len(data) / 1e6:.1f} MB)", flush=True)
    if options.quantize:
        write_quantized(bundle, data, int8_path(output), options.n_episodes)


def show(signature: Signature) -> None:
    """Print what the graph takes and gives."""
    pace = "rate unknown, see --rate" if signature.rate_hz is None else f"{signature.rate_hz:g} Hz"
    print(f"policy   {signature.policy}, {signature.nfe} network call(s), {pace}")
    for word, fields in (("takes", signature.inputs), ("gives", signature.outputs)):
        for field in fields:
            entry = field.described()
            print(f"{word:8} {field.name} (batch, {', '.join(map(str, field.shape))}) {entry['dtype']}")


def int8_path(output: pathlib.Path) -> pathlib.Path:
    return output.with_name(f"{output.stem}_int8{output.suffix}")


def write_quantized(bundle: Any, data: bytes, output: pathlib.Path, episodes: int | None) -> None:
    """Write the graph with int8 weights, if its score on the task holds."""
    from diffusion_policy.storage import atomic

    small, parity, verdict = bundle.quantized(data, episodes)
    print(f"int8     largest error {parity}\nint8     {verdict}", flush=True)
    if not verdict.holds:
        output.unlink(missing_ok=True)
        raise EvaluationError(f"the int8 graph was not kept, {verdict}: act with the other one")
    atomic.write_atomically(output, lambda file: file.write(small))
    print(f"written  {output} ({len(small) / 1e6:.1f} MB)")


def has_simulator(output: pathlib.Path) -> bool:
    """Return whether eval.py can play the task of an export."""
    from diffusion_policy.storage import checkpoint_io

    return checkpoint_io.load(output, check_config=False)["cfg"].get("task", {}).get("env_runner") is not None


def main(arguments: list[str] | None = None) -> None:
    with reporting():
        options = parser().parse_args(arguments)
        from diffusion_policy.common.config_util import register_resolvers

        register_resolvers()
        output = export(options)
    if options.format != "torchscript" and has_simulator(output):
        print(f"next     {shell_command('python', 'eval.py', '--checkpoint', output)}")


if __name__ == "__main__":
    main()
