"""A few hundred cases of the fuzzer (make fuzz runs ten thousand), its detection of faults, and its worst finds."""

import json
import os
import signal

import numpy as np
import pytest
from hypothesis import strategies as st

from benchmarks import fuzz
from benchmarks.fuzz_targets import load, mutate

CASES = {
    "zarr": 50,
    "hdf5": 50,
    "checkpoint": 30,
    "observations": 50,
    "overrides": 6,
    "hostile": 30,
    "downloads": 12,
    "recordings": 30,
    "onnx": 30,
}


def test_no_findings():
    result = fuzz.fuzz(CASES, seed=20)
    assert not result["findings"], json.dumps(result["findings"][:3], indent=1)
    for target, count in CASES.items():
        outcomes = result["targets"][target]["outcomes"]
        assert sum(outcomes.values()) == count and len(outcomes) > 1
        # Neither all read nor all refused. Of a few overrides, all may be wrong.
        assert any(outcome.endswith("read") for outcome in outcomes) or target == "overrides"
    assert "zarr" in fuzz.table(result)


@pytest.mark.parametrize("target", ["hdf5", "observations"])
def test_a_case_is_made_from_its_seed_and_number_alone(target):
    """Also when it is run alone."""
    kind = load(target)
    runner = kind.__new__(kind)
    if target == "hdf5":
        assert runner.rng((3, 70)).bytes(50) == runner.rng((3, 70)).bytes(50) != runner.rng((3, 71)).bytes(50)
        return
    runner.strategy = st.lists(st.integers(), max_size=5)
    seen, again = {}, {}
    runner.inputs(3, 0, 120, seen.__setitem__)
    runner.inputs(3, 70, 71, again.__setitem__)
    assert set(range(120)) <= set(seen) and again[70] == seen[70] and len({str(value) for value in seen.values()}) > 30


# What the fuzzer must notice


class Misbehaves:
    """A target, instead of a reader."""

    def __init__(self, folder, canary):
        self.canary = canary

    def inputs(self, seed, start, stop, use):
        for number in range(start, stop):
            use(number, number)

    def describe(self, value):
        return str(value)

    def check(self, value):
        if value == 1:
            raise KeyError("not a clear error")
        if value == 2:
            self.canary.write_text("")
        if value == 3:
            raise SystemExit
        if value == 4:
            bytearray(700_000_000)[::4096] = b"x" * len(range(0, 700_000_000, 4096))
        if value == 5:
            raise fuzz.Finding("a wrong value")
        return "read"


def test_what_counts_as_a_finding(tmp_path):
    np.ones(150_000_000)  # what the process had before a case, here 1.2 GB, does not hide what the case takes
    target = Misbehaves(tmp_path, tmp_path / "canary")
    answers = [fuzz.judged(target, number, target.canary) for number in range(6)]
    assert answers[0]["outcome"] == "read" and "finding" not in answers[0]
    found = ("KeyError", "a payload ran", "SystemExit", "memory grew", "a wrong value")
    for answer, words in zip(answers[1:], found, strict=True):
        assert words in answer["finding"] and answer["outcome"] == "finding"


def test_a_crash_and_a_hang_are_findings_and_the_next_case_runs(monkeypatch):
    """Of the worker, from outside: the process is killed while it runs one case, and stopped while it runs another."""
    with fuzz.Worker() as worker:
        answers = worker.run("zarr", 0, 0, 40)
        assert next(answers)["number"] == 0
        process = worker.process
        os.kill(process.pid, signal.SIGKILL)
        rest = list(answers)
        crashed = [answer for answer in rest if "finding" in answer]
        assert len(crashed) == 1 and "crash (signal 9)" in crashed[0]["finding"]
        assert rest[-1]["number"] == 39 and worker.process.pid != process.pid
        answers = worker.run("zarr", 0, 0, 3)
        assert next(answers)["number"] == 0
        worker.wall_seconds = 1.0
        os.kill(worker.process.pid, signal.SIGSTOP)
        assert "hang" in [answer.get("finding") for answer in answers]


def test_payloads_do_what_they_threaten(tmp_path):
    """Without our readers they run: a canary that cannot sing would prove nothing."""
    import pickle

    for seed in range(20):
        canary = tmp_path / f"canary{seed}"
        pickle.loads(mutate.pickled_payload(np.random.default_rng(seed), canary))
        assert canary.exists()
