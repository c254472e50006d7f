"""robomimic's hdf5 files: valid ones with changed bytes, and well-formed but unusual ones."""

from __future__ import annotations

import pathlib
import pickle

import h5py
import numpy as np

from benchmarks.fuzz import Finding
from benchmarks.fuzz_targets.mutate import Creates, FileTarget, mutate_bytes, pick
from diffusion_policy.common.errors import DataError
from diffusion_policy.storage.hdf5_reader import Hdf5Process

KEYS = ("actions", "obs/object", "obs/robot0_eef_pos")
SIZES = {"actions": 7, "obs/object": 10, "obs/robot0_eef_pos": 3}
LENGTHS = (12, 15, 9)


def values(key: str, demo: int) -> np.ndarray:
    return np.random.default_rng([len(key), demo]).normal(size=(LENGTHS[demo], SIZES[key]))


def write(path: pathlib.Path, libver: str = "earliest", **arguments) -> None:
    with h5py.File(path, "w", libver=libver) as file:
        data = file.create_group("data")
        data.attrs["env_args"] = '{"env_name": "Fake", "type": 1, "env_kwargs": {}}'
        for demo in range(len(LENGTHS)):
            group = data.create_group(f"demo_{demo}")
            group.attrs["num_samples"] = LENGTHS[demo]
            for key in KEYS:
                group.create_dataset(key, data=values(key, demo), **arguments)


