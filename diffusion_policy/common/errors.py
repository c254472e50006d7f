"""Errors that are the user's to fix: each message says what is wrong and what to do about it.

`train.py` and `eval.py` print them as one paragraph, without a traceback.
"""


class UserError(Exception):
    """Base of every error below."""


class ConfigError(UserError, ValueError):
    """A configuration that cannot work: an unknown key, a bad value, sizes that do not fit."""


class DataError(UserError, ValueError):
    """A dataset that cannot be used: truncated, misshapen, not finite."""


class DataNotFoundError(DataError, FileNotFoundError):
    """A dataset that is not there; the message says where it comes from and how to get it."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be used: truncated, of another architecture, not trusted."""


class DivergedError(UserError, FloatingPointError):
    """A training whose loss or gradient is no longer finite."""


class StorageError(UserError, OSError):
    """A file that could not be written: no space, no permission, a device that fails."""


class EvaluationError(UserError, RuntimeError):
    """An evaluation that did not play all of its episodes."""
