"""Where configurations live, and the resolvers they use."""

from __future__ import annotations

import ast
import operator
import pathlib
from typing import Any

import hydra
import torch
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from diffusion_policy.common.errors import ConfigError, UserError

PACKAGE = pathlib.Path(__file__).resolve().parents[1]

_OPERATORS = {
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
_NAMES = {"None": None, "null": None, "True": True, "true": True, "False": False, "false": False}


def evaluate(expression: Any) -> Any:
    """The `eval` resolver of configs: arithmetic, comparisons, and/or/not, `a if c else b`; numbers and strings.

    Upstream hands the text to Python's eval. A config can come from a stranger inside a checkpoint, so here nothing can be called.
    """
    if not isinstance(expression, str):
        return expression

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
                return all(values) if isinstance(node.op, ast.And) else any(values)
            case ast.IfExp():
                return visit(node.body) if visit(node.test) else visit(node.orelse)
            case ast.List() | ast.Tuple():
                return [visit(element) for element in node.elts]
        raise ConfigError(
            f"${{eval: {expression}}}: only arithmetic, comparisons and `a if c else b` are allowed in a config"
        )

    try:
        return visit(ast.parse(expression.strip(), mode="eval"))
    except (SyntaxError, TypeError, ZeroDivisionError, RecursionError) as error:
        raise ConfigError(f"${{eval: {expression}}} cannot be computed: {error}") from error


def project_path(relative: str) -> str:
    """The `project` resolver: a file of the repository, also when the command is run from elsewhere.

    A path that exists below the current folder wins, as it does upstream.
    """
    inside = PACKAGE.parent / relative
    return str(inside) if inside.exists() and not pathlib.Path(relative).exists() else relative


def register_resolvers() -> None:
    OmegaConf.register_new_resolver("eval", evaluate, replace=True)
    OmegaConf.register_new_resolver("project", project_path, replace=True)


def config_dir() -> pathlib.Path:
    """`config/` of a checkout, or the copy inside an installed package."""
    checkout = PACKAGE.parent / "config"
    return checkout if checkout.is_dir() else PACKAGE / "config"


def resolve_device(name: str) -> torch.device:
    """`auto` is cuda, then mps, then cpu; a named device that is not there is an error."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device {name!r} is not known to torch: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for but this machine has no CUDA device; use auto or cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"device {name!r} was asked for but this machine has no MPS device; use auto or cpu")
    return device


# ---------------------------------------------------------------------- objects from sections
def section(cfg: DictConfig, name: str) -> DictConfig:
    """cfg.<name>, which must be a section."""
    value = OmegaConf.select(cfg, name)
    if not OmegaConf.is_dict(value):
        raise ConfigError(f"{name} must be a section of the config, not {value!r}")
    return value


def build(cfg: DictConfig, name: str, **arguments: Any) -> Any:
    """The object that the section cfg.<name> describes; raises the UserError that its maker raised, or a ConfigError that says what failed."""
    described = section(cfg, name)
    if "_target_" not in described:
        raise ConfigError(f"{name} has no _target_, the class to build it from")
    try:
        return hydra.utils.instantiate(described, **arguments)
    except InstantiationException as error:
        cause: BaseException = error
        while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, (UserError, MemoryError)):
            raise cause from error
        # Messages of our own say what to do; others need their type to be understood.
        text = str(cause) if isinstance(cause, (ValueError, TypeError)) else f"{type(cause).__name__}: {cause}"
        raise ConfigError(f"{name} cannot be built: {text}") from error


def get_class(target: Any, base: type) -> type:
    """The class with the dotted name `target`, which must be a `base`."""
    try:
        kind = hydra.utils.get_class(target)
    except (ImportError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"_target_={target!r} is not a class that can be imported: {error}") from error
    if not issubclass(kind, base):
        raise ConfigError(f"_target_={target!r} is not a {base.__name__}")
    return kind
