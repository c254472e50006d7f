"""A policy behind a WebSocket, in the protocol of openpi's clients."""

from __future__ import annotations

import asyncio
import http
import logging
import time
from typing import Any

import numpy as np
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from diffusion_policy.policy.interface import ChunkPredictor
from diffusion_policy.policy.observation_history import ObservationHistory
from diffusion_policy.serving.access import check_address, has_token
from diffusion_policy.serving.batching import Batcher, PolicyError
from diffusion_policy.serving.codec import MessageError, decode, encode
from diffusion_policy.serving.metrics import Metrics
from diffusion_policy.serving.observation import ObservationReader, metadata_of

log = logging.getLogger(__name__)
GOING_AWAY, INTERNAL_ERROR = 1001, 1011


class PolicyServer:
    """Answers observations with action chunks; each connection has its own history.

    Args:
        policy: see `load_policy`.
        host: address to listen at; any but a loopback address needs a token.
        port: 0 takes a free one, see `port` after `start`.
        token: what clients must send as `Authorization: Api-Key <token>`; None accepts everyone.
        max_batch: largest number of clients answered by one call of the policy.
        max_clients: connections at the same time; further ones get 503.
        stall: seconds after which a client that does not react to pings is disconnected.
    """

    def __init__(
        self,
        policy: Any,
        host: str = "127.0.0.1",
        port: int = 8000,
        token: str | None = None,
        max_batch: int = 16,
        max_clients: int = 64,
        stall: float = 20.0,
    ):
        check_address(host, token)
        self.host, self.port, self._token, self._max_clients, self._stall = host, port, token, max_clients, stall
        self._predictor = ChunkPredictor(policy)
        self.reader = ObservationReader(self._predictor.interface)
        self._metadata = encode(metadata_of(policy, self._predictor.interface))
        self.metrics = Metrics()
        self._batcher = Batcher(self._predictor.executed, max_batch, self.metrics)
        self._clients: set[ServerConnection] = set()
        self._busy: set[ServerConnection] = set()
        self._stopping = False
        self._server: Server | None = None

    # ------------------------------------------------------------------ start and stop
    async def start(self) -> None:
        """Warm the policy up, then listen."""
        interface = self._predictor.interface
        shapes = {key: (1, interface.n_obs_steps, *entry.shape) for key, entry in interface.observation.items()}
        rgb = {key for key, entry in interface.observation.items() if entry.rgb}
        zeros = {key: np.zeros(shape, np.uint8 if key in rgb else np.float32) for key, shape in shapes.items()}
        await self._batcher.warm_up(zeros)
        self._batcher.start()
        self._server = await serve(
            self._talk,
            self.host,
            self.port,
            process_request=self._gate,
            origins=[None],  # no web page may connect through a user's browser
            compression=None,
            max_size=self.reader.max_bytes,
            max_queue=2,
            ping_interval=self._stall,
            ping_timeout=self._stall,
            close_timeout=2,
            server_header=None,
            logger=quiet(),
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self, grace: float = 5.0) -> None:
        """Stop accepting clients, answer pending requests for at most `grace` seconds, and disconnect."""
        self._stopping = True
        if self._server is not None:
            self._server.close(close_connections=False)
            idle = self._clients - self._busy
            leaving = [asyncio.create_task(connection.close(GOING_AWAY, "the server stops")) for connection in idle]
            try:
                await asyncio.wait_for(self._server.wait_closed(), grace)
            except TimeoutError:
                for connection in self._clients:
                    connection.transport.abort()
            await asyncio.gather(*leaving, return_exceptions=True)
        await self._batcher.close()

    # ------------------------------------------------------------------ connections
    def _gate(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer plain HTTP requests and check who may connect."""
        path = request.path.partition("?")[0]
        if path == "/healthz":
            return connection.respond(http.HTTPStatus.OK, "OK\n")
        if not has_token(request.headers.get_all("Authorization"), self._token):
            return self._refuse(connection, http.HTTPStatus.UNAUTHORIZED, "token", "a token is needed\n")
        if path == "/metrics":
            self.metrics.counts["connections", ""] = len(self._clients)
            return connection.respond(http.HTTPStatus.OK, self.metrics.text())
        if self._stopping or len(self._clients) >= self._max_clients:
            return self._refuse(connection, http.HTTPStatus.SERVICE_UNAVAILABLE, "full", "too many clients\n")
        return None

    def _refuse(self, connection: ServerConnection, status: http.HTTPStatus, reason: str, text: str) -> Response:
        self.metrics.add("refused_total", label=f'reason="{reason}"')
        return connection.respond(status, text)

    async def _talk(self, connection: ServerConnection) -> None:
        """Serve one client until it leaves or makes an error."""
        self._clients.add(connection)
        self.metrics.add("connections_total")
        try:
            await connection.send(self._metadata)
            await self._answer_all(connection)
        except ConnectionClosed:
            pass
        except (MessageError, PolicyError) as error:
            await self._end(connection, "request" if isinstance(error, MessageError) else "policy", str(error))
        except Exception:
            log.exception("a connection failed")
            await self._end(connection, "server", "the server failed; its log has the details")
        finally:
            self._clients.discard(connection)
            self._busy.discard(connection)

    async def _end(self, connection: ServerConnection, kind: str, text: str) -> None:
        self.metrics.add("errors_total", label=f'kind="{kind}"')
        try:
            await connection.send(text)
            await connection.close(INTERNAL_ERROR)
        except ConnectionClosed:
            pass

    async def _answer_all(self, connection: ServerConnection) -> None:
        history, total = ObservationHistory(self.reader.steps), None
        async for message in connection:
            self._busy.add(connection)
            started = time.perf_counter()
            answer = await self._answer(message, history)
            if total is not None:
                answer["server_timing"]["prev_total_ms"] = 1000 * total
            await connection.send(encode(answer))
            total = time.perf_counter() - started
            self.metrics.add("requests_total")
            self.metrics.observe("request_seconds", total)
            self._busy.discard(connection)
            if self._stopping:
                await connection.close(GOING_AWAY, "the server stops")

    async def _answer(self, message: str | bytes, history: ObservationHistory) -> dict[str, Any]:
        if isinstance(message, str):
            raise MessageError("an observation is a binary message")
        content = decode(message)
        entries, whole = self.reader.read(content)
        if whole:
            return await self._actions(entries)
        if content.get("reset"):
            history.clear()
        history.add(entries)
        if content.get("observe_only"):
            return {"server_timing": {"infer_ms": 0.0}}
        return await self._actions(history.stacked())

    async def _actions(self, history: dict[str, np.ndarray]) -> dict[str, Any]:
        actions, seconds = await self._batcher.infer(history)
        return {"actions": actions, "server_timing": {"infer_ms": 1000 * seconds}}


def quiet() -> logging.Logger:
    """A logger without the tracebacks of clients that disconnect or send garbage."""
    logger = logging.getLogger("diffusion_policy.serving.connections")
    logger.setLevel(logging.CRITICAL)
    return logger
