"""Errors that a user can fix. Each message tells what is wrong and what to do.

`train.py` and `eval.py` print them as one paragraph, without a traceback.
"""


class UserError(Exception):
    """Base class of the errors below."""


class ConfigError(UserError, ValueError):
    """An invalid configuration: an unknown key, a bad value, sizes that do not fit."""


class DataError(UserError, ValueError):
    """An unusable dataset: truncated, of the wrong shape, not finite."""


class DataNotFoundError(DataError, FileNotFoundError):
    """A missing dataset; the message tells how to get it."""


class CheckpointError(UserError, RuntimeError):
    """An unusable checkpoint: truncated, of another architecture, not trusted."""


class DivergedError(UserError, FloatingPointError):
    """A training run with a non-finite loss or gradient."""


class StorageError(UserError, OSError):
    """A failed write: no space, no permission, a broken device."""


class EvaluationError(UserError, RuntimeError):
    """An evaluation in which not all episodes could be played."""
