"""Recordings are streamed: the memory of reading and inspecting them does not grow with their episodes."""

import os
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.recordings import write_lerobot_v2
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.dataset.conversion import to_lerobot
from diffusion_policy.dataset.recordings import open_recordings
from tests.util import ROOT

FEW, MANY, STEPS = 10, 200, 6000
ADDED = (MANY - FEW) * STEPS * 2 * 4 * 4 / 1e6  # MB of the states and actions of the other episodes

# Peaks are VmHWM: ru_maxrss would start with the memory of the process that started this one.
CHILD = """
import pathlib, sys
from diffusion_policy.dataset.inspection import measure
from diffusion_policy.dataset.recordings import open_recordings

def peak(process):
    lines = pathlib.Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("VmHWM"))

what, path = sys.argv[1:]
recordings = open_recordings(path)
kept = []
if what == "inspect":
    measure(recordings, quiet=True)
else:
    for index in range(len(recordings)):
        episode = recordings.episode(index)
        kept += [episode] if what == "keep" else []
print(peak("self"), max([peak(each.child.pid) for each in recordings.pool.idle], default=0))
"""


def growth(recorded, what: str, kind: str) -> list[float]:
    """Share of the other episodes' numbers by which the peak of the process, and that of its reader of files, grows."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    peaks = []
    for count in (FEW, MANY):
        words = [sys.executable, "-c", CHILD, what, str(recorded[kind, count])]
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        peaks.append([float(word) for word in done.stdout.split()])
    return [(many - few) / ADDED for few, many in zip(*peaks, strict=True)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """{(format, episodes): path} of the same long episodes."""
    folder, out = tmp_path_factory.mktemp("memory"), {}
    for count in (FEW, MANY):
        lerobot = write_lerobot_v2(folder / f"v2_{count}", (STEPS,) * count, cameras=False)
        out |= {("lerobot v2.1", count): lerobot, ("npz", count): folder / f"npz_{count}"}
        out |= {("lerobot v3", count): folder / f"v3_{count}", ("zarr", count): folder / f"{count}.zarr"}
        source = open_recordings(lerobot)
        to_lerobot(source, out["lerobot v3", count], quiet=True)
        episodes = [source.episode(index) for index in range(count)]
        out["npz", count].mkdir()
        for index, episode in enumerate(episodes):
            np.savez(out["npz", count] / f"take_{index:03d}.npz", **episode)
        data = {key: np.concatenate([episode[key] for episode in episodes]) for key in episodes[0]}
        ends = STEPS * np.arange(1, count + 1)
        ReplayBuffer({"data": data, "meta": {"episode_ends": ends}}).save_to_path(out["zarr", count])
    return out


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the peaks are read from Linux' /proc")
class TestMemory:
    @pytest.mark.parametrize("kind", ["lerobot v2.1", "lerobot v3", "zarr", "npz"])
    def test_reading_does_not_grow_with_the_episodes(self, recorded, kind):
        assert max(growth(recorded, "read", kind)) < 0.4

    def test_inspecting_does_not_grow_with_the_episodes(self, recorded):
        assert max(growth(recorded, "inspect", "lerobot v2.1")) < 0.4

    def test_the_measurement_sees_episodes_that_are_kept(self, recorded):
        assert growth(recorded, "keep", "npz")[0] > 0.8
