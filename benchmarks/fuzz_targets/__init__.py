"""The fuzz targets. A target makes its valid inputs once, and has these methods.

inputs(seed, start, stop, use)   calls use(number, value) for the values of (seed, number)
check(value) -> outcome          'read', or the name of a clear error; raises for anything else
describe(value) -> str           for the report of a finding
"""

import importlib

NAMES = {
    "zarr": "zarr_files.ZarrTarget",
    "hdf5": "hdf5_files.Hdf5Target",
    "checkpoint": "checkpoints.CheckpointTarget",
    "overrides": "overrides.OverrideTarget",
    "observations": "observations.ObservationTarget",
    "hostile": "hostile.HostileTarget",
    "downloads": "downloads.DownloadTarget",
    "recordings": "recordings.RecordingsTarget",
    "onnx": "onnx_files.OnnxTarget",
}


def load(name: str) -> type:
    """Import the class of a target; only when needed, since some need torch and the others start faster without."""
    module, _, kind = NAMES[name].partition(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), kind)
