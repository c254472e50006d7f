"""Train a policy. `train.py` of a checkout and the installed command `idp-train` both start here.

python train.py objective=flow backbone=unet modality=image preset=cpu
python train.py --config-name=train_flow_unet_image training.seed=0,1,2 --multirun
torchrun --nproc-per-node=2 train.py --config-name=train_idp_transformer_lowdim

`--help` lists all choices. It imports neither torch nor the workspaces, so it is fast.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import os
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from diffusion_policy.common import launch
from diffusion_policy.common.command_line import nearest, reporting
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
from diffusion_policy.common.errors import ConfigError, SweepError, UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

#: Groups that the help lists, in this order; further ones follow.
LISTED = ("objective", "backbone", "modality", "task", "preset", "optimizer", "ablation", "encoder", "launcher")
#: Groups without a user's choice: their values are chosen automatically.
AUTOMATIC = ("pair",)

HELP = """\
{usage}

A choice that is not given is the default, marked *.

{lists}

options:
  --config-name NAME    a config by name
  --config-dir FOLDER   a folder with your own configs; they are added to those above, or replace them
  --multirun            one run for each of several values: training.seed=0,1,2; launcher= says how they are started
  --cfg job             print the config instead of training
  --hydra-help          all options of Hydra, which composes the configs

HYDRA_FULL_ERROR=1 in the environment shows the traceback of an error.
"""
#: Packages that launchers of a sweep need, and their modules.
LAUNCHERS = {
    "local": ("hydra-joblib-launcher", "hydra_plugins.hydra_joblib_launcher"),
    "slurm": ("hydra-submitit-launcher", "hydra_plugins.hydra_submitit_launcher"),
    "submitit": ("hydra-submitit-launcher", "hydra_plugins.hydra_submitit_launcher"),
}
#: Options of Hydra that take a value, besides those that are read here, and those that take none.
WITH_VALUE = ("--cfg", "-c", "--package", "-p", "--shell-completion", "-sc", "--experimental-rerun", "--info", "-i")
ALONE = ("--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m")


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


def check_choice(kind: str, name: str, known: Iterable[str]) -> None:
    """Raise ConfigError with the nearest names if `name` is not known."""
    known = set(known)
    if name not in known:
        close = nearest(name, known)
        hint = f"nearest: {', '.join(close)}" if close else f"there are: {', '.join(sorted(known))}"
        raise ConfigError(f"{kind} {name!r} does not exist; {hint if len(hint) < 300 else '--help lists all'}")


def check_arguments(name: str | None, others: Sequence[str], folders: Sequence[pathlib.Path]) -> None:
    """Raise ConfigError for the first option, config name or choice of a group that does not exist."""
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {folder} is not a folder")
    if name is not None:
        check_choice("config", name.removesuffix(".yaml"), config_names(folders))
    for argument in others:
        if argument.startswith("-"):
            option = argument.partition("=")[0]
            if option not in ALONE:
                close = nearest(option, [*ALONE, "--config-name", "--config-dir", "--config-path", "--cfg", "--help"])
                hint = f"did you mean {close[0]}?" if close else "settings are written key=value, without dashes"
                raise ConfigError(f"{option} is not an option; {hint}")
        elif argument in config_names(folders):
            raise ConfigError(f"{argument!r} is not key=value; did you mean --config-name={argument}?")
        # Packages (group@package) and additions (+group) are left to Hydra.
        match = re.fullmatch(r"(\w+)=([\w,-]+)", argument)
        if match and match[1] in groups():
            for choice in match[2].split(","):
                check_choice(match[1], choice, choices(match[1], folders))


def check_launcher(arguments: Sequence[str]) -> None:
    """Raise ConfigError if this machine cannot use the launcher that is chosen, or nothing is launched."""
    name = dict(argument.split("=", 1) for argument in arguments if "=" in argument).get("launcher")
    if name not in LAUNCHERS:
        return
    package, module = LAUNCHERS[name]
    if not {"--multirun", "-m"} & set(arguments):
        raise ConfigError(f"launcher={name} starts the runs of a sweep: add --multirun")
    if not installed(module):
        raise ConfigError(f'launcher={name} needs {package}, which is not installed: pip install -e ".[dist]"')
    if name == "slurm" and shutil.which("srun") is None:
        raise ConfigError(
            "launcher=slurm: there is no Slurm on this machine (no srun); launcher=submitit tries a sweep without it"
        )


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package around it
        return False


def train(cfg: DictConfig) -> Any:
    """Run the workspace of a composed config; returns its summary."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    from diffusion_policy.workspace.base_workspace import BaseWorkspace
    from diffusion_policy.workspace.outlook import announce_preset
    from diffusion_policy.workspace.settings import check_numbers, check_task

    if name := OmegaConf.select(cfg, "task.from_data"):  # a function that reads sizes from the data
        import hydra

        hydra.utils.get_method(name)(cfg)
    check_task(cfg)
    check_numbers(cfg)
    OmegaConf.resolve(cfg)  # now, so that every ${now:...} is the same moment
    if "_target_" not in cfg:
        raise ConfigError("the config has no _target_, the workspace to run; --help lists the configs")
    announce_preset(cfg)
    workspace = get_class(cfg._target_, BaseWorkspace)(cfg)
    if HydraConfig.get().mode is not RunMode.MULTIRUN:  # members of a sweep end before the process does
        gc.freeze()  # what the imports created stays: later collections need not look at it
    gc.enable()
    return workspace.run()


