"""How commands end: one line for an error that a user can fix, exit codes, and commands to paste into a shell."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from typing import NoReturn

from diffusion_policy.common.errors import UserError

#: Exit code after Ctrl-C: 128 and the number of the signal, as in a shell.
STOPPED = 130


def fail(text: str, code: int = 2) -> NoReturn:
    """Print one line on stderr and end the program."""
    print(f"error: {' '.join(text.split())}", file=sys.stderr, flush=True)
    sys.exit(code)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        fail(f"{message}; --help lists the options")


@contextlib.contextmanager
def reporting(stopped: str = "stopped by Ctrl-C") -> Iterator[None]:
    """Turn errors that a user can fix into one line and an exit code; HYDRA_FULL_ERROR=1 shows the traceback."""
    try:
        yield
    except KeyboardInterrupt:
        print(stopped, file=sys.stderr, flush=True)
        sys.exit(STOPPED)
    except UserError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        fail(str(error), error.exit_code)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> list[str]:
    """Return up to three of the known names, the most similar first."""
    return difflib.get_close_matches(name, sorted(known), n=3, cutoff=cutoff)


def shell_command(*words: object) -> str:
    """Return a command line that a shell splits into these words."""
    return shlex.join(map(str, words))


def override(key: str, value: object) -> str:
    """Return key=value for Hydra, with quotes if the value has characters that its grammar does not accept."""
    text = str(value)
    if re.fullmatch(r"[\w/.:@%+-]+", text, re.ASCII):
        return f"{key}={text}"
    # A backslash is special only before a quote and at the end.
    quoted = re.sub(r'(\\*)("|$)', lambda match: 2 * match[1] + ('\\"' if match[2] else ""), text)
    return f'{key}="{quoted}"'
