"""Metrics as JSON lines: one object a line, appended, readable while it is written and after a crash."""

import json
import numbers
import os


class JsonLogger:
    """Appends the numbers of each logged dict to `path`; a context manager.

    filter_fn(key, value) -> bool chooses what is kept, by default the numbers. Reopening a file drops a last line that was
    cut short, so that what follows is not glued to it.
    """

    def __init__(self, path, filter_fn=None):
        self.path = path
        self.filter_fn = filter_fn or (lambda key, value: isinstance(value, numbers.Number))
        self.file = None
        self.last_log = None

    def start(self):
        if os.path.exists(self.path):
            with open(self.path, "rb+") as file:
                complete = file.read().rpartition(b"\n")
                file.truncate(len(complete[0]) + len(complete[1]))
            records = read_json_log(self.path)
            self.last_log = records[-1] if records else None
        self.file = open(self.path, "a", buffering=1)

    def stop(self):
        self.file.close()
        self.file = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exc_info):
        self.stop()

    def log(self, data: dict):
        self.last_log = {key: _plain(value) for key, value in data.items() if self.filter_fn(key, value)}
        self.file.write(json.dumps(self.last_log) + "\n")

    def get_last_log(self) -> dict | None:
        """The last record, also of an earlier run into the same file; None if there is none."""
        return None if self.last_log is None else dict(self.last_log)


def read_json_log(path, required_keys=()) -> list[dict]:
    """The records of a log that have one of `required_keys`, or all of them when none is named.

    A list of dicts: `pandas.DataFrame(read_json_log(path))` is the table. Lines that are not whole records are skipped.
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


def _plain(value):
    """JSON knows neither numpy's numbers nor a difference between True and 1."""
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Number) else value
