"""The config of a file as plain data: limits on its size, and interpolations resolved without OmegaConf.

OmegaConf resolves whatever is registered in the process (`${oc.env:HOME}` is a secret of the reader in a file of the
writer) and copies what is referred to without a limit. Here a reference is a reference, the only resolvers are the two
that configs of this project use, and the work is bounded.
"""

from __future__ import annotations

import re
from typing import Any

from diffusion_policy.common.config_util import evaluate, project_path
from diffusion_policy.common.errors import CheckpointError, ConfigError

#: A config that ships has some 300 values and 9,000 characters.
MAX_VALUES = 20_000  # after interpolations are resolved; what is referred to twice counts twice
MAX_CHARACTERS = 2_000_000  # in names and texts together
MAX_DEPTH = 50
RESOLVERS = {"eval": evaluate, "project": project_path}
_INNERMOST = re.compile(r"\$\{([^${}]*)\}")


def plain_config(cfg: Any, where: str) -> Any:
    """`cfg` as dicts, lists, numbers, texts, booleans and None, with its interpolations resolved.

    Raises:
        CheckpointError: it holds something else, is too large, or has an interpolation that is not allowed.
    """
    try:
        return _Resolver(_Copy().of(cfg)).resolved()
    except (ConfigError, _NotPlainError) as error:
        raise CheckpointError(f"the config in {where} cannot be used: {error}") from error


def plain_data(value: Any, where: str) -> Any:
    """`value` as dicts, lists, numbers, texts, booleans and None, within the limits; raises CheckpointError."""
    try:
        return _Copy().of(value)
    except _NotPlainError as error:
        raise CheckpointError(f"{where} cannot be used: {error}") from error


class _NotPlainError(ValueError):
    pass


class _Budget:
    """Counts values and characters, so that neither a large config nor one that grows when it is resolved is built."""

    def __init__(self) -> None:
        self.values = self.characters = 0

    def spend(self, text: str = "", depth: int = 0) -> None:
        self.values += 1
        self.characters += len(text)
        if self.values > MAX_VALUES or self.characters > MAX_CHARACTERS or depth > MAX_DEPTH:
            raise _NotPlainError(
                f"it is larger than any real one: more than {MAX_VALUES:,} values, {MAX_CHARACTERS:,} characters or "
                f"{MAX_DEPTH} levels"
            )


class _Copy(_Budget):
    """Copies plain data. Objects that are shared or contain themselves, as a pickle can have, run into the limits."""

    def of(self, node: Any, depth: int = 0) -> Any:
        if isinstance(node, dict):
            self.spend(depth=depth)
            return {self._name(name): self.of(child, depth + 1) for name, child in node.items()}
        if isinstance(node, (list, tuple)):
            self.spend(depth=depth)
            return [self.of(child, depth + 1) for child in node]
        self.spend(node if isinstance(node, str) else "", depth)
        if isinstance(node, int) and abs(node) >= 2**63:
            raise _NotPlainError("it holds an integer of more than 64 bits")
        if node is None or isinstance(node, (str, int, float, bool)):
            return node
        raise _NotPlainError(f"it holds a {type(node).__name__}; only numbers, texts, lists and mappings are allowed")

    def _name(self, name: Any) -> Any:
        if not isinstance(name, (str, int, float, bool)):
            raise _NotPlainError(f"it has a key that is a {type(name).__name__}")
        self.spend(str(name)[:1000] if not isinstance(name, str) else name)
        return name


class _Resolver(_Budget):
    """Replaces `${a.b}`, `${.sibling}`, `${eval:...}` and `${project:...}` by their values."""

    def __init__(self, root: Any):
        super().__init__()
        self.root = root
        self.open: set[tuple] = set()  # texts that are being resolved

    def resolved(self) -> Any:
        return self._node(self.root, ())

    def _node(self, node: Any, path: tuple) -> Any:
        self.spend(node if isinstance(node, str) else "", len(path))
        if isinstance(node, dict):
            return {name: self._node(child, (*path, name)) for name, child in node.items()}
        if isinstance(node, list):
            return [self._node(child, (*path, number)) for number, child in enumerate(node)]
        return self._text(node, path) if isinstance(node, str) and "${" in node else node

    def _text(self, text: str, path: tuple) -> Any:
        place = ".".join(map(str, path))
        if path in self.open:
            raise _NotPlainError(f"{place} refers to itself")
        if "\\${" in text:
            raise _NotPlainError(f"{place} hides an interpolation: {text[:100]!r}")
        self.open.add(path)
        while found := _INNERMOST.search(text):
            value = self._value(found[1], path, place)
            if found.span() == (0, len(text)):
                text = value
                break
            if isinstance(value, (dict, list)):
                raise _NotPlainError(f"{place} inserts a section into a text: {text[:100]!r}")
            text = text[: found.start()] + str(value) + text[found.end() :]
            self.spend(text, len(self.open))
        self.open.discard(path)
        if isinstance(text, str) and "${" in text:
            raise _NotPlainError(f"{place} has an interpolation that cannot be read: {text[:100]!r}")
        return text

    def _value(self, body: str, path: tuple, place: str) -> Any:
        """Compute what stands between `${` and `}`."""
        name, colon, argument = body.partition(":")
        if colon:
            if name.strip() not in RESOLVERS:
                raise _NotPlainError(
                    f"{place} uses the resolver {name.strip()[:50]!r}, and a file may use only {', '.join(RESOLVERS)}"
                )
            argument = argument.strip()
            quoted = len(argument) > 1 and argument[0] == argument[-1] and argument[0] in "'\""
            return RESOLVERS[name.strip()](argument[1:-1] if quoted else argument)
        reference = body.strip()
        relative = len(reference) - len(reference.lstrip("."))  # ${.x} is beside this value, ${..x} one level up
        parts = re.sub(r"\[(\w+)\]", r".\1", reference).strip(".").split(".")
        target, node = (*path[: len(path) - relative], *parts) if relative else tuple(parts), self.root
        real: list[Any] = []
        for part in target:
            key: Any = int(part) if isinstance(node, list) and str(part).isdecimal() else part
            try:
                node = node[key]
            except (KeyError, IndexError, TypeError):
                raise _NotPlainError(f"{place} refers to {reference[:100]!r}, which is not there") from None
            real.append(key)
        return self._node(node, tuple(real))
