"""Metrics as JSON lines: one object per line, appended, readable during a run and after a crash."""

from __future__ import annotations

import json
import numbers
import os
from collections.abc import Callable, Sequence
from typing import IO, Any


class JsonLogger:
    """Appends the numbers of each logged dict to `path`; a context manager.

    filter_fn(key, value) -> bool selects entries; the default keeps numbers. Reopening a file drops an incomplete last
    line, so that the next record starts on a new one.
    """

    def __init__(self, path: str | os.PathLike, filter_fn: Callable[[str, Any], bool] | None = None):
        self.path = path
        self.filter_fn = filter_fn or (lambda key, value: isinstance(value, numbers.Number))
        self.file: IO[str] | None = None
        self.last_log: dict[str, Any] | None = None

    def start(self) -> None:
        if os.path.exists(self.path):
            with open(self.path, "rb+") as file:
                complete = file.read().rpartition(b"\n")
                file.truncate(len(complete[0]) + len(complete[1]))
            records = read_json_log(self.path)
            self.last_log = records[-1] if records else None
        self.file = open(self.path, "a", buffering=1)  # noqa: SIM115 (closed by stop)

    def stop(self) -> None:
        if self.file is not None:
            self.file.close()
        self.file = None

    def __enter__(self) -> JsonLogger:
        self.start()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.stop()

    def log(self, data: dict[str, Any]) -> None:
        """Append a record; the logger must be started."""
        if self.file is None:
            raise RuntimeError("the logger is not started: use it as a context manager")
        self.last_log = {key: _plain(value) for key, value in data.items() if self.filter_fn(key, value)}
        self.file.write(json.dumps(self.last_log) + "\n")

    def get_last_log(self) -> dict | None:
        """The last record, possibly of an earlier run into the same file; None if the file is empty."""
        return None if self.last_log is None else dict(self.last_log)


def read_json_log(path: str | os.PathLike, required_keys: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The records of a log that have one of `required_keys`, or all records if no key is given.

    `pandas.DataFrame(read_json_log(path))` is the table. Incomplete lines are skipped.
    """
    records = []
    with open(path) as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if not required_keys or any(key in record for key in required_keys):
                records.append(record)
    return records


def _plain(value: Any) -> Any:
    """Numbers of numpy, and bools, as int and float: upstream writes them so."""
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value
