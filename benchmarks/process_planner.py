"""Plans made in a process, to compare with `ThreadPlanner`."""

from __future__ import annotations

import multiprocessing
from typing import Any

from diffusion_policy.real_world.planner import Answer, make


def work(make_plan: Any, arguments: tuple[Any, ...], pipe: Any) -> None:
    """Main function of the process: build the policy, then answer until the pipe closes."""
    plan = make_plan(*arguments)
    try:
        while True:
            pipe.send(make(plan, *pipe.recv()))
    except (EOFError, OSError):
        pass


class ProcessPlanner:
    """The methods of `ThreadPlanner`, through a pipe; the process builds the policy itself."""

    thread_id = None

    def __init__(self, make_plan: Any, *arguments: Any):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(make_plan, arguments, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.busy = False

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def submit(self, step: int, history: dict[str, Any]) -> None:
        self.busy = True
        self._pipe.send((step, history))

    def at_once(self, history: dict[str, Any]) -> Answer | None:
        self.submit(0, history)
        return self.poll(0, 300)

    def poll(self, step: int, patience: float = 0.0) -> Answer | None:
        if not self.busy or not self._pipe.poll(patience):
            return None
        self.busy = False
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join()
