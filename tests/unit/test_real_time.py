"""The real-time executor in simulated time: what goes wrong in other runtimes, and the limits."""

import itertools
import json
import os
import threading

import numpy as np
import pytest

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.real_world import (
    ActionChunkExecutor,
    ActionLimits,
    DelayedPlanner,
    RobotFault,
    SimulatedClock,
    ThreadPlanner,
)
from diffusion_policy.real_world.priority import LOOP, WORKER, real_time_priority


class Robot:
    """Observes the number of the control step; keeps what it was sent."""

    def __init__(self):
        self.sent, self.reads = [], 0

    def read_observation(self):
        self.reads += 1
        return {"t": np.array([len(self.sent)], dtype=np.float64)}

    def send_action(self, action):
        self.sent.append(np.array(action))

    @property
    def track(self):
        return np.array(self.sent)[:, 0]


class Timetable:
    """A policy that plans the action t for step t: the right action is the number of the step. Keeps what it saw."""

    def __init__(self, length=16):
        self.length, self.seen = length, []

    def __call__(self, history):
        self.seen.append(history["t"][:, 0].tolist())
        return (history["t"][-1, 0] + np.arange(self.length))[:, None]


def delayed(*delays):
    """A planner whose plans arrive after these numbers of steps, again and again."""

    class Varying(DelayedPlanner):
        def __init__(self, plan):
            super().__init__(plan, 0)
            self.delays = itertools.cycle(delays)

        def submit(self, step, history):
            self.delay = next(self.delays)
            super().submit(step, history)

    return Varying


def executor(robot, plan, delays=(0,), **options):
    options = {"n_obs_steps": 2, "replan_every": 4, "clock": SimulatedClock(), "planner": delayed(*delays)} | options
    return ActionChunkExecutor(plan, robot.read_observation, robot.send_action, 10, **options)


# ---------------------------------------------------------------------- what goes wrong elsewhere
@pytest.mark.parametrize("delays", [(0,), (1,), (3,), (7,), (0, 5, 1, 9)])
def test_actions_are_those_of_their_step_whatever_the_delay(delays):
    """A wrong estimate of the delay makes a robot jump: here nothing is estimated."""
    robot = Robot()
    report = executor(robot, Timetable(), delays).run(steps=60)
    assert robot.track.tolist() == list(range(60))
    assert set(report.delays) == set(delays) and report.counts["held"] == 0


def test_observations_are_sampled_at_every_step_and_the_history_is_full_from_the_start():
    robot, plan = Robot(), Timetable()
    executor(robot, plan, (1,), n_obs_steps=3, replan_every=5).run(steps=20)
    planned = [seen for seen in plan.seen if seen != [0, 0, 0]]
    assert plan.seen[0] == [0, 0, 0]  # the first observation stands for those before it
    assert planned == [[t - 2, t - 1, t] for t in (5, 10, 15)]
    assert robot.reads == 20 + 4  # one per step; warm-up and first chunk


def test_a_cold_start_is_no_delay():
    """The first chunk is made at rest and starts at its first action, however long the first call takes."""

    class Cold(Timetable):
        def __call__(self, history):
            if not self.seen:
                clock.sleep_until(clock.now() + 60)
            return super().__call__(history)

    robot, plan, clock = Robot(), Cold(), SimulatedClock()
    report = executor(robot, plan, (2,), clock=clock).run(steps=20)
    assert robot.track.tolist() == list(range(20))
    assert set(report.delays) == {2} and report.late_steps == 0
    assert len(plan.seen) >= 4  # the first calls are a warm-up


def test_a_policy_slower_than_its_chunk_stops_and_goes_on_from_the_first_action():
    """While the robot stands, nothing becomes stale; a chunk from before the standstill has nothing left."""
    robot = Robot()
    report = executor(robot, lambda history: np.arange(4.0)[:, None], (10,), watchdog=60).run(steps=60)
    assert robot.track[:5].tolist() == [0, 1, 2, 3, 3]  # then it holds
    chunks = [i for i in range(1, 60) if robot.track[i - 1] == 3 and robot.track[i] == 0]
    assert len(chunks) >= 3 and all(robot.track[i : i + 4].tolist() == [0, 1, 2, 3] for i in chunks[:-1])
    assert report.counts["held"] > 30


