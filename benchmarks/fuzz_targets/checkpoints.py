"""Checkpoints: bytes changed, archives rebuilt around changed pickles, payloads of other types, programs."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import zipfile

import numpy as np
import torch

from benchmarks.fuzz import Finding
from benchmarks.fuzz_targets.mutate import (
    ODD,
    Creates,
    FileTarget,
    mutate_bytes,
    mutate_structure,
    pick,
    pickled_payload,
)
from benchmarks.fuzz_targets.small import small_config, workspace_of
from diffusion_policy.common.errors import CheckpointError
from diffusion_policy.storage import checkpoint_io


def rebuilt(entries: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", kind) as file:
        for name, data in entries.items():
            file.writestr(name, data)
    return out.getvalue()


def equal(a, b) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and (a == b or (a != a and b != b))


class CheckpointTarget(FileTarget):
    """Oracle: changed bytes give an error or the written values, a rebuilt archive an error or a valid payload."""

    def __init__(self, folder: pathlib.Path, canary: pathlib.Path):
        self.path, self.canary = folder / "case.ckpt", canary
        workspace = workspace_of(small_config(folder), folder)
        workspace.prepare()
        good = workspace.save_checkpoint(folder / "good.ckpt")
        self.data = pathlib.Path(good).read_bytes()
        self.payload = checkpoint_io.load(good)
        self.raw = torch.load(good, weights_only=True)
        with zipfile.ZipFile(good) as file:
            self.entries = {name: file.read(name) for name in file.namelist()}

    def check(self, value) -> str:
        rng = self.rng(value)
        kind = pick(rng, ["bytes"] * 4 + ["pickle"] * 3 + ["types"] * 4 + ["entries", "bomb", "program", "whole"])
        self.path.write_bytes(getattr(self, f"_{kind}")(rng))
        try:
            payload = checkpoint_io.load(self.path)
        except CheckpointError as error:
            if len(str(error)) < 20:
                raise Finding(f"the message says nothing: {error}") from error
            return type(error).__name__
        if kind == "bytes" and not equal(payload, self.payload):
            raise Finding("changed bytes were read as another payload")
        if kind in ("bomb", "program"):
            raise Finding(f"a {kind} was read")
        if not (
            isinstance(payload["cfg"], dict)
            and isinstance(payload["state_dicts"], dict)
            and isinstance(payload.get("attributes", {}), dict)
            and all(isinstance(state, dict) for state in payload["state_dicts"].values())
        ):
            raise Finding("a payload of the wrong structure was read")
        return "read"

    def _bytes(self, rng) -> bytes:
        return mutate_bytes(rng, self.data)

    def _pickle(self, rng) -> bytes:
        """Rebuild the archive with correct checksums."""
        name = next(name for name in self.entries if name.endswith("data.pkl"))
        return rebuilt({**self.entries, name: mutate_bytes(rng, self.entries[name])})

    def _entries(self, rng) -> bytes:
        entries = dict(self.entries)
        name, other = pick(rng, entries), pick(rng, entries)
        match int(rng.integers(4)):
            case 0:
                del entries[name]
            case 1:
                entries[name], entries[other] = entries[other], entries[name]
            case 2:
                entries[name] = mutate_bytes(rng, entries[name])
            case 3:
                entries[name + pick(rng, ["x", "/", "\x00"])] = entries.pop(name)
        return rebuilt(entries)

    def _types(self, rng) -> bytes:
        out = io.BytesIO()
        odd = [
            *ODD,
            (1, 2),
            torch.zeros(2),
            torch.zeros(2, dtype=torch.float64),
            np.float64(1),
            {1: 2},
            {"_target_": "os.system", "command": "true"},
        ]
        torch.save(mutate_structure(rng, _plain(self.raw), odd), out)
        return out.getvalue()

    def _bomb(self, rng) -> bytes:
        kind = int(rng.integers(3))
        if kind == 0:
            name = pick(rng, self.entries)
            return rebuilt({**self.entries, name: bytes(50_000_000)}, zipfile.ZIP_DEFLATED)
        if kind == 1:
            return rebuilt(self.entries, int(pick(rng, [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])))
        out = io.BytesIO()  # a small storage behind a large tensor
        torch.save({**self.raw, "state_dicts": {"model": torch.zeros(1).expand(10**6, 10**6)}}, out)
        return out.getvalue()

    def _program(self, rng) -> bytes:
        match int(rng.integers(5)):
            case 0:
                return pickled_payload(rng, self.canary)
            case 1:
                name = next(name for name in self.entries if name.endswith("data.pkl"))
                return rebuilt({**self.entries, name: pickled_payload(rng, self.canary)})
            case 2:
                out = io.BytesIO()
                torch.save(
                    {
                        **self.raw,
                        pick(rng, ["cfg", "state_dicts", "attributes", "format", "x"]): Creates(
                            self.canary, pick(rng, [open, os.system])
                        ),
                    },
                    out,
                )
                return out.getvalue()
            case 3:
                out = io.BytesIO()
                torch.save(
                    {**self.raw, "attributes": {"x": Creates(self.canary)}}, out, _use_new_zipfile_serialization=False
                )
                return out.getvalue()
        return pickle.dumps({**_plain(self.raw, tensors=False), "x": Creates(self.canary)})

    def _whole(self, rng) -> bytes:
        """Write something else with torch.save, or no torch file at all."""
        out = io.BytesIO()
        torch.save(
            pick(
                rng,
                [
                    None,
                    3,
                    "text",
                    [],
                    {},
                    {"cfg": 1, "state_dicts": 2},
                    {"cfg": {}, "state_dicts": {"model": 3}},
                    {"cfg": {}, "state_dicts": []},
                    {"cfg": {"policy": None}, "state_dicts": {}, "format": "x"},
                    torch.zeros(3),
                    {"format": 10**9, "cfg": {}, "state_dicts": {}},
                ],
            ),
            out,
        )
        return pick(
            rng,
            [
                out.getvalue(),
                rng.bytes(int(rng.integers(0, 3000))),
                b"",
                b"PK\x03\x04",
                b"\x80\x02.",
                out.getvalue()[:-30],
            ],
        )


def _plain(value, tensors: bool = True):
    """Convert to plain dicts, so that every value can be changed."""
    if isinstance(value, dict):
        return {key: _plain(child, tensors) for key, child in value.items()}
    if isinstance(value, list):
        return [_plain(child, tensors) for child in value]
    return value if tensors or not isinstance(value, torch.Tensor) else None
