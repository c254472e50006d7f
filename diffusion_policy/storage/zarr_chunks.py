"""The stored chunks of a zarr array: their sizes and first bytes, without decoding them.

zarr has no public interface for this, so this module alone uses some of its private ones.
"""

from __future__ import annotations

import os
import stat
import zipfile
from typing import Any

import zarr
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, ZipStore


class StoredChunks:
    """A context manager; folders and zip files are read only as far as asked, other stores chunk by chunk."""

    def __init__(self, array: zarr.Array):
        self.store: Any = array.store
        self.prefix = array.path + "/" if array.path else ""

    def __enter__(self) -> StoredChunks:
        self.zip = zipfile.ZipFile(self.store.path) if isinstance(self.store, ZipStore) else None
        return self

    def __exit__(self, *_: Any) -> None:
        if self.zip:
            self.zip.close()

    def size(self, name: str) -> int | None:
        """Bytes of a chunk; None if it is missing or not a regular file."""
        try:
            if self.zip:
                return self.zip.getinfo(self.prefix + name).file_size
            if isinstance(self.store, LocalStore):
                info = os.stat(self.store.root / self.prefix / name)
                return info.st_size if stat.S_ISREG(info.st_mode) else None
        except (KeyError, OSError):
            return None
        data = self._get(name)
        return None if data is None else len(data)

    def read(self, name: str, length: int) -> bytes:
        """The first bytes of a chunk."""
        if self.zip:
            with self.zip.open(self.prefix + name) as file:
                return file.read(length)
        if isinstance(self.store, LocalStore):
            with open(self.store.root / self.prefix / name, "rb") as file:
                return file.read(length)
        return (self._get(name) or b"")[:length]

    def _get(self, name: str) -> bytes | None:
        data = sync(self.store.get(self.prefix + name, default_buffer_prototype()))
        return None if data is None else data.to_bytes()
