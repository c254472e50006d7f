"""The frame cache that is filled episode by episode."""

import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from diffusion_policy.common.errors import DataError
from diffusion_policy.storage.episode_frames import episode_frames
from diffusion_policy.storage.frame_cache import FileFrames, MemoryFrames
from tests.util import ROOT

LENGTHS, SIZE = [3, 5, 2, 4], 7


def frames_of(number):
    return np.random.default_rng(number).integers(0, 256, (LENGTHS[number], SIZE), dtype=np.uint8)


class Reader:
    """Counts the episodes that are read; fails at those in `broken`."""

    def __init__(self, *broken):
        self.read, self.broken = [], broken

    def __call__(self, number):
        self.read.append(number)
        if number in self.broken:
            yield frames_of(number)[0].tobytes()
            raise DataError(f"episode {number} is broken")
        for frame in frames_of(number):
            yield frame.tobytes()


def check(frames):
    expected = np.concatenate([frames_of(i) for i in range(4)])
    assert np.array_equal(frames.take(torch.arange(14)).numpy(), expected)


def test_frames_are_in_order_and_read_once(tmp_path):
    file, reader = str(tmp_path / "cache/a.npy"), Reader()
    check(episode_frames(file, LENGTHS, SIZE, reader))
    assert sorted(reader.read) == [0, 1, 2, 3]
    again = episode_frames(file, LENGTHS, SIZE, reader)
    check(again)
    assert isinstance(again, FileFrames) and len(reader.read) == 4
    assert [path.name for path in pathlib.Path(file).parent.iterdir()] == ["a.npy"]


def test_it_continues_with_the_episodes_that_are_missing(tmp_path):
    file = str(tmp_path / "a.npy")
    with pytest.raises(DataError, match="episode 2 is broken"):
        episode_frames(file, LENGTHS, SIZE, Reader(2))
    done = set(map(int, (tmp_path / "a.npy.done").read_text().split()))
    assert not (tmp_path / "a.npy").exists() and 2 not in done and {0, 1} <= done
    reader = Reader()
    check(episode_frames(file, LENGTHS, SIZE, reader))
    assert set(reader.read) == {0, 1, 2, 3} - done
    assert not (tmp_path / "a.npy.done").exists() and not (tmp_path / "a.npy.partial").exists()


def test_a_killed_process_is_continued(tmp_path):
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[2])\n"
        "from tests.unit.test_episode_frames import *\n"
        "def read(number):\n"
        "    yield from Reader()(number)\n"
        "    if number == 3: print('ready', flush=True); time.sleep(60)\n"
        "import diffusion_policy.storage.episode_frames as module\n"
        "module._cores = lambda: 1\n"
        "episode_frames(sys.argv[1], LENGTHS, SIZE, read)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "a.npy"), str(ROOT)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    reader = Reader()
    check(episode_frames(str(tmp_path / "a.npy"), LENGTHS, SIZE, reader))
    assert reader.read == [3]


def test_a_half_written_line_of_the_journal_does_not_count(tmp_path):
    with pytest.raises(DataError):
        episode_frames(str(tmp_path / "a.npy"), LENGTHS, SIZE, Reader(1))
    (tmp_path / "a.npy.done").write_text("0\n1")
    reader = Reader()
    check(episode_frames(str(tmp_path / "a.npy"), LENGTHS, SIZE, reader))
    assert sorted(reader.read) == [1, 2, 3]


def test_too_few_frames_are_an_error(tmp_path):
    with pytest.raises(DataError, match="episode 1 has 4 frames, but 5 steps"):
        episode_frames(str(tmp_path / "a.npy"), LENGTHS, SIZE, lambda i: (f.tobytes() for f in frames_of(i)[:4]))


def test_a_damaged_file_is_made_again(tmp_path):
    file = tmp_path / "a.npy"
    episode_frames(str(file), LENGTHS, SIZE, Reader())
    file.write_bytes(file.read_bytes()[:-1])
    check(episode_frames(str(file), LENGTHS, SIZE, Reader()))


def test_without_a_writable_folder_frames_are_kept_in_memory(tmp_path):
    (tmp_path / "file").write_text("")
    frames = episode_frames(str(tmp_path / "file/a.npy"), LENGTHS, SIZE, Reader())
    check(frames)
    assert isinstance(frames, MemoryFrames)
