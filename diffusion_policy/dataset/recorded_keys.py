"""Which arrays and cameras of a recording a policy observes, and their names in the policy."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from diffusion_policy.common.command_line import nearest
from diffusion_policy.common.errors import ConfigError
from diffusion_policy.dataset.recordings import Recordings

PREFIX = re.compile(r"^observations?[./](images[./])?")


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """{key: name in the policy}: observation.images.front is 'front', unless two keys would share a name.

    A name has neither dots nor slashes: it becomes part of the names of weights.
    """
    for pattern in (PREFIX, re.compile("^$")):
        names = {key: re.sub(r"[^\w-]+", "_", pattern.sub("", key)) for key in keys}
        if len({*names.values(), "action"}) == len(keys) + 1:
            return names
    raise ConfigError(f"these keys cannot be observed together, they have the same names: {', '.join(keys)}")


def find_keys(setting: str, asked: Sequence[str], known: Collection[str]) -> list[str]:
    """The keys that `asked` names, in full or by their short names; ConfigError lists those there are."""
    by_name = {PREFIX.sub("", key): key for key in known} | {key: key for key in known}
    names = [name if name in by_name else PREFIX.sub("", str(name)) for name in asked]
    for name in names:
        if name not in by_name:
            close = nearest(name, by_name)
            hint = f"nearest: {', '.join(close)}; " if close else ""
            raise ConfigError(
                f"{setting}: the recording has no {name!r}; {hint}there are: {', '.join(sorted(known)) or 'none'}"
            )
    return [by_name[name] for name in names]


def observed_keys(recordings: Recordings, asked: Sequence[str] | None) -> list[str]:
    """The arrays to observe: those that `task.obs_keys` names, or those that are observations by their names."""
    if asked is not None and (isinstance(asked, str) or not asked):
        raise ConfigError(f"task.obs_keys={asked!r} must be a list with at least one key, such as [state]")
    keys = recordings.obs_keys if asked is None else find_keys("task.obs_keys", asked, recordings.features)
    if not keys:
        raise ConfigError(f"no array looks like an observation: choose task.obs_keys from {_listed(recordings)}")
    return keys


def action_key(recordings: Recordings, asked: str | None) -> str:
    """The array of the actions."""
    key = recordings.action_key if asked is None else find_keys("task.action_key", [asked], recordings.features)[0]
    if key is None:
        raise ConfigError(f"no array is called action: choose task.action_key from {_listed(recordings)}")
    return key


def _listed(recordings: Recordings) -> str:
    return ", ".join(f"{key} {feature.shape}" for key, feature in recordings.features.items()) or "none"
