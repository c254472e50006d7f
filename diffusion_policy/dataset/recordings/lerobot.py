"""Base of the LeRobotDataset formats: meta/info.json, features, and the files of an episode."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from diffusion_policy.common.errors import ConfigError, DataError, DataNotFoundError
from diffusion_policy.dataset.recordings.base import Recordings
from diffusion_policy.dataset.recordings.layout import Camera, Feature
from diffusion_policy.dataset.recordings.lerobot_features import (
    dimension_names,
    feature_layout,
    image_size,
    positive_number,
)

BOOKKEEPING = ("timestamp", "frame_index", "episode_index", "index", "task_index")
MAX_METADATA_BYTES = 256e6
MEMORY_PER_BYTE = 6
VERSIONS = ("v2.0", "v2.1", "v3.0")


def open_lerobot(path: Path, skip_broken: bool) -> Recordings:
    """Open a LeRobotDataset of one of VERSIONS."""
    from diffusion_policy.dataset.recordings.lerobot_v2 import LeRobotV2Recordings
    from diffusion_policy.dataset.recordings.lerobot_v3 import LeRobotV3Recordings

    require_libraries(path)
    info = read_json(path / "meta" / "info.json")
    version = info.get("codebase_version")
    if version not in VERSIONS:
        raise DataError(
            f"{path} is a LeRobotDataset of version {str(version)[:20]!r}; read are {', '.join(VERSIONS)}. Convert it "
            "with the scripts of lerobot."
        )
    kind = LeRobotV3Recordings if version == "v3.0" else LeRobotV2Recordings
    return kind(path, skip_broken, info=info)


def require_libraries(path: Path) -> None:
    """Check that Arrow and FFmpeg are there."""
    missing = [name for name in ("pyarrow", "av") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"The LeRobotDataset {path} needs {' and '.join(missing)}: "
            "pip install 'implicit-drifting-policy[lerobot-data]'."
        )


class LeRobotRecordings(Recordings):
    """Columns of numbers are features, columns of videos and images cameras; texts and bookkeeping are neither."""

    def _open(self, info: dict[str, Any]) -> None:  # type: ignore[override]
        self.kind = f"lerobot {info['codebase_version']}".replace("v3.0", "v3")
        self.where = self.path / "meta" / "info.json"
        self.info = info
        self.fps = positive_number(info.get("fps"), "fps", self.where)
        self.in_table: set[str] = set()  # cameras whose images are in the parquet files
        self.columns: dict[str, list[int]] = {}
        self.has_times = False
        features = info.get("features")
        if not isinstance(features, dict) or not 0 < len(features) < 10_000:
            raise DataError(f"{self.where} has no features.")
        for key, feature in features.items():
            self._describe(key, feature)
        self._find_episodes()

    def _describe(self, key: str, feature: Any) -> None:
        dtype, shape = feature_layout(key, feature, self.where)
        if dtype in ("video", "image"):
            size = image_size(shape, feature.get("names"))
            if size is not None:  # depth has one channel
                self.cameras[key] = Camera(*size)
                self.in_table |= {key} if dtype == "image" else set()
        elif key == "timestamp":
            self.has_times = True
        elif key not in BOOKKEEPING and dtype not in ("string", "language"):
            try:
                kind = np.dtype(dtype).kind
            except TypeError:
                kind = "O"
            if kind not in "biuf":
                raise DataError(f"{self.where}: feature {key!r} has the dtype {dtype[:20]!r}: only numbers are read.")
            self.features[key] = Feature(shape, dtype, dimension_names(feature.get("names"), shape))
            self.columns[key] = list(shape)

    def _find_episodes(self) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------ reading
    def _rows(self, index: int) -> tuple[Path, int, int]:
        """(file, first row, row after the last) of an episode."""
        raise NotImplementedError

    def _video(self, index: int, camera: str) -> tuple[Path, float]:
        """(file, first second) of an episode."""
        raise NotImplementedError

    def _columns(self, index: int, columns: Mapping[str, list[int]]) -> dict[str, np.ndarray]:
        file, start, stop = self._rows(index)
        size = 8 * (stop - start) * sum(map(math.prod, columns.values()))
        _, arrays = self.pool.ask_once(
            "parquet_rows", file, columns=columns, start=start, stop=stop, memory=MEMORY_PER_BYTE * size
        )
        return arrays

    def _read(self, index: int) -> dict[str, np.ndarray]:
        return self._columns(index, self.columns)

    def _timestamps(self, index: int) -> np.ndarray | None:
        return self._columns(index, {"timestamp": []})["timestamp"] if self.has_times else None

    def has_frames(self, index: int, camera: str) -> bool:
        """Whether the video of an episode is there."""
        if camera not in self.cameras or camera in self.in_table:
            return camera in self.cameras
        return self._video(index, camera)[0].is_file()

    def _frames(self, index: int, camera: str, count: int, block: int) -> Iterator[np.ndarray]:
        shape = self.cameras[camera].shape
        arguments: dict[str, Any] = dict(shape=shape, block=block, memory=MEMORY_PER_BYTE * block * math.prod(shape))
        if camera in self.in_table:
            file, start, _ = self._rows(index)
            question = "parquet_images"
            arguments |= dict(column=camera, start=start, stop=start + count)
        else:
            file, first = self._video(index, camera)
            if not file.is_file():
                raise DataNotFoundError(f"there is no video {file}.")
            question = "video_frames"
            arguments |= dict(rate=self.fps, start=first, count=count)
        for _, arrays in self.pool.ask(question, file, **arguments):
            yield arrays["frames"]

    # ------------------------------------------------------------------ files
    def _file(self, key: str, **values: Any) -> Path:
        """The file of a template of info.json, which must be in the dataset's folder."""
        template = self.info.get(key)
        if not isinstance(template, str) or len(template) > 300:
            raise DataError(f"{self.where} has no {key}.")
        return inside(self.path, fill(template, values, self.where), self.where)


def fill(template: str, values: Mapping[str, Any], where: Path) -> str:
    """'episode_{episode_index:06d}' -> 'episode_000003'. str.format would do more than that."""

    def value(match: re.Match) -> str:
        if match[1] not in values:
            raise DataError(f"{where}: the path {template!r} has an unknown part {match[0]}.")
        text = str(values[match[1]])
        return text.zfill(int(match[2])) if match[2] else text

    path = re.sub(r"\{(\w+)(?::0?(\d)d)?\}", value, template)
    if "{" in path or "}" in path:
        raise DataError(f"{where}: the path {template!r} cannot be used.")
    return path


def inside(root: Path, relative: str, where: Path) -> Path:
    """root/relative, which must not lead out of root, by itself or by links.

    A snapshot in the cache of Hugging Face consists of links to the files of the same dataset beside it.
    """
    allowed = Path(os.path.realpath(root))
    if allowed.parent.name == "snapshots":
        allowed = allowed.parent.parent
    path = root / relative
    if "\0" in relative or not Path(os.path.realpath(path)).is_relative_to(allowed):
        raise DataError(f"{where} names the file {relative[:200]!r}, which is outside of the dataset: it is not read.")
    return path


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a metadata file."""
    try:
        if not file.is_file() or file.stat().st_size > MAX_METADATA_BYTES:
            raise DataError(f"{file} is missing, or too large for metadata.")
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{file} is not JSON, or was cut short: {error}.") from error
    if not isinstance(value, dict):
        raise DataError(f"{file} does not hold a JSON object.")
    return value
