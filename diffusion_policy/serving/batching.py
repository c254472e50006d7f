"""One worker that calls the policy for all clients that wait."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from diffusion_policy.serving.codec import MessageError
from diffusion_policy.serving.metrics import Metrics

log = logging.getLogger(__name__)
Histories = Mapping[str, np.ndarray]


class PolicyError(RuntimeError):
    """The policy failed; the text is for the client, the traceback is in the log."""


@dataclasses.dataclass
class Waiting:
    """A client's history {key: (To, ...)}, and where its actions go."""

    history: dict[str, np.ndarray]
    answer: asyncio.Future[tuple[np.ndarray, float]]


class Batcher:
    """Gathers the requests that wait and calls the policy for all of them at once, in a thread of its own.

    Args:
        predict: {key: (B, To, ...)} -> actions (B, Ta, Da).
        max_batch: largest B.
    """

    def __init__(self, predict: Callable[[Histories], np.ndarray], max_batch: int, metrics: Metrics):
        self._predict, self._max_batch, self._metrics = predict, max_batch, metrics
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="policy")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._work())

    async def warm_up(self, histories: Histories, calls: int = 3) -> None:
        """Call the policy before the first client does: the first calls are slow."""
        for _ in range(calls):
            await asyncio.get_running_loop().run_in_executor(self._pool, self._predict, histories)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def infer(self, history: dict[str, np.ndarray]) -> tuple[np.ndarray, float]:
        """{key: (To, ...)} -> actions (Ta, Da), and the seconds of the policy's call."""
        answer: asyncio.Future[tuple[np.ndarray, float]] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(Waiting(history, answer))
        return await answer

    async def _work(self) -> None:
        while True:
            waiting = [await self._queue.get()]
            while len(waiting) < self._max_batch and not self._queue.empty():
                waiting.append(self._queue.get_nowait())
            await self._answer([one for one in waiting if not one.answer.done()])  # done: its client is gone

    async def _answer(self, group: list[Waiting]) -> None:
        if not group:
            return
        try:
            histories = {key: np.stack([one.history[key] for one in group]) for key in group[0].history}
            call = asyncio.get_running_loop().run_in_executor(self._pool, timed, self._predict, histories)
            actions, seconds = await call
        except Exception as error:
            await self._failed(group, error)
            return
        self._metrics.add("batches_total")
        self._metrics.observe("inference_seconds", seconds)
        for one, chunk in zip(group, actions, strict=True):
            if not one.answer.done():
                one.answer.set_result((chunk, seconds))

    async def _failed(self, group: list[Waiting], error: Exception) -> None:
        if len(group) > 1:  # one observation can fail the call of all: find it
            for one in group:
                await self._answer([one])
        elif not group[0].answer.done():
            group[0].answer.set_exception(explained(error))


def timed(predict: Callable[[Histories], np.ndarray], histories: Histories) -> tuple[np.ndarray, float]:
    """Actions, and the seconds that the policy took for them."""
    started = time.perf_counter()
    actions = predict(histories)
    return actions, time.perf_counter() - started


def explained(error: Exception) -> Exception:
    """The error message for a client: why the policy refused its observation, or that the policy failed."""
    if isinstance(error, ValueError):
        return MessageError(" ".join(str(error).split())[:500])
    log.error("the policy failed", exc_info=error)
    return PolicyError(f"the policy failed with {type(error).__name__}; the server's log has the details")
