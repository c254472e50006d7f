"""The policy server as its own process, for measurements."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]


class ServerProcess:
    """A running `python -m diffusion_policy.scripts.serve`."""

    def __init__(self, checkpoint: pathlib.Path, *arguments: str):
        command = [
            "-m",
            "diffusion_policy.scripts.serve",
            "-c",
            str(checkpoint),
            "--port",
            "0",
            "-d",
            "cpu",
            *arguments,
        ]
        environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, *command], env=os.environ | environment, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        found = re.search(r"ws://[^:]+:(\d+)", self.process.stdout.readline())
        if found is None:
            raise RuntimeError("the server did not start")
        self.port = int(found[1])

    def memory(self) -> float:
        """Resident memory in MB."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]

    def alive(self) -> bool:
        return self.process.poll() is None


@contextlib.contextmanager
def running(checkpoint: pathlib.Path, *arguments: str) -> Iterator[ServerProcess]:
    server = ServerProcess(checkpoint, *arguments)
    try:
        yield server
    finally:
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)
