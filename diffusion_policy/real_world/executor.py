"""Executing action chunks on a robot at a fixed rate, while the next chunk is computed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from diffusion_policy.common.errors import ConfigError, UserError
from diffusion_policy.policy.observation_history import ObservationHistory
from diffusion_policy.real_world.cadence import CadenceReport
from diffusion_policy.real_world.clock import SimulatedClock, WallClock
from diffusion_policy.real_world.limits import ActionLimits
from diffusion_policy.real_world.planner import Answer, DelayedPlanner, ThreadPlanner, reason
from diffusion_policy.real_world.priority import real_time_priority
from diffusion_policy.real_world.schedule import ActionSchedule

Planner = ThreadPlanner | DelayedPlanner
WARM_UP = 3  # calls before the loop: the first ones compile, allocate and start threads


class RobotFault(UserError, RuntimeError):
    """The executor stopped the robot; its attribute `report` tells what happened until then."""

    exit_code = 1


class ActionChunkExecutor:
    """Runs a policy in a control loop that never waits for it.

    At every step it reads one observation and hands over the action that is due. Every `replan_every` steps a worker
    gets the last observations. Its chunk is stamped with the step of its last observation: when it arrives, the actions
    that were due meanwhile are dropped, so the delay is measured, not estimated. Without an action the robot holds; a
    chunk from observations of this standstill starts at its first action. The first chunk is made before the loop,
    after a warm-up, with the robot at rest.

    Args:
        policy: a policy (`load_policy`), or a function {key: (n_obs_steps, ...)} -> actions (T, Da) from the step of
            the last observation on.
        read_observation: returns the newest {key: array} without waiting for it.
        send_action: takes an action (Da,) and returns at once.
        hz: control rate, that of the demonstrations.
        n_obs_steps: observations that the policy sees (default: the policy's).
        replan_every: steps between two plans (default: the policy's n_action_steps).
        blend: steps over which a new chunk fades in; see `ActionSchedule`.
        limits: workspace and largest step of what is sent.
        hold: an action that stops, such as zero velocity; also sent at the end. None repeats the last: for positions.
        start: where the robot stands, as an action, so that `limits.max_step` holds for the first action, too.
        watchdog: seconds without a usable chunk after which the run ends with RobotFault.
        patience: seconds that a step may wait for its own plan, which otherwise counts from the next step at best.
        real_time: give the loop and the worker real-time priority, if permitted; see `real_time_priority`.
        planner: where plans are made, given the function; a thread by default.
        clock: real time by default.
    """

    def __init__(
        self,
        policy: Any,
        read_observation: Callable[[], Mapping[str, Any]],
        send_action: Callable[[np.ndarray], Any],
        hz: float,
        *,
        n_obs_steps: int | None = None,
        replan_every: int | None = None,
        blend: int = 0,
        limits: ActionLimits | None = None,
        hold: Any = None,
        start: Any = None,
        watchdog: float = 2.0,
        patience: float = 0.0,
        real_time: bool = False,
        planner: Callable[[Any], Any] = ThreadPlanner,
        clock: WallClock | SimulatedClock | None = None,
    ):
        self.plan = policy
        if hasattr(policy, "predict_action"):
            from diffusion_policy.policy.interface import ChunkPredictor  # imports torch

            self.plan = ChunkPredictor(policy)
            n_obs_steps = n_obs_steps or self.plan.interface.n_obs_steps
            replan_every = replan_every or self.plan.interface.n_action_steps
        if n_obs_steps is None or replan_every is None:
            raise ConfigError("n_obs_steps and replan_every are needed with a function in place of a policy")
        if min(hz, n_obs_steps, replan_every, watchdog) <= 0 or min(blend, patience) < 0:
            raise ConfigError("hz, n_obs_steps, replan_every and watchdog must be positive, blend and patience not < 0")
        self.read_observation, self.send_action, self.hz = read_observation, send_action, hz
        self.replan_every, self.blend, self.watchdog, self.patience = replan_every, blend, watchdog, patience
        self.limits = limits or ActionLimits()
        self.hold = None if hold is None else np.asarray(hold, dtype=np.float64)
        self.start = None if start is None else np.asarray(start, dtype=np.float64)
        self._real_time, self._make_planner, self._clock = real_time, planner, clock or WallClock()
        self._history = ObservationHistory(n_obs_steps)
        self.report = CadenceReport(hz)
        self._stopping = False

    def stop(self) -> None:
        """End `run` after the current step; for another thread or a signal handler."""
        self._stopping = True

    def run(self, steps: int | None = None, seconds: float | None = None) -> CadenceReport:
        """Control the robot for so many steps or seconds, without both until `stop`; returns the report.

        Raises RobotFault without a usable chunk for `watchdog` seconds, with a dead worker, or without a first chunk.
        """
        if seconds is not None:
            steps = round(seconds * self.hz)
        self.report, self._stopping = CadenceReport(self.hz), False
        planner: Planner = self._make_planner(self.plan)
        try:
            self._from_standstill(planner)
            gc.collect()
            gc.freeze()  # a collection over torch's modules takes longer than a step
            with real_time_priority(self._real_time, planner.thread_id) as self.report.real_time:
                self._loop(planner, steps)
        except RobotFault as fault:
            self.report.fault = str(fault)
            raise
        finally:
            gc.unfreeze()
            if self.hold is not None:
                self.send_action(self.hold)
            planner.close()
        return self.report

    def _from_standstill(self, planner: Planner) -> None:
        """Warm the policy up, then make the first chunk from a new observation; the robot is at rest all the while."""
        seconds, actions = zip(*(self._at_rest(planner) for _ in range(WARM_UP + 1)), strict=True)
        self.report.cold_start = seconds[0]
        self._schedule = ActionSchedule(actions[-1], self.blend)
        self._sent = actions[-1][0] if self.start is None else self.start
        self._asked = 0
        self._unused: Answer | None = None
        self._renewed = self._clock.now()

    def _at_rest(self, planner: Planner) -> tuple[float, np.ndarray]:
        """Make a chunk from one new observation and wait for it; return its seconds and the chunk."""
        self._history.clear()
        self._history.add(self.read_observation())
        answer = planner.at_once(self._history.stacked())
        if answer is None or answer.actions is None:
            raise RobotFault(f"the policy gave no first chunk: {reason(answer)}")
        actions = answer.actions
        if actions.ndim < 2 or len(actions) == 0 or not np.isfinite(actions).all():
            raise RobotFault(f"the first chunk cannot be used: its shape is {actions.shape}, or it is not finite")
        return answer.seconds, actions

    def _loop(self, planner: Planner, steps: int | None) -> None:
        begin, period, step = self._clock.now(), 1 / self.hz, 0
        while not self._stopping and (steps is None or step < steps):
            due = begin + step * period
            self._clock.sleep_until(due)
            self._step(planner, step, due)
            passed = int((self._clock.now() - begin) / period)
            self.report.counts["missed"] += max(0, passed - step - 1)  # steps whose whole time has passed
            step = max(step + 1, passed)

    def _step(self, planner: Planner, step: int, due: float) -> None:
        now = self._clock.now
        began = now()
        self._history.add(self.read_observation())
        read = now()
        self._plan_ahead(planner, step)
        action = self._action(step)
        planned = now()
        self.send_action(action)
        self.report.tick(due, began, read, planned, now())
        if not planner.alive:
            raise RobotFault("the worker that computes the plans has died")
        if now() - self._renewed > self.watchdog:
            raise RobotFault(f"no usable plan for {self.watchdog:g} s: {reason(self._unused)}")

    def _plan_ahead(self, planner: Planner, step: int) -> None:
        self._schedule.begin(step)
        self._take(planner.poll(step), step)
        wanted = step - self._asked >= self.replan_every or self._schedule.due(step) is None
        if wanted and not planner.busy:
            self._asked = step
            planner.submit(step, self._history.stacked())
            self._take(planner.poll(step, self.patience), step)

    def _take(self, answer: Answer | None, step: int) -> None:
        if answer is None:
            return
        outcome = self._schedule.offer(answer.actions, answer.step, step)
        self.report.counts[outcome] += 1
        self.report.latencies.append(answer.seconds)
        if outcome == "accepted":
            self.report.delays.append(step - answer.step)
            self._renewed = self._clock.now()
        else:
            self._unused = answer

    def _action(self, step: int) -> np.ndarray:
        action = self._schedule.due(step)
        if action is None:
            self.report.counts["held"] += 1
            self._sent = self._sent if self.hold is None else self.hold
        else:
            self._sent = self.limits.apply(action, self._sent)
            self.report.counts["limited"] += not np.array_equal(self._sent, action)
        return self._sent
