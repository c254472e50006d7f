"""Config folders, config names, resolvers, and objects built from sections of a config."""

from __future__ import annotations

import ast
import operator
import pathlib
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.errors import InstantiationException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from diffusion_policy.common.errors import ConfigError, UserError
from diffusion_policy.common.memory import available_bytes

if TYPE_CHECKING:  # importing torch takes seconds, which `train.py --help` does not need
    import torch

PACKAGE = pathlib.Path(__file__).resolve().parents[1]
#: A config name is train_<objective>_<backbone>_<modality>: one choice from each of these groups.
GRID = ("objective", "backbone", "modality")
#: A choice whose comment lines contain this one is not combined with all others into config names.
NOT_IN_GRID = "# grid: false"

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
MAX_EXPRESSION = 1000  # characters; parsing and products of long numbers stay cheap
_NAMES = {"None": None, "null": None, "True": True, "true": True, "False": False, "false": False}


def evaluate(expression: Any) -> Any:
    """Compute the `eval` resolver: arithmetic, comparisons, and/or/not, `a if c else b`; numbers and strings.

    Upstream passes the text to Python's eval. A config can come from an untrusted checkpoint, so this
    resolver calls nothing.
    """
    if not isinstance(expression, str):
        return expression
    if len(expression) > MAX_EXPRESSION:
        raise ConfigError(f"${{eval: {expression[:50]} ...}} has more than {MAX_EXPRESSION} characters")

    def visit(node: ast.AST) -> Any:
        match node:
            case ast.Expression():
                return visit(node.body)
            case ast.Constant() if isinstance(node.value, (int, float, str, bool, type(None))):
                return node.value
            case ast.Name() if node.id in _NAMES:
                return _NAMES[node.id]
            case ast.BinOp() if type(node.op) in _OPERATORS:
                left, right = visit(node.left), visit(node.right)
                if not (isinstance(left, (int, float)) and isinstance(right, (int, float))):
                    raise TypeError(f"{left!r} and {right!r} are not both numbers")  # 'a' * 10**9 would fill the memory
                return _OPERATORS[type(node.op)](left, right)
            case ast.UnaryOp() if type(node.op) in _OPERATORS:
                return _OPERATORS[type(node.op)](visit(node.operand))
            case ast.Compare() if len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
                return _OPERATORS[type(node.ops[0])](visit(node.left), visit(node.comparators[0]))
            case ast.BoolOp():
                values = [visit(value) for value in node.values]
                decides = operator.not_ if isinstance(node.op, ast.And) else operator.truth
                return next(filter(decides, values), values[-1])  # an operand, as in Python
            case ast.IfExp():
                return visit(node.body) if visit(node.test) else visit(node.orelse)
            case ast.List() | ast.Tuple():
                return [visit(element) for element in node.elts]
        raise ConfigError(
            f"${{eval: {expression}}}: only arithmetic, comparisons and `a if c else b` are allowed in a config"
        )

    try:
        return visit(ast.parse(expression.strip(), mode="eval"))
    except ConfigError:
        raise
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ConfigError(f"${{eval: {expression}}} cannot be computed: {error}") from error


def project_path(relative: str) -> str:
    """Compute the `project` resolver: a file of the repository, also when the command runs in another folder.

    A path that exists below the current folder has priority, as upstream.
    """
    inside = PACKAGE.parent / relative
    return str(inside) if inside.exists() and not pathlib.Path(relative).exists() else relative


def parallel_runs(gigabytes: float) -> int:
    """Compute the `parallel_runs` resolver: how many runs of this size this machine has cores and memory for."""
    import joblib

    return max(1, min(joblib.cpu_count(), int(available_bytes() / 2**30 / gigabytes)))


def register_resolvers() -> None:
    """Register the resolvers `eval`, `project` and `parallel_runs`."""
    OmegaConf.register_new_resolver("eval", evaluate, replace=True)
    OmegaConf.register_new_resolver("project", project_path, replace=True)
    OmegaConf.register_new_resolver("parallel_runs", parallel_runs, replace=True)


def config_dir() -> pathlib.Path:
    """Return `config/` of a checkout, or its copy inside an installed package."""
    checkout = PACKAGE.parent / "config"
    return checkout if checkout.is_dir() else PACKAGE / "config"


# ---------------------------------------------------------------------- names of configs
def groups() -> list[str]:
    """Names of the config groups that a user chooses from."""
    return sorted(path.name for path in config_dir().iterdir() if path.is_dir() and path.name != "common")


def choices(group: str, folders: Iterable[pathlib.Path] = ()) -> dict[str, pathlib.Path]:
    """Return the files of a config group by name; those of further config folders win over those that ship."""
    files = [path for folder in (config_dir(), *folders) for path in sorted((folder / group).glob("*.yaml"))]
    return {path.stem: path for path in files}


