"""Short benchmark of the policy server: overhead of a call, several clients, bad input. See `benchmarks.server`."""

from __future__ import annotations

import pathlib
import tempfile
import warnings

from benchmarks.server import fuzz, many_clients, overhead
from benchmarks.untrained import export_untrained


def run(quick: bool = False) -> list[dict]:
    calls, requests, pieces = (50, 80, 100) if quick else (500, 4000, 5000)
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of openpi's client with current websockets
        folder = pathlib.Path(name)
        small = export_untrained(folder / "small", "train_idp_mlp_lowdim", "preset=cpu")
        return [*overhead(folder, calls), *many_clients(small, requests), *fuzz(small, pieces)]
