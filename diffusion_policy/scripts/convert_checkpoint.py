"""Convert a checkpoint to a file that can be shared and opened safely.

    python -m diffusion_policy.scripts.convert_checkpoint run/checkpoints/latest.ckpt weights/
        exports the weights to deploy: a folder with model.safetensors and config.json
    python -m diffusion_policy.scripts.convert_checkpoint upstream.ckpt safe.ckpt --trust-checkpoint
        rewrites an upstream checkpoint, a pickle, as plain data. This runs the code in the pickle, once.
    python -m diffusion_policy.scripts.convert_checkpoint outputs/train/RUN/checkpoints/last/pretrained_model weights/
        turns a checkpoint of LeRobot's IDP into weights to deploy; a name ending in .ckpt gives a checkpoint
    python -m diffusion_policy.scripts.convert_checkpoint run/ pretrained_model/ --to-lerobot
        writes a checkpoint for LeRobot: lerobot-eval --policy.path=pretrained_model ...

eval.py opens the first two, LeRobot the last.
"""

from __future__ import annotations

import argparse
import pathlib

from diffusion_policy.common.command_line import reporting, shell_command
from diffusion_policy.common.config_util import register_resolvers
from diffusion_policy.common.errors import CheckpointError, ConfigError
from diffusion_policy.policy.loading import find_checkpoint, policy_of
from diffusion_policy.storage import checkpoint_io, lerobot_io, weights_io
from diffusion_policy.storage.safe_config import checked_config


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="convert_checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument("checkpoint", type=pathlib.Path, help="the file to convert, or a run folder")
    out.add_argument(
        "output",
        type=pathlib.Path,
        help="a name ending in .ckpt for a checkpoint, any other name for a folder of exported weights",
    )
    out.add_argument(
        "--trust-checkpoint",
        action="store_true",
        help="open a pickled (upstream) checkpoint, which runs code from the file",
    )
    out.add_argument("--to-lerobot", action="store_true", help="write a folder that LeRobot opens")
    out.add_argument("--overwrite", action="store_true", help="replace an existing output")
    return out


def convert(
    checkpoint: pathlib.Path,
    output: pathlib.Path,
    trust: bool = False,
    overwrite: bool = False,
    to_lerobot: bool = False,
) -> pathlib.Path:
    """Write `checkpoint` as the safe file or folder `output`, LeRobot's if asked for; returns `output`."""
    if output.exists() and not overwrite:
        raise ConfigError(f"{output} exists already: choose another name, or pass --overwrite")
    checkpoint = find_checkpoint(checkpoint)
    payload = checkpoint_io.load(checkpoint, trust=trust, check_config=False)
    cfg = payload["cfg"] if trust else checked_config(payload["cfg"], str(checkpoint), ("policy",))
    if to_lerobot:
        policy_of({**payload, "cfg": cfg})
        return lerobot_io.write({**payload, "cfg": cfg}, output)
    if output.suffix != ".ckpt":
        policy_of({**payload, "cfg": cfg})  # what is exported must load
        return weights_io.write(payload, output)
    safe = {name: payload[name] for name in ("cfg", "state_dicts")}
    safe["attributes"] = {
        name: value
        for name, value in payload.get("attributes", {}).items()
        if isinstance(value, (int, float, str, list, type(None)))
    }
    checkpoint_io.save(safe, output)
    try:
        checkpoint_io.load(output, check_config=False)
    except CheckpointError as error:  # some of its states are not plain data
        output.unlink()
        raise CheckpointError(
            f"{checkpoint} has states that a safe file cannot hold; export its weights alone, into a folder"
        ) from error
    return output


def main(arguments: list[str] | None = None) -> None:
    with reporting():
        options = parser().parse_args(arguments)
        register_resolvers()
        flags = options.trust_checkpoint, options.overwrite, options.to_lerobot
        written = convert(options.checkpoint, options.output, *flags)
    evaluate = (
        ("lerobot-eval", f"--policy.path={written}")
        if options.to_lerobot
        else ("python", "eval.py", "--checkpoint", written)
    )
    print(f"written {written}\nnext    {shell_command(*evaluate)}")


if __name__ == "__main__":
    main()