class Hdf5Target(FileTarget):
    """Oracle: the result equals what h5py reads from the same file.

    If the whole file is checksummed (`latest` with fletcher32), it equals what was written.
    """

    FORMATS = {
        "contiguous": {},
        "chunked": {"chunks": (5, 2)},
        "gzip": {"chunks": (5, 3), "compression": "gzip", "shuffle": True},
        "lzf": {"chunks": True, "compression": "lzf"},
        "fletcher32": {"chunks": (6, 3), "fletcher32": True},
        "latest": {"libver": "latest", "chunks": (6, 3), "fletcher32": True},
    }

    def __init__(self, folder: pathlib.Path, canary: pathlib.Path):
        self.path, self.canary, self.process = folder / "case.hdf5", canary, Hdf5Process(time_limit=60)
        self.bases = {}
        for name, arguments in self.FORMATS.items():
            write(self.path, **arguments)
            self.bases[name] = self.path.read_bytes()
        self.elsewhere = folder / "other.hdf5"
        write(self.elsewhere)

    def close(self) -> None:
        self.process.close()

    def check(self, value) -> str:
        rng = self.rng(value)
        base = pick(rng, self.bases)
        changed = rng.random() < 0.8
        if changed:
            self.path.write_bytes(mutate_bytes(rng, self.bases[base], self.bases[pick(rng, self.bases)]))
            odd = False
        else:
            write(self.path, **self.FORMATS[base])
            odd = self._restructure(rng)
        try:
            demos = self.process.read(self.path, KEYS)
        except DataError as error:
            if "took longer" in str(error) or "signal" in str(error):
                return "DataError (libhdf5 crashed or hung)"
            return type(error).__name__
        if odd:
            raise Finding(f"read a file that should be refused: {odd}")
        ends = demos.episode_ends
        for key, found in demos.arrays.items():
            if len(found) != ends[-1] or not np.isfinite(found).all():
                raise Finding(f"{key} was read with shape {found.shape} and ends {ends}, or is not finite")
            if base == "latest" and changed:
                expected = np.concatenate([values(key, demo) for demo in range(len(LENGTHS))])
            else:
                with h5py.File(self.path, "r") as file:
                    expected = np.concatenate([file[f"data/demo_{demo}/{key}"][:] for demo in range(len(ends))])
            # The Fletcher checksum of zeros is zero, so overwriting both with zeros cannot be detected.
            if found.shape != expected.shape or not ((found == expected) | (found == 0) & (base == "latest")).all():
                raise Finding(
                    f"{key} was read with other values than {'were written' if base == 'latest' else 'by h5py'}"
                )
        return "read"

    def _restructure(self, rng) -> str:
        """Change the file with h5py; return how, or '' if it is still valid."""
        with h5py.File(self.path, "r+") as file:
            name = f"data/demo_{int(rng.integers(len(LENGTHS)))}"
            key = f"{name}/{pick(rng, KEYS)}"
            shape = file[key].shape
            how = pick(
                rng,
                [
                    "nothing",
                    "missing",
                    "soft",
                    "external",
                    "virtual",
                    "storage",
                    "shape",
                    "length",
                    "empty",
                    "nan",
                    "object",
                    "vlen",
                    "reference",
                    "compound",
                    "string",
                    "scalar",
                    "gap",
                    "name",
                    "env_args",
                    "pickle",
                    "group",
                    "bool",
                    "huge",
                    "unwritten",
                    "enum",
                    "same",
                    "attribute",
                    "filter",
                    "dtype",
                ],
            )
            if how not in ("nothing", "gap", "name", "env_args", "pickle", "attribute"):
                del file[key]
            match how:
                case "soft":
                    file[key] = h5py.SoftLink(pick(rng, ["/data/demo_0/actions", "/nowhere", key]))
                case "external":
                    file[key] = h5py.ExternalLink(
                        pick(rng, [str(self.elsewhere), "/etc/passwd", "nothing"]), "/data/demo_0/actions"
                    )
                case "virtual":
                    layout = h5py.VirtualLayout(shape=shape, dtype="f8")
                    layout[:] = h5py.VirtualSource(str(self.elsewhere), "data/demo_0/actions", shape=shape)
                    file.create_virtual_dataset(key, layout)
                case "storage":
                    file.create_dataset(key, shape, "f8", external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)])
                case "shape":
                    file[key] = np.zeros((shape[0], shape[1] + 1))
                case "length":
                    file[key] = np.zeros((shape[0] + 1, shape[1]))
                case "empty":
                    file[key] = np.zeros((0, shape[1]))
                case "nan":
                    data = np.zeros(shape)
                    data[int(rng.integers(shape[0])), 0] = pick(rng, [np.nan, np.inf, -np.inf])
                    file[key] = data
                case "object" | "vlen":
                    file.create_dataset(key, shape, h5py.vlen_dtype(np.float64))
                case "reference":
                    file.create_dataset(key, shape, h5py.ref_dtype)
                case "compound":
                    file.create_dataset(key, shape, [("a", "f8")])
                case "string":
                    file.create_dataset(key, shape, pick(rng, ["S8", h5py.string_dtype()]))
                case "scalar":
                    file[key] = pick(rng, [1.0, h5py.Empty("f8")])
                case "gap":
                    file.move(name, "data/demo_7")
                case "name":
                    other = pick(rng, ["data/demo_", "data/demo_-1", "data/demo_00", "data/épisode", "elsewhere"])
                    file.move(name, other)
                    if name.endswith(str(len(LENGTHS) - 1)) and not other.startswith("data/"):
                        return ""  # a valid file without its last demonstration
                case "env_args":
                    file["data"].attrs["env_args"] = pick(rng, ["{", "[1]", b"\xff\xfe", 3, [1, 2], "[" * 60_000])
                case "pickle":
                    file["data"].attrs["env_args"] = np.void(pickle.dumps(Creates(self.canary)))
                    file[name].attrs["num_samples"] = np.void(pickle.dumps(Creates(self.canary)))
                case "group":
                    file.create_group(key)
                case "bool" | "enum":
                    file.create_dataset(key, shape, bool if how == "bool" else h5py.enum_dtype({"a": 1}))
                case "huge":
                    file.create_dataset(
                        key,
                        (10 ** int(rng.integers(6, 17)), shape[1]),
                        "f8",
                        chunks=(1000, shape[1]),
                        compression="gzip",
                    )
                case "unwritten":
                    file.create_dataset(key, shape, "f8", chunks=pick(rng, [None, True]))
                case "same":
                    file[key] = file["data/demo_0/obs/object" if "demo_0" not in key else "data/demo_1/obs/object"]
                case "attribute":
                    file[name].attrs["num_samples"] = pick(rng, [0, -1, 10**18, 3.7, "many", [1, 2]])
                case "filter":
                    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                    plist.set_chunk(shape)
                    plist.set_filter(
                        h5py.h5z.FILTER_NBIT if rng.random() < 0.5 else h5py.h5z.FILTER_SCALEOFFSET,
                        h5py.h5z.FLAG_OPTIONAL,
                        (2, 0),
                    )
                    group, _, last = key.rpartition("/")
                    dataset = h5py.Dataset(
                        h5py.h5d.create(
                            file[group].id, last.encode(), h5py.h5t.NATIVE_INT64, h5py.h5s.create_simple(shape), plist
                        )
                    )
                    dataset[:] = 1
                case "dtype":
                    file[key] = np.ones(shape, "f4")
            return "" if how == "nothing" else f"{how} at {key}"
