"""Ends of commands: one line for an error that a user can fix, exit codes, and commands to paste into a shell."""

from __future__ import annotations

import _thread
import argparse
import contextlib
import difflib
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import NoReturn

from diffusion_policy.common import launch
from diffusion_policy.common.errors import UserError

#: Exit code after Ctrl-C: 128 and the number of the signal, as in a shell.
STOPPED = 130
#: Seconds in which the launcher ends the other ranks, if the main one reports the same error.
SAME_ERROR = 15.0


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
    """Turn errors that a user can fix into one line and an exit code; HYDRA_FULL_ERROR=1 shows the traceback.

    A Ctrl-C that arrives while Python runs a callback, of a weak reference for instance, is not lost: it is sent again.
    """
    hook = sys.unraisablehook

    def again(lost: sys.UnraisableHookArgs) -> None:
        if lost.exc_type is KeyboardInterrupt:
            threading.Timer(0.05, _thread.interrupt_main).start()  # when the callback is over
        else:
            hook(lost)

    sys.unraisablehook = again
    try:
        yield
    except KeyboardInterrupt:
        print(stopped, file=sys.stderr, flush=True)
        sys.exit(STOPPED)
    except UserError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        if rank := launch.rank():
            time.sleep(SAME_ERROR)
            fail(f"rank {rank}: {error}", error.exit_code)
        fail(str(error), error.exit_code)
    finally:
        sys.unraisablehook = hook


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
