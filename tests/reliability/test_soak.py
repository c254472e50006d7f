"""The instruments of benchmarks/soak.py, and a run too short to judge."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import soak


def rows(growth=0.0, handles=lambda epoch: 20, noise=0.0, epochs=40, level=300e6):
    rng = np.random.default_rng(0)
    return [
        {
            "epoch": e,
            "step": 1000 * e + 500,
            "handles": handles(e),
            "threads": 8,
            "tree_handles": 60,
            "tree_processes": 6,
            **{key: level + growth * 1000 * e + noise * rng.standard_normal() for key in soak.MEMORY},
        }
        for e in range(epochs)
    ]


def test_slope_is_that_of_least_squares():
    x = np.arange(20.0)
    noise = np.where(np.arange(20) % 2, 1.0, -1.0)
    value, error = soak.slope(x, 3 * x + 7 + noise)
    fit, covariance = np.polyfit(x, 3 * x + 7 + noise, 1, cov=True)
    assert value == pytest.approx(fit[0]) and error == pytest.approx(covariance[0, 0] ** 0.5)


@pytest.mark.parametrize(
    "changes, ok",
    [
        ({}, True),
        ({"noise": 1e6}, True),
        ({"growth": 20.0}, True),  # 6 MB in a whole run of 300 MB
        ({"growth": 100.0, "noise": 1e5}, False),
        ({"handles": lambda epoch: 20 + epoch // 10}, False),
        ({"handles": lambda epoch: 12 if epoch == 0 else 20 + epoch % 2}, True),
    ],
)
def test_the_judgement(changes, ok):
    report = soak.judge(rows(**changes))
    assert report["ok"] == ok
    assert report["memory"]["rss"]["growth_per_300k_steps"] == pytest.approx(changes.get("growth", 0) / 1000, abs=0.05)


def test_growth_before_the_second_half_is_warm_up():
    warm = [{**row, **{key: row[key] - 1e6 * max(0, 10 - row["epoch"]) for key in soak.MEMORY}} for row in rows()]
    assert soak.judge(warm)["ok"]


def test_an_epoch_is_judged_by_its_middle():
    samples = [{"step": step, "rss": 1 if 20 <= step % 100 <= 80 else 99} for step in range(0, 300, 5)]
    assert [(row["epoch"], row["rss"]) for row in soak.by_epoch(samples, 100)] == [(0, 1), (1, 1), (2, 1)]


def test_what_is_measured_of_a_process_and_its_children():
    before = soak.sample(os.getpid())
    held = np.ones(10_000_000)  # too large for the allocator to take from what it has
    with open(os.devnull), subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        now = soak.sample(os.getpid())
        assert child.pid in soak.tree(os.getpid())
        child.communicate(b"\n")
    assert now["anonymous"] - before["anonymous"] == pytest.approx(held.nbytes, rel=0.2)
    assert now["handles"] - before["handles"] == 2  # the file and the pipe
    assert now["tree_processes"] - before["tree_processes"] == 1
    assert now["rss"] >= now["pss"] >= now["uss"] and now["tree_anonymous"] > now["anonymous"]


def test_a_short_run(tmp_path):
    report, samples, epochs = soak.soak(steps=200, epoch=40, folder=tmp_path, interval=0.05)
    assert report["counts"]["tree_processes"]["last_third"] >= 5  # training, loader, fork server, two environments
    assert report["counts"]["tree_processes"]["constant"]
    assert report["memory"]["rss"]["points"] >= 2 and len(samples) > 20
    assert len(list((tmp_path / "run" / "media").iterdir())) == 5
    soak.draw(samples, epochs, tmp_path / "soak.png")
    assert (tmp_path / "soak.png").stat().st_size < 60_000
    json.dumps(report)
