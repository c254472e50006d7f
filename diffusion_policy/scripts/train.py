"""Train a policy. `train.py` of a checkout and the installed command `idp-train` both start here.

python train.py objective=flow backbone=unet modality=image preset=cpu
python train.py --config-name=train_flow_unet_image training.seed=0,1,2 --multirun

`--help` lists all choices. It imports neither torch nor the workspaces, so it is fast.
"""

from __future__ import annotations

import argparse
import difflib
import os
import pathlib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from diffusion_policy.common.config_util import (
    choices,
    comments,
    config_dir,
    config_names,
    first_config_dir,
    get_class,
    grid,
    groups,
    register_configs,
    register_resolvers,
)
from diffusion_policy.common.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

#: Groups that the help lists, in this order; further ones follow.
LISTED = ("objective", "backbone", "modality", "task", "preset", "ablation", "encoder")
#: Groups that nobody chooses from: values that are chosen automatically.
AUTOMATIC = ("pair",)

HELP = """\
{usage}

A choice that is not given is the default, marked *.

{lists}

options:
  --config-name NAME    a config by name
  --config-dir FOLDER   a folder with your own configs; they are added to those above, or replace them
  --multirun            one run for each of several values: training.seed=0,1,2
  --cfg job             print the config instead of training
  --hydra-help          all options of Hydra, which composes the configs
"""


def described(title: str, files: dict[str, pathlib.Path], default: str | None) -> str:
    """Return one section of the help: a line per file with its first comment."""
    width = max(map(len, files)) + 2
    lines = []
    for name, path in sorted(files.items()):
        first = next(iter(comments(path)), "").lstrip("# ")
        lines.append(f"{'*' if name == default else ' ':>3} {name:<{width}}{first}".rstrip())
    return "\n".join([f"{title}:", *lines])


def help_text(folders: Iterable[pathlib.Path] = ()) -> str:
    """Return the help: the comments of train.yaml (usage, examples), and one line per choice."""
    folders = tuple(folders)
    root = config_dir() / "train.yaml"
    usage = "\n".join(line.removeprefix("#").removeprefix(" ") for line in comments(root))
    defaults = dict(re.findall(r"^  - (\w+): (\w+)", root.read_text(), re.MULTILINE))
    order = [*LISTED, *(group for group in groups() if group not in (*LISTED, *AUTOMATIC))]
    lists = [described(f"{group}=", choices(group, folders), defaults.get(group)) for group in order]
    combinations = grid(folders)
    files = {path.stem: path for path in config_dir().glob("train_*.yaml") if path.stem not in combinations}
    lists.append(described("--config-name= (besides the combinations)", files, None))
    return HELP.format(usage=usage, lists="\n\n".join(lists))


def nearest(kind: str, name: str, known: Iterable[str]) -> str | None:
    """Return a message with the nearest names if `name` is not known."""
    known = sorted(known)
    if name in known:
        return None
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"error: {kind} {name!r} does not exist; " + (
        f"nearest: {', '.join(close)}" if close else "--help lists what there is"
    )


def misspelt(name: str | None, overrides: Sequence[str]) -> str | None:
    """Return a message for the first config name or group choice that does not exist, None if all do."""
    if name is not None and (problem := nearest("config", name.removesuffix(".yaml"), config_names())):
        return problem
    for override in overrides:
        # Sweeps (a,b), packages (group@package) and additions (+group) are left to Hydra.
        match = re.fullmatch(r"(\w+)=([\w-]+)", override)
        known = match and match[1] in groups() and match[2] != "null"
        if match and known and (problem := nearest(match[1], match[2], choices(match[1]))):
            return problem
    return None


def train(cfg: DictConfig) -> None:
    """Run the workspace of a composed config."""
    from omegaconf import OmegaConf

    from diffusion_policy.workspace.base_workspace import BaseWorkspace

    OmegaConf.resolve(cfg)  # now, so that every ${now:...} is the same moment
    try:
        if "_target_" not in cfg:
            raise UserError("the config has no _target_, the workspace to run; --help lists the configs")
        get_class(cfg._target_, BaseWorkspace)(cfg).run()
    except UserError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        sys.exit(f"error: {error}\n(HYDRA_FULL_ERROR=1 shows where)")


def main() -> None:
    """Print the help, or compose the config that the command line describes and train."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-dir", "-cd", type=pathlib.Path)
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--cfg", "-c")  # without it, -c would be an ambiguous prefix; Hydra reads its value
    known, others = parser.parse_known_args()
    folders = [known.config_dir] if known.config_dir else []
    if known.help or len(sys.argv) == 1:
        print(help_text(folders), end="")
        return
    elsewhere = folders or known.config_path or any("hydra.searchpath" in argument for argument in others)
    if not elsewhere and (problem := misspelt(known.config_name, others)):
        print(problem, file=sys.stderr)
        sys.exit(2)

    import hydra

    register_resolvers()
    if not known.config_path:  # another config folder has its own names
        register_configs(folders)
    hydra.main(version_base=None, config_path=str(first_config_dir(folders)), config_name="train")(train)()


if __name__ == "__main__":
    main()
