"""Errors that a user can fix. Each message says what is wrong and what to do.

The commands print them as one line, without a traceback (`command_line.reporting`).
"""


class UserError(Exception):
    """Base class of the errors below."""

    exit_code = 2
    """Of a command that ends with this error: 2 if the command or its files are wrong, 1 if the work failed."""


class ConfigError(UserError, ValueError):
    """An invalid configuration: an unknown key, a bad value, sizes that do not fit."""


class DataError(UserError, ValueError):
    """An unusable dataset: truncated, of the wrong shape, not finite."""


class DataNotFoundError(DataError, FileNotFoundError):
    """A missing dataset; the message says how to get it."""


class CheckpointError(UserError, RuntimeError):
    """An unusable checkpoint: truncated, of another architecture, not trusted."""


class DivergedError(UserError, FloatingPointError):
    """A training run with a non-finite loss or gradient."""

    exit_code = 1


class StorageError(UserError, OSError):
    """A failed write: no space, no permission, a broken device."""

    exit_code = 1


class EvaluationError(UserError, RuntimeError):
    """An evaluation in which not all episodes could be played."""

    exit_code = 1


class SweepError(UserError, RuntimeError):
    """A sweep whose launcher failed."""

    exit_code = 1