def with_cameras(arguments: Sequence[str], name: str | None) -> list[str]:
    """The arguments, with the image variant of the config if they choose cameras (task.cameras=[...]).

    The modality decides which encoder and workspace are composed, so it cannot follow from a value of the config.
    """
    chosen = any(re.fullmatch(r"task\.cameras=(?!(null|\[\s*\])?$).*", argument) for argument in arguments)
    if not chosen or any(argument.startswith("modality=") for argument in arguments):
        return list(arguments)
    if name is None:
        return [*arguments, "modality=image"]
    image = name.replace("lowdim", "image")
    if image == name or image not in config_names():
        return list(arguments)
    return [argument.replace(name, image) if argument.endswith(name) else argument for argument in arguments]


def main() -> None:
    """Print the help, or compose the config that the command line describes and train."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-dir", "-cd", type=pathlib.Path)
    parser.add_argument("--config-path", "-cp")
    for option in WITH_VALUE:
        parser.add_argument(option, nargs="?")
    known, others = parser.parse_known_args()
    folders = [known.config_dir] if known.config_dir else []
    if known.help or len(sys.argv) == 1:
        print(help_text(folders), end="")
        return
    gc.disable()  # imports create many objects and no garbage: until the workspace is built, it is a fifth of the time
    with reporting():
        # Other folders have names that are not known here.
        if not known.config_path and not any("hydra.searchpath" in argument for argument in others):
            check_arguments(known.config_name, others, folders)
        if not (known.cfg or known.c):
            check_launcher(others)
        register_resolvers()
        if not known.config_path:
            sys.argv[1:] = with_cameras(sys.argv[1:], known.config_name)
            register_configs(folders)
        with main_rank_reports():
            compose_and_train(first_config_dir(folders))


@contextlib.contextmanager
def main_rank_reports() -> Iterator[None]:
    """Let only the main one of several ranks print and write a run folder; errors are printed by all."""
    with contextlib.ExitStack() as stack:
        if launch.rank():
            unused = stack.enter_context(tempfile.TemporaryDirectory())
            sys.argv += [f"hydra.run.dir={unused}", f"hydra.sweep.dir={unused}", "hydra/job_logging=disabled"]
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        yield
    if launch.world_size() > 1:
        from diffusion_policy.workspace.distributed import disconnect

        disconnect()


def compose_and_train(folder: pathlib.Path) -> None:
    """Let Hydra read the command line, compose the config and call `train`, once or for each member of a sweep."""
    import hydra

    from diffusion_policy.common.config_errors import COMPOSING, explain
    from diffusion_policy.workspace.sweep import Sweep

    # Hydra's parser accepts settings in one place only: they go last.
    settings = [argument for argument in sys.argv[1:] if "=" in argument and not argument.startswith("-")]
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument not in settings] + settings
    sweep = Sweep()
    try:
        with environment("HYDRA_FULL_ERROR", "1"):  # errors are raised, not printed on many lines
            hydra.main(version_base=None, config_path=str(folder), config_name="train")(sweep.member(train))()
            if sweep.error is not None:
                raise sweep.error
    except COMPOSING as error:
        raise ConfigError(explain(error)) from error
    except (OSError, ValueError) as error:
        cause = error.__cause__ if isinstance(error, ValueError) else error  # logging wraps it in a ValueError
        if sweep.started or not isinstance(cause, OSError):
            raise
        raise ConfigError(
            f"the run folder cannot be written: {cause.strerror} ({cause.filename}); choose another hydra.run.dir"
        ) from error
    except Exception as error:
        if Sweep.folder is None or isinstance(error, UserError):
            raise
        raise SweepError(f"the launcher failed: {error!r:.300}; the table has the runs that ended") from error
    finally:
        sweep.collect()
        if sweep.members:
            print(sweep.table(), flush=True)
    if sweep.failures:
        sys.exit(1)


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable inside the context."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


if __name__ == "__main__":
    main()
