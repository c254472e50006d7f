"""The child process of reader_process: answers questions about one file each, with limits on its memory.

It imports neither torch nor zarr, and each library only when a question needs it, so that it starts fast.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from diffusion_policy.common.errors import DataError
from diffusion_policy.storage.hdf5_child import OPENING_BYTES, _limit_memory

#: The questions, and the modules with their answers: functions that yield (facts, arrays).
QUESTIONS = {
    "parquet_columns": "parquet_child",
    "parquet_rows": "parquet_child",
    "parquet_texts": "parquet_child",
    "parquet_images": "parquet_child",
    "video_facts": "video_child",
    "video_frames": "video_child",
    "hdf5_members": "hdf5_episode_child",
    "hdf5_arrays": "hdf5_episode_child",
    "hdf5_images": "hdf5_episode_child",
    "hdf5_image_size": "hdf5_episode_child",
}


def serve() -> None:
    """Answer questions, one line of JSON each, until the input ends."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries may print: keep that out of the answers
    for line in sys.stdin:
        question = json.loads(line)
        last: dict[str, Any] = {"end": True}
        try:
            for facts, arrays in _answers(**question):
                layout = {key: [array.dtype.str, array.shape] for key, array in arrays.items()}
                out.write(json.dumps({**facts, "arrays": layout}).encode() + b"\n")
                for array in arrays.values():
                    out.write(array.reshape(-1).view("u1").data)
                out.flush()
        except DataError as error:
            last = {"error": str(error)}
        except MemoryError:
            last = {"error": f"{question['path']} cannot be read: it is damaged, or needs more memory than it should."}
        except Exception as error:  # the libraries have exceptions of every kind
            reason = " ".join(f"{type(error).__name__}: {error}"[:200].split())
            last = {"error": f"{question['path']} cannot be read, it is damaged or was cut short ({reason})."}
        _limit_memory(float("inf"))
        out.write(json.dumps(last).encode() + b"\n")
        out.flush()


def _answers(what: str, path: str, memory: float = 0, **arguments: Any) -> Iterator[tuple[dict, dict]]:
    """memory: bytes that the question may need, beside what the libraries take for themselves."""
    module = importlib.import_module(f"diffusion_policy.storage.{QUESTIONS[what]}")
    module.load()
    _limit_memory(OPENING_BYTES + memory)
    yield from getattr(module, what)(path, **arguments)
