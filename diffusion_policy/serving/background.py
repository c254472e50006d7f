"""A server in a thread of this program."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from diffusion_policy.serving.server import PolicyServer


@contextlib.contextmanager
def in_background(server: PolicyServer) -> Iterator[PolicyServer]:
    """Serve while the block runs; `server.port` is the port, also if it was given as 0."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="policy-server", daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result()
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