# ---------------------------------------------------------------------- safety
def test_chunks_that_are_not_finite_or_fail_are_not_used():
    class Broken(Timetable):
        def __call__(self, history):
            chunk = super().__call__(history)
            if len(self.seen) % 3 == 0 and len(self.seen) > 4:
                chunk[2] = np.nan
            if len(self.seen) % 3 == 1 and len(self.seen) > 4:
                raise ValueError("far outside the data")
            return chunk

    robot = Robot()
    report = executor(robot, Broken(), (1,), replan_every=2).run(steps=60)
    assert robot.track.tolist() == list(range(60))
    assert report.counts["failed"] > 3 and report.counts["rejected"] > 3


@pytest.mark.parametrize("hold, expected", [(None, 1.0), ([0.0], 0.0)])
def test_without_an_action_the_robot_holds_and_the_watchdog_ends_the_run(hold, expected):
    def plan(history):
        if history["t"][-1, 0] > 0:
            raise ValueError("no idea")
        return np.ones((3, 1))

    robot = Robot()
    loop = executor(robot, plan, replan_every=1, hold=hold, watchdog=1.0)
    with pytest.raises(RobotFault, match="no usable plan for 1 s: ValueError: no idea"):
        loop.run(steps=1000)
    assert robot.track[:3].tolist() == [1, 1, 1] and set(robot.track[3:]) == {expected}
    assert 8 < loop.report.counts["held"] < 12 and "no usable plan" in loop.report.as_dict()["fault"]


@pytest.mark.parametrize("first", [np.full((4, 1), np.nan), np.zeros(4), np.zeros((0, 1)), ValueError("no")])
def test_without_a_first_chunk_the_robot_does_not_move(first):
    def plan(history):
        if isinstance(first, Exception):
            raise first
        return first

    robot = Robot()
    with pytest.raises(RobotFault, match="first chunk"):
        executor(robot, plan).run(steps=10)
    assert robot.sent == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_worker_ends_the_run():
    def plan(history):
        if history["t"][-1, 0] > 0:
            raise SystemExit
        return np.ones((50, 1))

    robot = Robot()
    loop = executor(robot, plan, planner=ThreadPlanner, clock=None, replan_every=1, watchdog=60)
    with pytest.raises(RobotFault, match="died"):
        loop.run(steps=200)
    assert len(robot.sent) < 200


def test_limits():
    limits = ActionLimits(low=[0, 0], high=[10, 20], max_step=[1, 2])
    assert limits.apply(np.array([-5.0, 30.0]), None).tolist() == [0, 20]
    assert limits.apply(np.array([4.0, 2.0]), np.array([0.0, 0.0])).tolist() == [1, 0.5]  # the direction is kept
    assert limits.apply(np.array([0.5, 2.0]), np.array([0.0, 0.0])).tolist() == [0.5, 2]
    for wrong in ({"low": 2, "high": 1}, {"max_step": 0}, {"low": [np.nan]}):
        with pytest.raises(ConfigError):
            ActionLimits(**wrong)


def test_limits_hold_for_what_is_sent():
    robot, jumps = Robot(), itertools.cycle([0.0, 100.0])
    plan = lambda history: np.full((8, 1), next(jumps))
    limits = ActionLimits(low=-5, high=50, max_step=3)
    report = executor(robot, plan, limits=limits, start=[1.0]).run(steps=80)
    assert np.abs(np.diff(robot.track, prepend=1.0)).max() <= 3 + 1e-9
    assert robot.track.min() >= -5 and robot.track.max() <= 50 and report.counts["limited"] > 10


def test_blending_shortens_the_step_at_the_seam():
    def largest_step(blend):
        robot, levels = Robot(), itertools.count()
        executor(robot, lambda history: np.full((16, 1), float(next(levels))), (1,), blend=blend).run(steps=40)
        return np.abs(np.diff(robot.track)).max()

    assert largest_step(0) == 1 and largest_step(3) == pytest.approx(0.25)


