"""Parquet files in the child process of reader_process: columns of numbers, short texts, and encoded images."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from diffusion_policy.common.errors import DataError

MAX_TEXT_ROWS = 2_000_000


def load() -> None:
    """Import what the questions need, before memory is limited."""
    import pyarrow.parquet  # noqa: F401


def _open(path: str) -> Any:
    import pyarrow.parquet as parquet

    return parquet.ParquetFile(path, memory_map=False, pre_buffer=False, arrow_extensions_enabled=False)


def parquet_columns(path: str) -> Iterator[tuple[dict, dict]]:
    """{rows, columns: {name: type}}."""
    with _open(path) as file:
        schema = file.schema_arrow
        yield {"rows": file.metadata.num_rows, "columns": {field.name: str(field.type) for field in schema}}, {}


def _table(path: str, columns: list[str], start: int, stop: int) -> Any:
    """Rows start..stop; only the row groups that hold them are read."""
    import pyarrow

    with _open(path) as file:
        missing = [name for name in columns if name not in file.schema_arrow.names]
        if missing:
            raise DataError(f"{path} has no column {missing[0]!r}; it has: {', '.join(file.schema_arrow.names)}.")
        if stop > file.metadata.num_rows:
            raise DataError(f"{path} has {file.metadata.num_rows} rows, and {stop} are expected: it was cut short.")
        groups, first, end = [], None, 0
        for number in range(file.metadata.num_row_groups):
            begin, end = end, end + file.metadata.row_group(number).num_rows
            if begin < stop and end > start:
                groups.append(file.read_row_group(number, columns=columns, use_threads=False))
                first = begin if first is None else first
        if not groups:
            raise DataError(f"{path} has no rows {start} to {stop}.")
        table = pyarrow.concat_tables(groups).slice(start - (first or 0), stop - start)
        if table.num_rows != stop - start:
            raise DataError(f"{path} has {table.num_rows} of the rows {start} to {stop}: it is damaged.")
        return table


def parquet_rows(path: str, columns: dict[str, list[int]], start: int, stop: int) -> Iterator[tuple[dict, dict]]:
    """The numbers of some rows: columns is {name: shape of a row}."""
    table = _table(path, list(columns), start, stop)
    yield {}, {name: _numbers(table.column(name), shape, f"{path}: column {name!r}") for name, shape in columns.items()}


def _numbers(column: Any, shape: list[int], where: str) -> Any:
    import numpy as np
    import pyarrow

    array, rows = column.combine_chunks(), len(column)
    while True:
        if array.null_count:
            raise DataError(f"{where} has {array.null_count} empty values.")
        kind = array.type
        if not (pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or hasattr(kind, "list_size")):
            break
        lengths = np.unique(array.value_lengths().to_numpy(zero_copy_only=False))
        if len(lengths) > 1:
            raise DataError(f"{where} holds lists of {lengths[0]} and of {lengths[-1]} numbers: its shape changes.")
        array = array.flatten()
    if not (pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind) or pyarrow.types.is_boolean(kind)):
        raise DataError(f"{where} has the type {kind}: only numbers are read.")
    values = array.to_numpy(zero_copy_only=False)
    if values.size != rows * math.prod(shape):
        raise DataError(
            f"{where} holds {values.size / max(rows, 1):g} numbers per step, but meta/info.json declares the shape "
            f"{tuple(shape)}."
        )
    return np.ascontiguousarray(values).reshape(rows, *shape)


def parquet_texts(path: str, columns: list[str] | None = None) -> Iterator[tuple[dict, dict]]:
    """{rows: {name: list}} of a small table with texts; without `columns`, all but lists of numbers."""
    with _open(path) as file:
        if file.metadata.num_rows > MAX_TEXT_ROWS:
            raise DataError(f"{path} declares {file.metadata.num_rows} rows: too many for metadata.")
        names = [name for name in file.schema_arrow.names if columns is None or name in columns]
        table = file.read(columns=names, use_threads=False)
    yield {"rows": {name: table.column(name).to_pylist() for name in names}}, {}


def parquet_images(
    path: str, column: str, shape: list[int], start: int, stop: int, block: int
) -> Iterator[tuple[dict, dict]]:
    """Images (N, H, W, 3) of encoded ones, {bytes, path} or bytes, `block` of them at a time."""
    from diffusion_policy.storage.images_child import decoded

    for begin in range(start, stop, block):
        end = min(begin + block, stop)
        rows = _table(path, [column], begin, end).column(column).to_pylist()
        encoded = [row["bytes"] if isinstance(row, dict) else row for row in rows]
        if not all(isinstance(each, bytes) for each in encoded):
            raise DataError(f"{path}: column {column!r} refers to image files; only images in the table are read.")
        yield {}, {"frames": decoded(encoded, shape, f"{path}: column {column!r}, row", begin)}
