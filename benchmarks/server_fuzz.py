"""Bad input for the policy server: messages, frames and handshakes, over real sockets."""

from __future__ import annotations

import asyncio
import collections
import os
import random
import struct
from typing import Any

import msgpack
import numpy as np

from diffusion_policy.serving.codec import encode

KEY = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
UPGRADE = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n" + KEY
PATIENCE = 30.0  # seconds; no answer within them is a failure


def frame(payload: bytes, opcode: int = 2, masked: bool = True, final: bool = True) -> bytes:
    """A WebSocket frame of a client; a mask of zeros leaves the payload as it is."""
    size = len(payload)
    first, mask = opcode | 0x80 * final, 0x80 * masked
    if size < 126:
        head = struct.pack("!BB", first, mask | size)
    elif size < 65536:
        head = struct.pack("!BBH", first, mask | 126, size)
    else:
        head = struct.pack("!BBQ", first, mask | 127, size)
    return head + b"\0\0\0\0" * masked + payload


class Source:
    """Draws bad messages from a seed, most of them made from good ones."""

    def __init__(self, seed: int, obs_dim: int):
        self.random = random.Random(seed)
        self.good = encode({"obs": np.zeros(obs_dim, dtype=np.float32), "prompt": "push", "reset": False})
        self.obs_dim = obs_dim

    def message(self) -> bytes:
        return self.random.choice((self.flipped, self.cut, self.noise, self.hostile, self.odd_array))()

    def flipped(self) -> bytes:
        data = bytearray(self.good)
        for _ in range(self.random.randint(1, 8)):
            data[self.random.randrange(len(data))] = self.random.randrange(256)
        return bytes(data)

    def cut(self) -> bytes:
        start, end = sorted(self.random.randrange(len(self.good)) for _ in range(2))
        return self.good[:start] + self.good[end:]

    def noise(self) -> bytes:
        return self.random.randbytes(self.random.choice((0, 1, 3, 50, 3000)))

    def hostile(self) -> bytes:
        depth, count = self.random.choice((10, 2000, 60000)), self.random.choice((10, 300, 60000))
        return self.random.choice(
            (
                b"\x91" * depth,
                b"\x81\xa1x" * (depth // 3),
                b"\x90" * count,
                b"\xdd" + struct.pack(">I", count) + b"\xc0" * count,
            )
        ) + self.random.randbytes(2)

    def odd_array(self) -> bytes:
        pick = self.random.choice
        dtype = pick(("<f4", "O", "|O8", "<c8", "V4", "<U9", "f4,f4", "b2", "<f8", "|u1", "", None, 7, "<M8[s]"))
        shape = pick(([self.obs_dim], [], [-1], [2**40, 2**40], [0], [1, self.obs_dim], None, ["a"], [2, self.obs_dim]))
        data = pick(
            (b"\xff" * 4 * self.obs_dim, b"", "text", None, self.random.randbytes(64), b"cos\nsystem\n(S'id'\ntR.")
        )
        entry = {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}
        value: Any = pick((entry, [entry], {"obs": entry}, {b"__npgeneric__": 1, b"data": data, b"dtype": dtype}))
        return msgpack.packb(pick(({"obs": value}, {"obs": value, "reset": value}, value)))

    def frames(self) -> bytes:
        """Bytes that break the rules of WebSocket frames."""
        opcode = self.random.randrange(16)
        pieces = (
            self.random.randbytes(self.random.randint(1, 200)),
            frame(self.noise(), opcode, masked=False),
            frame(self.noise(), opcode, final=False),
            frame(self.message(), opcode | self.random.choice((0x10, 0x20, 0x40))),
            struct.pack("!BBQ", 0x82, 0xFF, 2**63) + b"xxxx",
            frame(b"\xff\xfe", 1),
        )
        return self.random.choice(pieces)

    def headers(self, token: str) -> bytes:
        """Authorization headers that are not the right one."""
        wrong = (b"", token.encode()[:-1], token.encode() + b"x", b"\xff\xfe", self.random.randbytes(20).hex().encode())
        value = self.random.choice((b"Api-Key ", b"Bearer ", b"", b"api-key  ")) + self.random.choice(wrong)
        twice = b"Authorization: Api-Key " + token.encode() + b"\r\nAuthorization: x\r\n"
        return self.random.choice((b"", b"Authorization: " + value + b"\r\n", twice))


class Fuzzer:
    """Sends bad input; `counts` tells how it was answered.

    Failures: 'let in' (a connection without the token), 'no answer' and 'refused' (the server does not accept TCP).
    """

    def __init__(self, port: int, token: str, obs_dim: int, seed: int = 0):
        self.port, self.token, self.source = port, token, Source(seed, obs_dim)
        self.counts: collections.Counter[str] = collections.Counter()

    async def run(self, count: int, clients: int = 4) -> collections.Counter[str]:
        """Send `count` pieces of bad input through so many connections at a time."""
        self._left = count
        await asyncio.gather(*(self._client() for _ in range(clients)))
        return self.counts

    async def _client(self) -> None:
        while self._left > 0:
            kind = self.source.random.choices((self._messages, self._bad_frames, self._intruder), (8, 1, 1))[0]
            try:
                await asyncio.wait_for(kind(), PATIENCE)
            except TimeoutError:
                self.counts["no answer"] += 1
            except ConnectionRefusedError:
                self.counts["refused"] += 1
                return
            except (OSError, asyncio.IncompleteReadError):
                self.counts["disconnected"] += 1

    def _take(self) -> bool:
        self._left -= 1
        return self._left >= 0

    async def _connect(self, headers: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n" + UPGRADE + headers + b"\r\n")
        return reader, writer, await reader.readuntil(b"\r\n\r\n")

    async def _messages(self) -> None:
        """Messages over a good connection, until the server closes it."""
        reader, writer, _ = await self._connect(f"Authorization: Api-Key {self.token}\r\n".encode())
        try:
            await answer(reader)  # metadata
            while self._take():
                writer.write(frame(self.source.message(), self.source.random.choice((2, 2, 2, 1))))
                kind = await answer(reader)
                self.counts[{2: "answered", 1: "refused with a line", 8: "closed"}.get(kind, "other")] += 1
                if kind != 2:
                    return
        finally:
            writer.close()

    async def _bad_frames(self) -> None:
        """Bytes that are no frames; the client leaves at once."""
        reader, writer, _ = await self._connect(f"Authorization: Api-Key {self.token}\r\n".encode())
        try:
            await answer(reader)
            if self._take():
                writer.write(self.source.frames())
                await writer.drain()
                self.counts["broken frame"] += 1
        finally:
            writer.close()

    async def _intruder(self) -> None:
        """A handshake without the token, or bytes that are none."""
        if not self._take():
            return
        if self.source.random.random() < 0.3:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(os.urandom(100) + b"\r\n\r\n")
            self.counts["no handshake"] += 1
        else:
            _, writer, head = await self._connect(self.source.headers(self.token))
            self.counts["let in" if b" 101 " in head.split(b"\r\n")[0] + b" " else "kept out"] += 1
        writer.close()


async def answer(reader: asyncio.StreamReader) -> int:
    """Read one frame of the server; returns its opcode: 1 text, 2 binary, 8 close."""
    first, size = struct.unpack("!BB", await reader.readexactly(2))
    if size == 126:
        (size,) = struct.unpack("!H", await reader.readexactly(2))
    elif size == 127:
        (size,) = struct.unpack("!Q", await reader.readexactly(8))
    await reader.readexactly(size)
    return first & 15


FAILURES = ("let in", "no answer", "refused")
