import os
import signal
import time

import numpy as np
import pytest

from benchmarks import stalls
from benchmarks.runtime import beside_stalls
from diffusion_policy.real_world import CadenceReport


def test_the_overlap_counts_a_moment_once():
    begin, end = np.array([0.0, 1.0, 5.0]), np.array([1.0, 2.0, 6.0])
    found = [(0.5, 1.5), (1.2, 1.6), (7.0, 8.0)]
    np.testing.assert_allclose(stalls.overlap(begin, end, found), [0.5, 0.6, 0.0])
    np.testing.assert_array_equal(stalls.overlap(begin, end, []), [0.0, 0.0, 0.0])


def test_late_steps_are_the_loops_own_unless_a_stall_explains_them():
    report = CadenceReport(hz=50)
    for due, end in [(0.00, 0.001), (0.02, 0.055), (0.04, 0.056), (0.06, 0.061)]:
        report.tick(due, end, end, end, end)
    assert report.late_steps == 1
    assert beside_stalls(report, []) == {"stalls": 0, "longest_stall_ms": 0.0, "late_without_stalls": 1}
    assert beside_stalls(report, [(0.021, 0.051)])["late_without_stalls"] == 0
    assert beside_stalls(report, [(0.021, 0.025)])["late_without_stalls"] == 1


@pytest.mark.skipif(not hasattr(os, "SCHED_FIFO"), reason="Linux has real-time threads")
def test_the_probe_finds_a_stall():
    """A probe that is stopped for a while is what a machine that stands still looks like to it."""
    found: list[tuple[float, float]] = []
    others = children()  # that earlier tests have started
    with stalls.watched(found) as watched:
        if not watched:
            pytest.skip("real-time priority is not permitted here")
        probe = next(pid for pid in children() if pid not in others)
        begin = time.perf_counter()
        os.kill(probe, signal.SIGSTOP)
        stopped = time.perf_counter()  # on a busy machine well after `begin`
        time.sleep(0.05)
        os.kill(probe, signal.SIGCONT)
        time.sleep(0.1)
    assert any(begin - 0.01 < first < stopped + 0.01 and until - first > 0.04 for first, until in found), found


def children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]
