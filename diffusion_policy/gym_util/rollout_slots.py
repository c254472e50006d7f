"""Slots that play episodes in parallel: in this process, or in one process each, so that a crash does not end the run.

gymnasium's AsyncVectorEnv is close but not used: it waits forever for a worker that hangs in its constructor or whose
exception cannot be pickled, `close(terminate=True)` waits forever for a worker that ignores SIGTERM, and its errors do
not name the worker that failed.
"""

import contextlib
import dataclasses
import gc
import logging
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import connection
from typing import Any

import numpy as np
from gymnasium.vector.utils import CloudpickleWrapper

from diffusion_policy.common.errors import UserError
from diffusion_policy.gym_util.diary_wrapper import DiaryWrapper
from diffusion_policy.gym_util.multistep_wrapper import MultiStepWrapper
from diffusion_policy.gym_util.rollout_video import RolloutVideo
from diffusion_policy.gym_util.video_recording_wrapper import VideoRecorder

log = logging.getLogger(__name__)

GRACE = 1.0  # seconds for a process to end by itself after its pipe is closed


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a slot failed, as the predicate of a sentence, and the traceback if it raised."""

    reason: str
    traceback: str | None = None


class SlotFault(RuntimeError):
    """Environments that raised, died or hung: {slot: Failure}. All slots must be closed."""

    def __init__(self, failures: dict[int, Failure]):
        super().__init__(
            "; ".join(f"the environment of slot {slot} {failure.reason}" for slot, failure in failures.items())
        )
        self.failures = failures


class RolloutEnv:
    """One slot: plays its episode, then repeats the last observation until the other slots are done.

    A slot whose episode is None is done from the start.
    """

    def __init__(self, env: MultiStepWrapper, video: RolloutVideo, diary: DiaryWrapper):
        self.env = env
        self.video = video
        self.diary = diary

    def reset(self, episode: dict[str, Any] | None) -> Any:
        """Start an episode {'seed', 'video', 'options'}, or None; return the first observation."""
        self.video.file_path = None if episode is None else episode["video"]
        self._reward, self._steps, self._done = 0.0, 0, episode is None
        seed, options = (0, None) if episode is None else (episode["seed"], episode["options"])
        self._obs, _ = self.env.reset(seed=seed, options=options)
        return self._obs

    def step(self, actions: tuple[np.ndarray, np.ndarray | None]) -> tuple[Any, float, bool, int]:
        """Actions (Ta, Da) -> observation, best reward so far, whether the episode is over, its steps so far.

        actions: those to execute, and the whole predicted chunk for the video, or None.
        """
        action, self.video.chunk = actions
        if not self._done:
            self._obs, self._reward, terminated, truncated, _ = self.env.step(action)
            self._steps = len(self.env.get_rewards())
            self._done = terminated or truncated
            if self._done:
                self.video.video_recoder.stop()
        return self._obs, self._reward, self._done, self._steps

    def report(self, _: None) -> dict[str, Any]:
        """The statistics of the episode, see `DiaryWrapper`."""
        return self.diary.report()

    def close(self) -> None:
        self.env.close()


def make_rollout_env(
    env_cls: Callable[..., Any],
    env_kwargs: dict[str, Any],
    n_obs_steps: int,
    n_action_steps: int,
    max_steps: int,
    fps: int,
    crf: int,
) -> RolloutEnv:
    """Build a slot's environment, with video recording and chunks of actions."""
    env = env_cls(**env_kwargs)
    diary = DiaryWrapper(env)
    video = RolloutVideo(
        diary,
        VideoRecorder.create_h264(fps=fps, codec="h264", input_pix_fmt="rgb24", crf=crf),
        steps_per_render=max(env.control_hz // fps, 1),
    )
    multistep = MultiStepWrapper(
        video, n_obs_steps=n_obs_steps, n_action_steps=n_action_steps, max_episode_steps=max_steps
    )
    return RolloutEnv(multistep, video, diary)


class _Slots:
    """Base class of the two kinds of slots."""

    def _call(self, name: str, arguments: Iterable[Any]) -> list[Any]:
        """Call the method `name` of every slot's RolloutEnv with its argument."""
        raise NotImplementedError

    def reset(self, episodes: Sequence[dict[str, Any] | None]) -> Any:
        """Start one episode, or None, per slot; return the first observations (N, ...), or a dict of them."""
        return _batch(self._call("reset", episodes))

    def reports(self, count: int) -> list[dict[str, Any]]:
        """The statistics of the episodes of all `count` slots."""
        return self._call("report", [None] * count)

    def step(
        self, actions: np.ndarray, chunks: np.ndarray | None = None
    ) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
        """Actions (N, Ta, Da) -> observations (N, ...), rewards (N,), done (N,), steps (N,).

        chunks: the whole predicted chunks (N, H, Da), to draw into videos.
        """
        arguments = zip(actions, [None] * len(actions) if chunks is None else chunks, strict=True)
        obs, rewards, done, steps = zip(*self._call("step", arguments), strict=True)
        return _batch(obs), np.array(rewards, dtype=np.float64), np.array(done, dtype=bool), np.array(steps)


class SyncSlots(_Slots):
    """Environments in this process. An exception becomes a SlotFault; a hang or crash affects the whole process."""

    def __init__(self, make_env: Callable[[], RolloutEnv], count: int):
        self._envs: list[RolloutEnv] = []
        try:
            for slot in range(count):
                self._envs.append(_result(slot, _attempt(make_env)))
        except BaseException:
            self.close()
            raise

    def reset(self, episodes: Sequence[dict[str, Any] | None]) -> Any:
        _collect_worlds()
        return super().reset(episodes)

    def _call(self, name: str, arguments: Iterable[Any]) -> list[Any]:
        return [
            _result(slot, _attempt(getattr(env, name), argument))
            for slot, (env, argument) in enumerate(zip(self._envs, arguments, strict=True))
        ]

    def close(self) -> None:
        """Close every environment."""
        for env in self._envs:
            try:
                env.close()
            except Exception as error:  # a broken environment may fail to close
                log.warning("closing an environment failed: %s: %s", type(error).__name__, error)
        self._envs = []


class AsyncSlots(_Slots):
    """Environments in one process each. An exception, a crash, or `timeout` seconds without answer is a SlotFault."""

    def __init__(self, make_env: Callable[[], RolloutEnv], count: int, timeout: float | None = None):
        self.timeout = timeout
        self._processes: list[Any] = []
        self._pipes: list[connection.Connection] = []
        # Not fork: libraries that started threads do not survive it.
        context = multiprocessing.get_context(
            "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        )
        try:
            for slot in range(count):
                self._start(context, slot, make_env)
            self._answers()
        except BaseException:
            self.close()
            raise

    def _start(self, context: Any, slot: int, make_env: Callable[[], Any]) -> None:
        pipe, theirs = context.Pipe()
        self._pipes.append(pipe)
        process = context.Process(
            target=_work, args=(CloudpickleWrapper(make_env), theirs), name=f"environment-{slot}", daemon=True
        )
        try:
            process.start()
        except OSError as error:
            raise SlotFault({slot: Failure(f"got no process: {error}")}) from error
        finally:
            theirs.close()  # so that the pipe closes with the process
        self._processes.append(process)

    def _call(self, name: str, arguments: Iterable[Any]) -> list[Any]:
        for pipe, argument in zip(self._pipes, arguments, strict=True):
            with contextlib.suppress(OSError):  # the process is dead; `_answers` finds out why
                pipe.send((name, argument))
        return self._answers()

    def _answers(self) -> list[Any]:
        """Wait for the answer of every process."""
        answers, waiting = {}, dict(enumerate(self._processes))
        while waiting:
            # The sentinel, too: a child of the environment may keep the pipe of a dead process open.
            ready = connection.wait(
                [handle for slot, process in waiting.items() for handle in (self._pipes[slot], process.sentinel)],
                self.timeout,
            )
            if not ready:
                raise SlotFault({slot: Failure(f"gave no answer for {self.timeout:g} s") for slot in waiting})
            for slot, process in list(waiting.items()):
                if self._pipes[slot] in ready or process.sentinel in ready:
                    answers[slot] = _result(slot, self._answer(slot))
                    del waiting[slot]
        return [answers[slot] for slot in range(len(self._processes))]

    def _answer(self, slot: int) -> tuple[bool, Any]:
        pipe, process = self._pipes[slot], self._processes[slot]
        with contextlib.suppress(EOFError, OSError):
            if pipe.poll():
                return pipe.recv()
        process.join(GRACE)  # the pipe closes a moment before the process ends
        return False, (Failure(_end(process.exitcode)), None)

    def close(self) -> None:
        """End every process, by force after the grace period."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + GRACE
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        self._processes, self._pipes = [], []


def _work(make_env: Callable[[], RolloutEnv], pipe: connection.Connection) -> None:
    """Main function of a process: build the environment, then answer calls until the pipe closes or a call fails."""
    # Ctrl-C on a terminal reaches every process; the parent decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    built, env = _attempt(make_env)
    try:
        pipe.send((built, None if built else env))
        works = built
        while works:
            name, argument = pipe.recv()
            if name == "reset":
                _collect_worlds()
            works, value = _attempt(getattr(env, name), argument)
            pipe.send((works, value))
    except (EOFError, OSError):  # the parent closed the pipe
        pass
    finally:
        if built:
            env.close()


def _collect_worlds() -> None:
    """Free the simulations of earlier episodes.

    They are cycles of few Python objects that hold much native memory. Python's collector counts objects, so it would
    run too rarely: PushT's memory would grow by some kilobytes per episode for thousands of episodes.
    """
    gc.collect()


def _attempt(call: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
    """Return (True, result), or (False, (Failure, the error if it is a UserError)); both can be sent through a pipe."""
    try:
        return True, call(*arguments)
    except Exception as error:
        where = f" in {call.__name__}" if hasattr(call, "__name__") else " while it was built"
        message = str(error).strip().partition("\n")[0]  # the rest is in the traceback
        failure = Failure(f"raised {type(error).__name__}{where}: {message}", traceback.format_exc())
        return False, (failure, error if isinstance(error, UserError) else None)


def _result(slot: int, answer: tuple[bool, Any]) -> Any:
    works, value = answer
    if works:
        return value
    failure, user_error = value
    raise SlotFault({slot: failure}) if user_error is None else user_error


def _end(code: int | None) -> str:
    """Describe how a process ended."""
    if code is None:
        return "closed its pipe"
    if code >= 0:
        return f"exited with code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def _batch(observations: Sequence[Any]) -> Any:
    if isinstance(observations[0], dict):
        return {key: np.stack([obs[key] for obs in observations]) for key in observations[0]}
    return np.stack(observations)
