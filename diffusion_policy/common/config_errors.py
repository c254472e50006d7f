"""One clear line for the errors of Hydra and OmegaConf, which compose the configs."""

from __future__ import annotations

from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from diffusion_policy.common.command_line import nearest, override, shell_command
from diffusion_policy.common.config_util import groups
from diffusion_policy.common.errors import UserError

#: What composing a config can raise. Hydra raises plain ValueError for some overrides, such as task=null.
COMPOSING = (HydraException, OmegaConfBaseException)


def explain(error: BaseException) -> str:
    """Return what is wrong with the config or the overrides, and what to do."""
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    for cause in reversed(causes):
        match cause:
            case UserError():
                place = getattr(error, "full_key", None)
                return f"{place}: {cause}" if place else str(cause)
            case OverrideParseException():
                return unreadable(cause.override)
            case InterpolationKeyError():
                return f"{cause}; does the task fit the config?"
            case ConfigAttributeError() | ConfigKeyError() if cause.parent_node is not None:
                return unknown(str(cause.full_key), [str(key) for key in cause.parent_node])
            case MissingMandatoryValue():
                return f"{cause.full_key} has no value (???): give one, {cause.full_key}=..."
    return str(error).removesuffix("See https://hydra.cc/docs/1.2/advanced/override_grammar/basic for details")


def unknown(key: str, siblings: list[str]) -> str:
    """Return the message for a setting that does not exist, with the nearest ones that do."""
    parent, _, name = key.rpartition(".")
    known = siblings if parent else [*siblings, *groups()]
    close = [f"{parent}.{other}" if parent else other for other in nearest(name, known)]
    hint = f"nearest: {', '.join(close)}" if close else f"{parent or 'it'} has: {', '.join(sorted(known))}"
    return f"{key} is not a setting of this config; {hint} (+{key}=... adds it)"


def unreadable(text: str) -> str:
    """Return the message for an argument that Hydra cannot read."""
    key, equals, value = text.partition("=")
    if not equals:
        return f"{text!r} is not key=value; --help shows examples"
    return f"{text!r} cannot be read; write it with quotes: {shell_command(override(key, value))}"
