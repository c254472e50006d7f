"""LeRobotDataset v2.0 and v2.1: a parquet file and a video per camera for each episode."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diffusion_policy.common.errors import DataError, DataNotFoundError
from diffusion_policy.dataset.recordings.lerobot import MAX_METADATA_BYTES, LeRobotRecordings
from diffusion_policy.dataset.recordings.lerobot_features import whole_number


class LeRobotV2Recordings(LeRobotRecordings):
    """Episodes are those of meta/episodes.jsonl."""

    def _find_episodes(self) -> None:
        file = self.path / "meta" / "episodes.jsonl"
        self.chunks_size = whole_number(self.info.get("chunks_size", 1000), "chunks_size", self.where) or 1000
        numbers: dict[str, int] = {}
        found = 0
        for line in read_lines(file):
            found += 1
            with self._leaving_out():
                number = whole_number(line.get("episode_index"), "episode_index", file)
                length = whole_number(line.get("length"), f"the length of episode {number}", file)
                tasks = line.get("tasks")
                task = str(tasks[0]) if isinstance(tasks, list) and tasks else ""
                table = self._file("data_path", **self._values(number))
                if not length or not table.is_file():
                    raise DataNotFoundError(f"episode {number}: there is no {table}: its recording was not finished.")
                self._add(
                    f"episode {number} ({self._relative(table)})",
                    length,
                    number,
                    numbers.setdefault(task, len(numbers)),
                )
        self.tasks = list(numbers)
        with self._leaving_out():
            expected = self.info.get("total_episodes", found)
            if expected != found:
                raise DataError(
                    f"{file} lists {found} episodes, but meta/info.json {str(expected)[:20]}: the recording was not "
                    "finished, or some of it is missing."
                )

    def _values(self, number: int) -> dict[str, Any]:
        return {"episode_chunk": number // self.chunks_size, "episode_index": number}

    def _rows(self, index: int) -> tuple[Path, int, int]:
        return self._file("data_path", **self._values(self.places[index])), 0, self.lengths[index]

    def _video(self, index: int, camera: str) -> tuple[Path, float]:
        return self._file("video_path", **self._values(self.places[index]), video_key=camera), 0.0

    def frame_count(self, index: int, camera: str) -> int | None:
        """The number of frames that a video declares; errors are left to `frames`."""
        if camera in self.in_table:
            return None
        with contextlib.suppress(DataError):
            return self.pool.ask_once("video_facts", self._video(index, camera)[0])[0]["frames"] or None
        return 0


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a metadata file, one per line."""
    try:
        if not file.is_file() or file.stat().st_size > MAX_METADATA_BYTES:
            raise DataError(f"{file} is missing, or too large: the recording was not finished, or is damaged.")
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                value = json.loads(line)
                if not isinstance(value, dict):
                    raise DataError(f"{file}, line {number}, is not a JSON object.")
                yield value
    except (ValueError, RecursionError, OSError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{file} is not JSON lines, or was cut short: {error}.") from error
