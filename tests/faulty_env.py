"""A PushT environment that fails on request. A small module because the environment processes import it."""

import ctypes
import os
import pathlib
import signal
import sys
import time

from diffusion_policy.common.errors import ConfigError
from diffusion_policy.env.pusht.pusht_env import PushTEnv


def misconfigured():
    raise ConfigError("no such robot")


def fail(kind):
    if kind == "raise":
        raise OSError("no more physics")
    if kind == "raise what cannot be pickled":
        raise type("Local", (Exception,), {})("of no module")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "segfault":
        ctypes.string_at(0)
    if kind == "exit":
        os._exit(3)
    if kind == "sys.exit":
        sys.exit(4)
    if kind == "hang":
        time.sleep(3600)
    if kind == "hang, deaf to signals":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(3600)
    raise AssertionError(kind)


class FaultyEnv(PushTEnv):
    """PushT with `faults`: {seed: [kind, where, how often]}.

    `where` is 'build' (seed: None), 'reset' or a step number. Files in `folder` count the faults.
    """

    def __init__(self, folder, faults, **kwargs):
        super().__init__(**kwargs)
        self.folder, self.faults = pathlib.Path(folder), faults
        self._perhaps(None, "build")

    def _perhaps(self, seed, where):
        kind, at, times = self.faults.get(seed, (None, None, 0))
        count = self.folder / str(seed)
        if at == where and (not count.exists() or count.stat().st_size < times):
            with open(count, "ab") as file:
                file.write(b".")
            fail(kind)

    def reset(self, *, seed=None, options=None):
        self.taken = 0
        self._perhaps(seed, "reset")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.taken += 1
        self._perhaps(self._seed, self.taken)
        return super().step(action)
