"""What compressed data decode to, read from headers or counted, without allocating the result.

Decoders trust the sizes in a file; a few changed bytes can make them allocate without limit or leave memory unwritten.
The readers of zarr and HDF5 files compare these sizes with the declared ones before anything is decoded. This module
imports neither zarr nor torch, so that the HDF5 child process can use it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable


def blosc_sizes(header: bytes) -> tuple[int, int]:
    """(decoded, stored) bytes from a Blosc header of 16 bytes: 4 flag bytes, then decoded, block and stored size."""
    return int.from_bytes(header[4:8], "little"), int.from_bytes(header[12:16], "little")


def zstd_size(header: bytes) -> int | None:
    """Decoded bytes from the first 18 bytes of a zstd frame; None if the header has no size."""
    if len(header) < 6 or header[:4] != b"\x28\xb5\x2f\xfd":
        return None
    single, length = header[4] >> 5 & 1, (0, 2, 4, 8)[header[4] >> 6]
    if single and not length:
        length = 1
    start = 5 + (not single) + (0, 1, 2, 4)[header[4] & 3]  # after the window size and the dictionary's number
    value = int.from_bytes(header[start : start + length], "little") + (256 if length == 2 else 0)
    return value if length and len(header) >= start + length else None


def inflated_size(kind: str, data: bytes, limit: int) -> int | None:
    """Decoded bytes of zlib or gzip data, counted up to limit + 1; None if the data are cut short or too long."""
    decompressor = zlib.decompressobj(wbits={"zlib": 15, "gzip": 31}[kind])
    size = len(decompressor.decompress(data, limit + 1))
    return size if size > limit or (decompressor.eof and not decompressor.unused_data) else None


def lzf_size(data: bytes) -> int:
    """Decoded bytes of LZF data.

    A control byte below 32 starts a literal run of control + 1 bytes. Others are copies: their top three bits are the
    length, extended by one more byte if all are set.
    """
    size = position = 0
    while position < len(data):
        control = data[position]
        if control < 32:
            size, position = size + control + 1, position + control + 2
        else:
            long = control >> 5 == 7 and position + 1 < len(data)
            size, position = size + (control >> 5) + 2 + (data[position + 1] if long else 0), position + 2 + long
    return size


def chunk_problem(codec: str | None, decoded: int, size: int, read: Callable[[int], bytes]) -> str | None:
    """What is wrong with a zarr chunk of `size` bytes that must decode to `decoded` bytes; None if nothing is.

    read(n) returns the first n bytes of the chunk.
    """
    if size <= 0:
        return "it is empty"
    if codec is None:
        return None if size == decoded else f"it has {size} bytes instead of {decoded}"
    if size > 2 * decoded + 1024:  # no codec makes data so much larger, and it would be read whole
        return f"it has {size} bytes, but should decode to {decoded}"
    found: int | None
    if codec == "blosc":
        header = read(16)
        found, stored = blosc_sizes(header)
        if len(header) < 16 or stored != size:
            return f"it has {size} bytes instead of {stored}"
    elif codec == "lz4":  # numcodecs writes the decoded size first
        found = int.from_bytes(read(4), "little")
    elif codec == "zstd":
        found = zstd_size(read(18))
    else:
        found = inflated_size(codec, read(size), decoded)
    if found == decoded:
        return None
    return f"it decodes to {'an unknown number of' if found is None else found} bytes instead of {decoded}"