def comments(path: pathlib.Path) -> list[str]:
    """Return the comment lines that a file starts with, without Hydra's package header."""
    lines: list[str] = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @"):
            lines.append(line)
    return lines


def grid(folders: Iterable[pathlib.Path] = ()) -> dict[str, tuple[str, ...]]:
    """Return the config names of the grid, each with its choice from every group of GRID."""
    axes = [
        [name for name, path in sorted(choices(group, folders).items()) if NOT_IN_GRID not in comments(path)]
        for group in GRID
    ]
    return {"_".join(("train", *chosen)): chosen for chosen in product(*axes)}


def config_names(folders: Iterable[pathlib.Path] = ()) -> list[str]:
    """Return every name that `--config-name` accepts: the files in the config folders and the grid."""
    folders = tuple(folders)
    files = {path.stem for folder in (config_dir(), *folders) for path in folder.glob("*.yaml")}
    return sorted(files | set(grid(folders)))


def register_configs(folders: Iterable[pathlib.Path] = ()) -> None:
    """Register the grid in Hydra's ConfigStore, so that every combination has a config name.

    train_flow_unet_image is `train` with objective=flow, backbone=unet and modality=image. The group `run_name`
    gives the same name to `train` when the three are chosen on the command line.

    Args:
        folders: further config folders (`--config-dir`), whose objectives and backbones join the grid.
    """
    folders = tuple(folders)
    store = ConfigStore.instance()
    # Hydra copies the whole store for every composition, and only reads the copy: a third of its time.
    ConfigStore.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
    for chosen in product(*(choices(group, folders) for group in GRID)):
        key = "_".join(chosen)
        store.store(group="run_name", name=key, node={"name": f"train_{key}"}, package="_global_")
    for name, chosen in grid(folders).items():
        # Hydra would check a file against a stored config of the same name.
        if not any((folder / f"{name}.yaml").exists() for folder in (config_dir(), *folders)):
            overrides = [{f"override {group}": choice} for group, choice in zip(GRID, chosen, strict=True)]
            store.store(name=name, node={"defaults": ["train", *overrides, "_self_"], "name": name})


class ShippedConfigs(SearchPathPlugin):
    """Hydra's search path with `config/` after the folder of the user."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="shipped", path=f"file://{config_dir()}")


def first_config_dir(folders: Sequence[pathlib.Path]) -> pathlib.Path:
    """Return the folder in which Hydra looks first: the user's, with ours after it, or else ours.

    Hydra itself puts `--config-dir` last, so that a file of the user could not replace one of ours.
    """
    if not folders:
        return config_dir()
    Plugins.instance().register(ShippedConfigs)
    return folders[0].absolute()


# ---------------------------------------------------------------------- objects from sections
def resolve_device(name: str) -> torch.device:
    """Return the named device; `auto` is cuda, then mps, then cpu.

    Raises:
        ConfigError: this machine does not have the device.
    """
    import torch

    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(str(name))
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} does not exist; use auto, cpu, cuda, cuda:1 or mps") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for but this machine has no CUDA device; use auto or cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"device {name!r} was asked for but this machine has no MPS device; use auto or cpu")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # cuda:7, meta, types without a driver
        raise ConfigError(f"device {name!r} cannot be used on this machine; use auto or cpu") from error
    return device


def section(cfg: DictConfig, name: str) -> DictConfig:
    """Return cfg.<name>, which must be a section."""
    value = OmegaConf.select(cfg, name)
    if not OmegaConf.is_dict(value):
        raise ConfigError(f"{name} must be a section of the config, not {value!r}")
    return value


def build(cfg: DictConfig, name: str, **arguments: Any) -> Any:
    """Build the object that the section cfg.<name> describes.

    Raises:
        UserError: the one that the constructor raised, or a ConfigError with the reason of the failure.
    """
    described = section(cfg, name)
    if "_target_" not in described:
        raise ConfigError(f"{name} has no _target_, the class to build it from")
    try:
        return hydra.utils.instantiate(described, **arguments)
    except (InstantiationException, OmegaConfBaseException, TypeError, ValueError) as error:
        cause: BaseException = error
        while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, (UserError, MemoryError)):
            raise cause from error
        # Our messages explain what to do; others need their type to be understood.
        text = str(cause) if isinstance(cause, (ValueError, TypeError)) else f"{type(cause).__name__}: {cause}"
        raise ConfigError(f"{name} cannot be built: {text}") from error


def get_class(target: Any, base: type) -> type:
    """Return the class with the dotted name `target`, which must be a subclass of `base`."""
    try:
        kind = hydra.utils.get_class(target)
    except (ImportError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"_target_={target!r} is not a class that can be imported: {error}") from error
    if not issubclass(kind, base):
        raise ConfigError(f"_target_={target!r} is not a {base.__name__}")
    return kind
