"""Where plans are made: in a thread beside the control loop, or after a given number of simulated steps."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Plan = Callable[[dict[str, np.ndarray]], np.ndarray]


@dataclasses.dataclass
class Answer:
    """A plan for the observations up to control step `step`: actions (T, ...), or the error in their place."""

    step: int
    seconds: float
    actions: np.ndarray | None = None
    error: Exception | None = None


def make(plan: Plan, step: int, history: dict[str, np.ndarray]) -> Answer:
    """Call `plan` and measure it; an exception of the policy becomes an answer."""
    started = time.perf_counter()
    try:
        actions = np.asarray(plan(history))
    except Exception as error:
        return Answer(step, time.perf_counter() - started, error=error)
    return Answer(step, time.perf_counter() - started, actions)


def reason(answer: Answer | None) -> str:
    """Why an answer could not be used."""
    if answer is None:
        return "the worker gave no answer"
    if answer.error is not None:
        return f"{type(answer.error).__name__}: {answer.error}"
    return "the last one came too late or was not finite"


class ThreadPlanner:
    """Plans in a thread, one at a time; the control loop never waits for it.

    A thread, because torch and ONNX Runtime release the interpreter while they compute: the loop is as punctual as with
    a process (results/runtime), the policy need not be sent anywhere, and observations are not copied through a pipe.
    """

    def __init__(self, plan: Plan):
        self._plan = plan
        self._changed = threading.Condition()
        self._request: tuple[int, dict[str, np.ndarray]] | None = None
        self._answer: Answer | None = None
        self._closed = False
        self.busy = False
        self._thread = threading.Thread(target=self._work, name="planner", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def thread_id(self) -> int | None:
        """Of the operating system."""
        return self._thread.native_id

    def submit(self, step: int, history: dict[str, np.ndarray]) -> None:
        """Ask for a plan; only while not busy."""
        with self._changed:
            self.busy, self._request = True, (step, history)
            self._changed.notify_all()

    def at_once(self, history: dict[str, np.ndarray]) -> Answer | None:
        """Make a plan and wait for it, in the thread that will make the others; None if the thread has died."""
        self.submit(0, history)
        answer = None
        while answer is None and self.alive:
            answer = self.poll(0, patience=0.2)
        return answer

    def poll(self, step: int, patience: float = 0.0) -> Answer | None:
        """The plan that has been finished since the last call, if any; waits at most `patience` seconds for it."""
        with self._changed:
            if patience and self.busy and self._answer is None:
                self._changed.wait_for(lambda: self._answer is not None, patience)
            answer, self._answer = self._answer, None
            if answer is not None:
                self.busy = False
            return answer

    def close(self, timeout: float = 60.0) -> None:
        """End the thread after its current plan; a plan that takes longer than `timeout` is left to itself."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._request is not None or self._closed)
                if self._closed or self._request is None:
                    return
                (step, history), self._request = self._request, None
            answer = make(self._plan, step, history)
            with self._changed:
                self._answer = answer
                self._changed.notify_all()


class DelayedPlanner:
    """Plans that arrive exactly `delay` control steps after they were asked for, in simulated time."""

    alive = True
    thread_id = None

    def __init__(self, plan: Plan, delay: int):
        self._plan, self.delay = plan, delay
        self._answer: Answer | None = None

    @property
    def busy(self) -> bool:
        return self._answer is not None

    def at_once(self, history: dict[str, np.ndarray]) -> Answer | None:
        return make(self._plan, 0, history)

    def submit(self, step: int, history: dict[str, np.ndarray]) -> None:
        self._answer = make(self._plan, step, history)

    def poll(self, step: int, patience: float = 0.0) -> Answer | None:
        if self._answer is None or step < self._answer.step + self.delay:
            return None
        answer, self._answer = self._answer, None
        return answer

    def close(self, timeout: Any = None) -> None:
        """There is nothing to end."""
