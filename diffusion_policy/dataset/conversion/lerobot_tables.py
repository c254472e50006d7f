"""The parquet files of a LeRobotDataset v3."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FILE_BYTES = 100e6
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
EPISODES_PATH = "meta/episodes/chunk-000/file-000.parquet"


class DataWriter:
    """The numbers: one row group per episode, several episodes in a file until it is large enough."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.steps, self.bytes, self.number = 0, 0, -1
        self.file: Any = None

    def add(self, columns: Mapping[str, np.ndarray]) -> dict[str, int]:
        """Write the numbers of an episode, and return where they are."""
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table({key: arrow_column(values) for key, values in columns.items()})
        if self.file is None or self.bytes > FILE_BYTES:
            self.close()
            self.number, self.bytes = self.number + 1, 0
            path = self.folder / DATA_PATH.format(chunk_index=0, file_index=self.number)
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = pyarrow.parquet.ParquetWriter(path, table.schema)
        self.file.write_table(table, row_group_size=max(table.num_rows, 1))
        self.bytes += table.nbytes
        start, self.steps = self.steps, self.steps + table.num_rows
        place = {"data/chunk_index": 0, "data/file_index": self.number}
        return {**place, "dataset_from_index": start, "dataset_to_index": self.steps}

    def close(self) -> None:
        """Finish the last file."""
        if self.file is not None:
            self.file.close()
            self.file = None


def arrow_column(values: np.ndarray) -> Any:
    """(T,) and (T, 1) as numbers, (T, N) as lists of fixed length, more dimensions as lists of lists."""
    import pyarrow

    values = values[:, 0] if values.shape[1:] == (1,) else values
    column = pyarrow.array(np.ascontiguousarray(values).reshape(-1))
    if values.ndim == 2:
        return pyarrow.FixedSizeListArray.from_arrays(column, values.shape[1])
    for length in reversed(values.shape[1:]):
        column = pyarrow.ListArray.from_arrays(np.arange(0, len(column) + 1, length, dtype=np.int32), column)
    return column


def write_tasks(folder: Path, tasks: Sequence[str]) -> None:
    """meta/tasks.parquet: a table of pandas whose index is the text of the task."""
    import pyarrow
    import pyarrow.parquet

    kinds = {"task_index": ("int64", "int64"), "task": ("unicode", "object")}
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": dtype, "metadata": None}
        for name, (kind, dtype) in kinds.items()
    ]
    metadata = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.2.3"}
    table = pyarrow.table({"task_index": np.arange(len(tasks)), "task": list(tasks)})
    (folder / "meta").mkdir(exist_ok=True)
    pyarrow.parquet.write_table(
        table.replace_schema_metadata({"pandas": json.dumps(metadata)}), folder / "meta/tasks.parquet"
    )


def write_episodes(folder: Path, rows: Sequence[Mapping[str, Any]], stats: Sequence[Mapping[str, Any]]) -> None:
    """meta/episodes: where the steps and frames of each episode are, and its statistics."""
    import pyarrow
    import pyarrow.parquet

    columns: dict[str, list] = {key: [row[key] for row in rows] for key in rows[0]}
    for key, values in stats[0].items():
        for name in values:
            columns[f"stats/{key}/{name}"] = [episode[key][name].tolist() for episode in stats]
    for part in ("chunk_index", "file_index"):
        columns[f"meta/episodes/{part}"] = [0] * len(rows)
    path = folder / EPISODES_PATH
    path.parent.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
