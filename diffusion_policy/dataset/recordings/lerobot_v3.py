"""LeRobotDataset v3: many episodes in a parquet file or a video."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from diffusion_policy.common.errors import DataError, DataNotFoundError
from diffusion_policy.dataset.recordings.lerobot import MAX_METADATA_BYTES, LeRobotRecordings, inside
from diffusion_policy.dataset.recordings.lerobot_features import whole_number

METADATA_MEMORY = 2e9


class LeRobotV3Recordings(LeRobotRecordings):
    """Episodes are those of meta/episodes; an episode is a range of rows and a range of seconds of its files."""

    def _find_episodes(self) -> None:
        tables = sorted((self.path / "meta" / "episodes").glob("*/*.parquet"))
        if not tables:
            raise DataError(f"{self.path} has no tables in meta/episodes: its recording was not finished.")
        rows = [row for table in tables for row in self._table(table)]
        firsts: dict[tuple[int, int], int] = {}
        for row in rows:
            start = _whole(row, "dataset_from_index", tables[0])
            place = _place(row, "data", tables[0])
            firsts[place] = min(start, firsts.get(place, start))
        numbers: dict[str, int] = {}
        for row in rows:
            with self._leaving_out():
                self._add_row(row, firsts, numbers, tables[0])
        self.tasks = list(numbers)
        with self._leaving_out():
            expected = self.info.get("total_episodes", len(rows))
            if expected != len(rows):
                raise DataError(
                    f"{tables[0].parent.parent} lists {len(rows)} episodes, but meta/info.json {str(expected)[:20]}: "
                    "the recording was not finished, or some of it is missing."
                )

    def _table(self, file: Path) -> list[dict[str, Any]]:
        inside(self.path, str(file.relative_to(self.path)), file)
        if not file.is_file() or file.stat().st_size > MAX_METADATA_BYTES:
            raise DataError(f"{file} is not a file, or too large for metadata.")
        videos = [f"videos/{key}" for key in self.cameras if key not in self.in_table]
        columns = ["episode_index", "tasks", "length", "dataset_from_index", "dataset_to_index"]
        columns += [f"{place}/{part}" for place in ("data", *videos) for part in ("chunk_index", "file_index")]
        columns += [f"{place}/{end}_timestamp" for place in videos for end in ("from", "to")]
        facts, _ = self.pool.ask_once("parquet_texts", file, columns=columns, memory=METADATA_MEMORY)
        missing = [name for name in columns if name not in facts["rows"] and name != "tasks"]
        if missing:
            raise DataError(f"{file} has no column {missing[0]!r}: its recording was not finished, or it is damaged.")
        names = list(facts["rows"])
        return [dict(zip(names, values)) for values in zip(*facts["rows"].values())]

    def _add_row(self, row: dict[str, Any], firsts: Mapping, numbers: dict[str, int], table: Path) -> None:
        number = _whole(row, "episode_index", table)
        start, stop = (_whole(row, f"dataset_{end}_index", table) for end in ("from", "to"))
        if stop <= start or stop - start != row.get("length"):
            raise DataError(
                f"{table}: episode {number} has rows {start} to {stop}, but the length {row.get('length')}."
            )
        chunk, file_index = _place(row, "data", table)
        file = self._file("data_path", chunk_index=chunk, file_index=file_index)
        if not file.is_file():
            raise DataNotFoundError(f"episode {number}: there is no {file}.")
        tasks = row.get("tasks")
        task = str(tasks[0]) if isinstance(tasks, list) and tasks else ""
        offset = start - firsts[chunk, file_index]
        row = {**row, "file": file, "offset": offset}
        name = f"episode {number} ({self._relative(file)})"
        self._add(name, stop - start, row, numbers.setdefault(task, len(numbers)))

    def _rows(self, index: int) -> tuple[Path, int, int]:
        row = self.places[index]
        return row["file"], row["offset"], row["offset"] + self.lengths[index]

    def _columns(self, index: int, columns: Mapping[str, list[int]]) -> dict[str, np.ndarray]:
        arrays = super()._columns(index, {**columns, "episode_index": []})
        if (arrays.pop("episode_index") != self.places[index]["episode_index"]).any():
            raise DataError("its rows belong to another episode: the data do not match meta/episodes.")
        return arrays

    def _video(self, index: int, camera: str) -> tuple[Path, float]:
        chunk, file_index = _place(self.places[index], f"videos/{camera}", self.where)
        file = self._file("video_path", video_key=camera, chunk_index=chunk, file_index=file_index)
        return file, self._seconds(index, camera, "from")

    def _seconds(self, index: int, camera: str, end: str) -> float:
        value = self.places[index][f"videos/{camera}/{end}_timestamp"]
        if not isinstance(value, (int, float)) or not 0 <= value < 1e9:
            raise DataError(f"its video of {camera} goes {end} {str(value)[:20]} s.")
        return float(value)

    def frame_count(self, index: int, camera: str) -> int | None:
        """The number of frames between the times that meta/episodes declares."""
        if camera in self.in_table or not self.fps:
            return None
        return round((self._seconds(index, camera, "to") - self._seconds(index, camera, "from")) * self.fps)


def _whole(row: Mapping[str, Any], key: str, where: Path) -> int:
    return whole_number(row.get(key), key, where)


def _place(row: Mapping[str, Any], prefix: str, where: Path) -> tuple[int, int]:
    return _whole(row, f"{prefix}/chunk_index", where), _whole(row, f"{prefix}/file_index", where)