# ---------------------------------------------------------------------- the loop
def test_the_loop_never_waits_for_the_policy():
    """The worker is stuck until the loop has ended."""
    stuck = threading.Event()

    def plan(history):
        if history["t"][-1, 0] > 0:
            stuck.wait()
        return np.arange(5.0)[:, None]

    robot = Robot()
    loop = executor(robot, plan, planner=ThreadPlanner, clock=None, replan_every=1, watchdog=60)
    loop.hz = 200
    timer = threading.Timer(20, stuck.set)  # in case the loop does wait
    timer.start()
    close = ThreadPlanner.close
    try:
        ThreadPlanner.close = lambda planner: (stuck.set(), close(planner))
        report = loop.run(steps=30)
    finally:
        ThreadPlanner.close = close
        timer.cancel()
    assert report.as_dict()["steps"] >= 30 and report.counts["accepted"] == 0
    assert report.counts["held"] > 0  # after the first chunk


def test_patience_lets_a_fast_plan_count_from_its_own_step():
    robot = Robot()
    loop = executor(robot, Timetable(), planner=ThreadPlanner, clock=None, patience=10.0, watchdog=60)
    assert set(loop.run(steps=12).delays) == {0}


def test_steps_whose_time_has_passed_are_skipped_and_counted():
    robot, clock = Robot(), SimulatedClock()

    class Slow(Robot):
        def send_action(self, action):
            super().send_action(action)
            if len(self.sent) == 5:
                clock.sleep_until(clock.now() + 0.35)

    robot = Slow()
    report = executor(robot, Timetable(), clock=clock, replan_every=100).run(steps=12)
    assert robot.track.tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 10, 11]  # the actions of steps 5 and 6 were due meanwhile
    assert (report.as_dict()["steps"], report.counts["missed"], report.late_steps) == (12, 2, 3)


def test_the_loop_may_have_real_time_priority_and_gives_it_back():
    """Whether it is granted depends on the system; the run is the same."""
    robot, policies = Robot(), []
    before = os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else None
    loop = executor(robot, Timetable(), real_time=True)
    loop.send_action = lambda action: (robot.send_action(action), before is not None and policies.append(policy()))
    policy = lambda: os.sched_getscheduler(0) & ~getattr(os, "SCHED_RESET_ON_FORK", 0)
    report = loop.run(steps=3)
    assert robot.track.tolist() == [0, 1, 2] and report.as_dict()["real_time"] in (True, False)
    if before is not None:
        assert os.sched_getscheduler(0) == before
        assert (set(policies) == {os.SCHED_FIFO}) == report.real_time


@pytest.mark.skipif(not hasattr(os, "SCHED_FIFO"), reason="Linux has real-time threads")
def test_the_worker_shares_the_priority():
    planner = ThreadPlanner(lambda history: np.zeros((2, 1)))
    with real_time_priority(True, planner.thread_id) as granted:
        levels = [os.sched_getparam(thread).sched_priority for thread in (0, planner.thread_id)]
        assert levels == ([LOOP, WORKER] if granted else [0, 0])
        planner.close()  # a worker that has ended does not disturb
    assert os.sched_getparam(0).sched_priority == 0


def test_stop_ends_the_run():
    robot = Robot()
    loop = executor(robot, Timetable())
    loop.send_action = lambda action: (robot.send_action(action), len(robot.sent) == 7 and loop.stop())
    loop.run()
    assert len(robot.sent) == 7


def test_report_as_json_and_plot(tmp_path):
    report = executor(Robot(), Timetable(), (1,)).run(steps=40)
    report.save(tmp_path)
    data = json.loads((tmp_path / "cadence.json").read_text())
    assert data["steps"] == 40 and data["late_steps"] == 0 and data["plans"]["delay_steps"] == {"1": 9}
    assert data["achieved_hz"] == pytest.approx(10) and set(data["stages_ms"]) == {"read", "plan", "send"}
    assert (tmp_path / "cadence.png").stat().st_size > 1000 and "40 steps at 10.0 of 10 Hz" in str(report)


def test_wrong_options_are_refused():
    with pytest.raises(ConfigError, match="n_obs_steps"):
        ActionChunkExecutor(Timetable(), Robot().read_observation, Robot().send_action, 10)
    with pytest.raises(ConfigError, match="hz"):
        executor(Robot(), Timetable(), watchdog=0)
