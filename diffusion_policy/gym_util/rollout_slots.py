"""Slots that play episodes side by side: in this process, or in one process each, which may die without taking the run along.

Not gymnasium's AsyncVectorEnv, although it is close. It waits for ever for a worker that hangs while it is built or whose exception
cannot be pickled, `close(terminate=True)` waits for ever for one that ignores SIGTERM, and none of its errors says which one failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import multiprocessing
import signal
import time
import traceback
from multiprocessing import connection

import numpy as np
from gymnasium.vector.utils import CloudpickleWrapper

from diffusion_policy.common.errors import UserError
from diffusion_policy.gym_util.multistep_wrapper import MultiStepWrapper
from diffusion_policy.gym_util.video_recording_wrapper import VideoRecorder, VideoRecordingWrapper

log = logging.getLogger(__name__)

GRACE = 1.0  # seconds that a process gets to end by itself once its pipe is closed


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a slot failed, as the rest of a sentence, and the traceback if it raised."""

    reason: str
    traceback: str | None = None


class SlotFault(RuntimeError):
    """Environments that raised, died or hung: {slot: Failure}. The slots they are part of must be closed."""

    def __init__(self, failures: dict[int, Failure]):
        super().__init__(
            "; ".join(f"the environment of slot {slot} {failure.reason}" for slot, failure in failures.items())
        )
        self.failures = failures


class RolloutEnv:
    """One slot: plays the episode assigned to it, then waits, the last observation repeated, until the others are done too.

    A slot whose episode is None is done from the start.
    """

    def __init__(self, env, video):
        self.env = env
        self.video = video

    def reset(self, episode):
        """Start an episode {'seed', 'video', 'options'}, or None -> the first observation."""
        self.video.file_path = None if episode is None else episode["video"]
        self._reward, self._steps, self._done = 0.0, 0, episode is None
        seed, options = (0, None) if episode is None else (episode["seed"], episode["options"])
        self._obs, _ = self.env.reset(seed=seed, options=options)
        return self._obs

    def step(self, action):
        """action (Ta, Da) -> observation, best reward so far, whether the episode is over, its steps so far."""
        if not self._done:
            self._obs, self._reward, terminated, truncated, _ = self.env.step(action)
            self._steps = len(self.env.get_rewards())
            self._done = terminated or truncated
            if self._done:
                self.video.video_recoder.stop()
        return self._obs, self._reward, self._done, self._steps

    def close(self):
        self.env.close()


def make_rollout_env(env_cls, env_kwargs, n_obs_steps, n_action_steps, max_steps, fps, crf):
    env = env_cls(**env_kwargs)
    video = VideoRecordingWrapper(
        env,
        VideoRecorder.create_h264(fps=fps, codec="h264", input_pix_fmt="rgb24", crf=crf),
        steps_per_render=max(env.control_hz // fps, 1),
    )
    multistep = MultiStepWrapper(
        video, n_obs_steps=n_obs_steps, n_action_steps=n_action_steps, max_episode_steps=max_steps
    )
    return RolloutEnv(multistep, video)


class _Slots:
    """What the two kinds share; `_call(name, arguments)` calls that method of every slot's RolloutEnv -> list of results."""

    def reset(self, episodes):
        """One episode, or None, for each slot -> first observations (N, ...), a dict of them if the environment has several."""
        return _batch(self._call("reset", episodes))

    def step(self, actions):
        """actions (N, Ta, Da) -> observations (N, ...), rewards (N,), done (N,), steps (N,)."""
        obs, rewards, done, steps = zip(*self._call("step", actions))
        return _batch(obs), np.array(rewards, dtype=np.float64), np.array(done, dtype=bool), np.array(steps)


class SyncSlots(_Slots):
    """Environments in this process. One that hangs or dies takes the process along; one that raises is a SlotFault."""

    def __init__(self, make_env, count):
        self._envs = []
        try:
            for slot in range(count):
                self._envs.append(_result(slot, _attempt(make_env)))
        except BaseException:
            self.close()
            raise

    def reset(self, episodes):
        _collect_worlds()
        return super().reset(episodes)

    def _call(self, name, arguments):
        return [
            _result(slot, _attempt(getattr(env, name), argument))
            for slot, (env, argument) in enumerate(zip(self._envs, arguments))
        ]

    def close(self):
        for env in self._envs:
            try:
                env.close()
            except Exception as error:  # it may be closed because it is broken
                log.warning("closing an environment failed: %s: %s", type(error).__name__, error)
        self._envs = []


class AsyncSlots(_Slots):
    """Environments in one process each. One that raises, dies, or lets `timeout` seconds pass while nobody answers, is a SlotFault."""

    def __init__(self, make_env, count, timeout=None):
        self.timeout = timeout
        self._processes, self._pipes = [], []
        # Not fork: libraries with threads of their own do not survive it.
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

    def _start(self, context, slot, make_env):
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
            theirs.close()  # so that the pipe ends when the process does
        self._processes.append(process)

    def _call(self, name, arguments):
        for pipe, argument in zip(self._pipes, arguments):
            with contextlib.suppress(OSError):  # dead since its last answer: `_answers` finds out how
                pipe.send((name, argument))
        return self._answers()

    def _answers(self):
        """What each process sends, in order."""
        answers, waiting = {}, dict(enumerate(self._processes))
        while waiting:
            # Also the sentinel: a process that the environment started may keep the pipe of a dead one open.
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

    def _answer(self, slot):
        pipe, process = self._pipes[slot], self._processes[slot]
        with contextlib.suppress(EOFError, OSError):
            if pipe.poll():
                return pipe.recv()
        process.join(GRACE)  # the pipe ends a moment before the process
        return False, (Failure(_end(process.exitcode)), None)

    def close(self):
        """End every process, whatever it is doing."""
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


def _work(make_env, pipe):
    """The life of a process: build the environment, then answer calls until the pipe is closed or one of them fails."""
    # Ctrl-C on a terminal reaches every process; whoever started this one decides what ends.
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
    except (EOFError, OSError):  # nobody is at the other end any more
        pass
    finally:
        if built:
            env.close()


def _collect_worlds():
    """Free the worlds of earlier episodes. They are cycles of few Python objects around much native memory, of which the collector,
    which counts objects, knows nothing: PushT's grow by some kilobytes an episode for thousands of episodes if left to it."""
    gc.collect()


def _attempt(call, *arguments):
    """-> (True, result) or (False, (Failure, the error if it is the user's to fix)); another process can be sent either."""
    try:
        return True, call(*arguments)
    except Exception as error:
        where = f" in {call.__name__}" if hasattr(call, "__name__") else " while it was built"
        message = str(error).strip().partition("\n")[0]  # the traceback has the rest
        failure = Failure(f"raised {type(error).__name__}{where}: {message}", traceback.format_exc())
        return False, (failure, error if isinstance(error, UserError) else None)


def _result(slot, answer):
    works, value = answer
    if works:
        return value
    failure, user_error = value
    raise SlotFault({slot: failure}) if user_error is None else user_error


def _end(code):
    """What the exit code of a process says about its end."""
    if code is None:
        return "closed its pipe"
    if code >= 0:
        return f"exited with code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def _batch(observations):
    if isinstance(observations[0], dict):
        return {key: np.stack([obs[key] for obs in observations]) for key in observations[0]}
    return np.stack(observations)
