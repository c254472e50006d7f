"""Checkpoints and exports made to harm: every class of them, against every command that opens one.

A case is a pair of a file and a reader: load_policy, eval.py, convert_checkpoint, or a resumed training. It must end in
one clear line, or in a read. No reader may show an environment variable, write outside its output folder, or leave the
limits on time and memory that all cases have.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import os
import pathlib
import random
import shutil
from collections.abc import Callable
from typing import Any

import safetensors.torch
import torch

from benchmarks.fuzz import Finding
from benchmarks.fuzz_targets.mutate import FileTarget
from benchmarks.fuzz_targets.small import small_config, workspace_of
from diffusion_policy.common.errors import ConfigError, UserError
from diffusion_policy.policy.loading import load_policy
from diffusion_policy.scripts import convert_checkpoint
from diffusion_policy.scripts import eval as evaluate
from diffusion_policy.storage import checkpoint_io, weights_io
from diffusion_policy.workspace.changes import check_changes

SECRET = "a-secret-of-the-reader"
READERS = ("load_policy", "eval", "convert to .ckpt", "export", "resume")
BUILDERS = ("load_policy", "eval", "export")  # readers that build the policy
ALL = READERS
NORMALIZER = "normalizer.params_dict.action."


@dataclasses.dataclass
class Case:
    """A harmful file: how a good payload is changed, and which readers must refuse it."""

    name: str
    change: Callable[[dict[str, Any]], Any]
    refused_by: tuple[str, ...] = ALL


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Set the value at a dotted path of the payload; `value` may be a function of the old one."""

    def change(payload: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        node: Any = payload
        for name in parents:
            node = node[int(name) if isinstance(node, list) else name]
        node[last] = value(node[last]) if callable(value) else value

    return change


def drop(path: str) -> Callable[[dict[str, Any]], None]:
    def change(payload: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        node: Any = payload
        for name in parents:
            node = node[name]
        del node[last]

    return change


def each_weight(function: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    def change(payload: dict[str, Any]) -> None:
        for name in ("model", "ema_model"):
            state = payload["state_dicts"][name]
            key = max(state, key=lambda k: state[k].numel())
            state[key] = function(state[key])

    return change


def normalizer(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(payload: dict[str, Any]) -> None:
        for name in ("model", "ema_model"):
            payload["state_dicts"][name][NORMALIZER + key] = value

    return change


def laughs(levels: int = 30) -> dict[str, Any]:
    """References to references: 10^levels values when they are resolved."""
    out: dict[str, Any] = {"x0": "ha" * 10}
    out |= {f"x{i}": [f"${{extra.x{i - 1}}}"] * 10 for i in range(1, levels)}
    return out


def shared(levels: int = 40) -> list[Any]:
    """One list inside another twice, and so on: small in a pickle, 2^levels values when it is copied."""
    out: list[Any] = [1]
    for _ in range(levels):
        out = [out, out]
    return out


def nested(levels: int = 400) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for _ in range(levels):
        out = {"a": out}
    return out


def itself() -> list[Any]:
    out: list[Any] = []
    out.append(out)
    return out


POLICY, RUNNER = "cfg/policy", "cfg/task/env_runner"
CASES = [
    # resolvers
    *(
        Case(f"resolver {text}", put("cfg/name", text))
        for text in (
            "${oc.env:HOSTILE_SECRET}",
            "${env:HOSTILE_SECRET}",
            "x ${oc.env:HOSTILE_SECRET} y",
            "${oc.decode:${oc.env:HOSTILE_SECRET}}",
            "${now:%Y}",
            "${hydra:runtime.cwd}",
            "${oc.select:cfg,1}",
            "${oc.create:{a:1}}",
            "${oc.${name}:HOSTILE_SECRET}",
            "\\${oc.env:HOSTILE_SECRET}",
            "${oc.env:HOSTILE_SECRET",
            "${eval:'10**10**10'}",
            "${eval:'\"a\" * 10**9'}",
            "${eval:'().__class__'}",
            "${eval:'" + "9" * 5000 + "'}",
            "${missing.key}",
            "${name}",
        )
    ),
    Case("resolver in the policy", put(f"{POLICY}/horizon", "${oc.env:HOSTILE_SECRET}")),
    Case("resolver made of two texts", put("cfg/extra", {"a": "$", "b": "${extra.a}{oc.env:HOSTILE_SECRET}"})),
    # size
    Case("references that multiply", put("cfg/extra", laughs())),
    Case(
        "texts that multiply",
        put("cfg/extra", {"x0": "ha", **{f"x{i}": f"${{extra.x{i - 1}}}" * 2 for i in range(1, 40)}}),
    ),
    Case("shared lists", put("cfg/extra", shared())),
    Case("a list that holds itself", put("cfg/extra", itself())),
    Case("400 levels", put("cfg/extra", nested())),
    Case("10 MB of text", put("cfg/extra", "x" * 10_000_000)),
    Case("a million values", put("cfg/extra", [0] * 1_000_000)),
    Case("a number of 10,000 digits", put("cfg/extra", 10**9999)),
    # numbers
    Case("n_test=10**9", put(f"{RUNNER}/n_test", 10**9), ("eval",)),
    Case("n_test_vis=10**9", put(f"{RUNNER}/n_test_vis", 10**9), ("eval",)),
    Case("max_steps=10**12", put(f"{RUNNER}/max_steps", 10**12), ("eval",)),
    Case("max_steps=1e12", put(f"{RUNNER}/max_steps", 1e12), ("eval",)),
    Case("n_envs=4000", put(f"{RUNNER}/n_envs", 4000), ("eval",)),
    Case("n_obs_steps=10**9", put(f"{RUNNER}/n_obs_steps", 10**9), ("eval",)),
    Case("fps=10**9", put(f"{RUNNER}/fps", 10**9), ("eval",)),
    Case("horizon=10**9", put(f"{POLICY}/horizon", 10**9), BUILDERS),
    Case("n_action_steps=10**9", put(f"{POLICY}/n_action_steps", 10**9), BUILDERS),
    Case("n_emb=10**9", put(f"{POLICY}/model/n_emb", 10**9), BUILDERS),
    Case("n_emb=100000", put(f"{POLICY}/model/n_emb", 100_000), BUILDERS),
    Case("n_layer=10**6", put(f"{POLICY}/model/n_layer", 10**6), BUILDERS),
    Case("training.seed=-1", put("cfg/training/seed", -1), ("eval",)),
    # classes
    *(
        Case(f"{target} in {place}", put(place, {"_target_": target, **arguments}), refused)
        for place, refused in ((POLICY, BUILDERS), (f"{POLICY}/model", BUILDERS), (RUNNER, ("eval",)))
        for target, arguments in (
            ("os.system", {"command": "touch CANARY"}),
            ("builtins.open", {"file": "CANARY", "mode": "w"}),
            ("diffusion_policy.storage.atomic.copy", {"source": "/etc/hostname", "path": "CANARY"}),
            ("diffusion_policy.storage.checkpoint_io.os.system", {"command": "touch CANARY"}),
            ("diffusion_policy.dataset.pusht_dataset.PushTStateDataset", {"zarr_path": "DATA"}),
            ("diffusion_policy.dataset.pusht_image_dataset.PushTImageDataset", {"zarr_path": "DATA"}),
            ("diffusion_policy.real_world.video_recorder.VideoRecorder", {"fps": 10}),
            ("diffusion_policy.common.json_logger.JsonLogger", {"path": "CANARY"}),
            ("diffusion_policy.common.checkpoint_util.TopKCheckpointManager", {"save_dir": "x", "monitor_key": "y"}),
            ("torch.optim.AdamW", {"params": []}),
        )
    ),
    Case(
        "a policy as the runner",
        put(RUNNER, lambda _: {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}),
        ("eval",),
    ),
    Case(
        "a runner as the policy",
        put(
            POLICY,
            lambda _: {
                "_target_": "diffusion_policy.env_runner.pusht_state_runner.PushTStateRunner",
                "output_dir": "x",
            },
        ),
        BUILDERS,
    ),
    Case(
        "a layer as the policy",
        put(POLICY, lambda _: {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}),
        BUILDERS,
    ),
    # sections
    Case("no training", drop("cfg/training"), ("eval",)),
    Case("no task", drop("cfg/task"), ("eval",)),
    Case("no env_runner", drop(RUNNER), ("eval",)),
    Case("no policy", drop(POLICY), BUILDERS),
    Case("an empty config", put("cfg", {}), BUILDERS),
    *(
        Case(f"{section} is {value!r}", put(f"cfg/{section}", value), refused)
        for value in (3, "text", [], None)
        for section, refused in (("training", ("eval",)), ("task", ("eval",)), ("policy", BUILDERS))
    ),
    Case("env_runner is 3", put(RUNNER, 3), ("eval",)),
    Case("no _target_", drop(f"{POLICY}/_target_"), BUILDERS),
    Case("_target_ is 3", put(f"{POLICY}/_target_", 3), BUILDERS),
    Case("horizon is a text", put(f"{POLICY}/horizon", "sixteen"), BUILDERS),
    Case("horizon is open", put(f"{POLICY}/horizon", "???"), BUILDERS),
    Case("_args_ is 3", put(f"{POLICY}/_args_", 3), BUILDERS),
    Case("_partial_", put(f"{POLICY}/_partial_", True), BUILDERS),
    Case("an unknown argument", put(f"{POLICY}/unknown", 1), BUILDERS),
    Case("a key that is a tuple", put("cfg/extra", {(1, 2): 3})),
    Case("a tensor in the config", put("cfg/extra", torch.zeros(2))),
    Case("cfg has keys that are numbers", put("cfg", {1: 2})),
    Case("no cfg", drop("cfg")),
    Case("no state_dicts", drop("state_dicts")),
    Case("state_dicts is a list", put("state_dicts", [])),
    Case("no weights", put("state_dicts", {}), BUILDERS),
    Case("weights are a list", put("state_dicts/ema_model", [])),
    Case("format 99", put("format", 99)),
    Case("format is shared lists", put("format", shared())),
    Case("global_step is a text", put("attributes/global_step", "four")),
    Case("global_step is shared lists", put("attributes/global_step", shared())),
    Case("global_step=-1", put("attributes/global_step", -1)),
    Case("scores is a text", put("attributes/scores", "x"), ("resume",)),
    Case("dataset is shared lists", put("attributes/dataset", shared())),
    Case("dataset is a list", put("attributes/dataset", [1])),
    Case("attributes is a list", put("attributes", [])),
    # weights
    Case("stride-0 weights", each_weight(lambda w: torch.zeros(()).expand(w.shape))),
    Case("stride-0 weights of 4 TB", each_weight(lambda w: torch.zeros(1).expand(10**6, 10**6))),
    Case("sparse weights", each_weight(lambda w: w.to_sparse())),
    Case("meta weights", each_weight(lambda w: w.to("meta"))),
    Case("quantized weights", each_weight(lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8))),
    Case("complex weights", each_weight(lambda w: w.to(torch.complex64))),
    Case("a text as weights", each_weight(lambda w: "weights")),
    Case("a list as weights", each_weight(lambda w: [1.0])),
    Case("None as weights", each_weight(lambda w: None)),
    Case("weights of another shape", each_weight(lambda w: torch.zeros(3, 3)), (*BUILDERS, "resume")),
    Case(
        "a missing weight",
        lambda p: [
            s.pop(max(s, key=lambda k: s[k].numel())) for s in map(p["state_dicts"].get, ("model", "ema_model"))
        ],
        (*BUILDERS, "resume"),
    ),
    Case(
        "keys that are numbers",
        put("state_dicts/ema_model", lambda s: dict(enumerate(s.values()))),
    ),
    *(
        Case(f"normaliser: {key} {name}", normalizer(key, value), (*BUILDERS, "resume"))
        for key, name, value in (
            ("scale", "of 3", torch.ones(3)),
            ("scale", "of 0", torch.ones(0)),
            ("scale", "2 x 2", torch.ones(2, 2)),
            ("scale", "a number", torch.ones(())),
            ("scale", "NaN", torch.full((2,), float("nan"))),
            ("scale", "zero", torch.zeros(2)),
            ("offset", "of 5", torch.ones(5)),
            ("offset", "infinite", torch.full((2,), float("inf"))),
            ("input_stats.max", "of 7", torch.ones(7)),
        )
    ),
    Case(
        "normaliser without scale",
        lambda p: [p["state_dicts"][n].pop(NORMALIZER + "scale") for n in ("model", "ema_model")],
        (*BUILDERS, "resume"),
    ),
    # what only training reads
    Case("optimizer: lr is a text", put("state_dicts/optimizer/param_groups/0/lr", "fast"), ("resume",)),
    Case("optimizer: no groups", put("state_dicts/optimizer/param_groups", []), ("resume",)),
    Case("optimizer is empty", put("state_dicts/optimizer", {}), ("resume",)),
    Case("lr_scheduler: last_epoch is a text", put("state_dicts/lr_scheduler/last_epoch", "x"), ("resume",)),
    Case("random_state is empty", put("state_dicts/random_state", {}), ("resume",)),
    Case("random_state: texts", put("state_dicts/random_state", lambda s: dict.fromkeys(s, "x")), ("resume",)),
    Case("topk is empty", put("state_dicts/topk", {}), ("resume",)),
    Case("topk: values is a list", put("state_dicts/topk/values", [1]), ("resume",)),
    Case("ema: texts", put("state_dicts/ema", lambda s: dict.fromkeys(s, "x")), ("resume",)),
]

# Files that are no torch archive of a payload
SPARSE_BYTES = 60 * 10**9


def sparse_file(path: pathlib.Path, start: bytes) -> None:
    path.write_bytes(start)
    os.truncate(path, SPARSE_BYTES)


def safetensors_header(size: int) -> bytes:
    text = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(text).to_bytes(8, "little") + text


EXPORTS: dict[str, Callable[[pathlib.Path], Any]] = {
    "export: 60 GB sparse weights": lambda folder: sparse_file(
        folder / weights_io.WEIGHTS, safetensors_header(SPARSE_BYTES - 100)
    ),
    "export: weights of another shape": lambda folder: retensor(folder, lambda t: {k: torch.zeros(3, 3) for k in t}),
    "export: no weights": lambda folder: retensor(folder, lambda t: {}),
    "export: header only": lambda folder: (folder / weights_io.WEIGHTS).write_bytes(safetensors_header(10**12)),
    "export: noise": lambda folder: (folder / weights_io.WEIGHTS).write_bytes(bytes(1000)),
    "export: config of 10 MB": lambda folder: reconfigure(folder, lambda c: c["cfg"].__setitem__("x", "x" * 10**7)),
    "export: config is a list": lambda folder: (folder / weights_io.CONFIG).write_text("[]"),
    "export: 100,000 levels": lambda folder: (folder / weights_io.CONFIG).write_text("[" * 100_000),
    "export: an environment variable": lambda folder: reconfigure(
        folder, lambda c: c["cfg"].__setitem__("name", "${oc.env:HOSTILE_SECRET}")
    ),
    "export: references that multiply": lambda folder: reconfigure(
        folder, lambda c: c["cfg"].__setitem__("extra", laughs())
    ),
    "export: os.system": lambda folder: reconfigure(
        folder, lambda c: c["cfg"]["policy"].__setitem__("_target_", "os.system")
    ),
    "export: weights is a list": lambda folder: reconfigure(folder, lambda c: c.__setitem__("weights", [1])),
    "export: config is a link to nothing": lambda folder: relink(folder / weights_io.CONFIG, "/nothing/here"),
    "export: weights are a folder": lambda folder: refolder(folder / weights_io.WEIGHTS),
}


def retensor(folder: pathlib.Path, change: Callable[[dict], dict]) -> None:
    """Other tensors, with the checksum that fits them."""
    import hashlib

    data = safetensors.torch.save(change(safetensors.torch.load_file(folder / weights_io.WEIGHTS)))
    (folder / weights_io.WEIGHTS).write_bytes(data)
    reconfigure(folder, lambda about: about.__setitem__("sha256", hashlib.sha256(data).hexdigest()))


def reconfigure(folder: pathlib.Path, change: Callable[[dict], Any]) -> None:
    about = json.loads((folder / weights_io.CONFIG).read_text())
    change(about)
    (folder / weights_io.CONFIG).write_text(json.dumps(about))


def relink(path: pathlib.Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def refolder(path: pathlib.Path) -> None:
    path.unlink()
    path.mkdir()


class HostileTarget(FileTarget):
    """Oracle: `refused_by` of the case; files are written into the output folder only; no secret is shown."""

    def __init__(self, folder: pathlib.Path, canary: pathlib.Path):
        os.environ["HOSTILE_SECRET"] = SECRET
        self.folder, self.canary = folder, canary
        self.data = folder / "pusht.zarr"
        self.workspace = workspace_of(small_config(folder, overrides=("task.env_runner.n_test_vis=0",)), folder)
        self.workspace.prepare()
        good = self.workspace.save_checkpoint(str(folder / "good.ckpt"))
        self.payload = torch.load(good, weights_only=True)
        weights_io.write(checkpoint_io.load(good), folder / "good_export")
        self.pairs = [(case, reader) for case in CASES for reader in READERS]
        self.pairs += [(name, reader) for name in ("sparse .ckpt of 60 GB", *EXPORTS) for reader in READERS[:4]]
        random.Random(0).shuffle(self.pairs)  # so that the first ones are of all kinds

    def pair(self, value: tuple[int, int]) -> tuple[Any, str]:
        return self.pairs[value[1] % len(self.pairs)]

    def label(self, value: tuple[int, int]) -> str:
        case, _ = self.pair(value)
        return case if isinstance(case, str) else case.name

    def describe(self, value: tuple[int, int]) -> str:
        return f"{self.label(value)}, {self.pair(value)[1]}"

    def check(self, value: tuple[int, int]) -> str:
        case, reader = self.pair(value)
        place = self.folder / "case"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        path = self.write(case, place)
        before = self.files()
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            message = self.read(reader, path, place / "out", shown)
        self.judge(case, reader, message, shown.getvalue(), before, place / "out")
        return f"{reader}: {'read' if message is None else 'refused'}"

    def write(self, case: Any, place: pathlib.Path) -> pathlib.Path:
        if isinstance(case, Case):
            payload = copy.deepcopy(self.payload)
            case.change(payload)
            payload = self.filled(payload, 0)
            torch.save(payload, place / "case.ckpt")
            return place / "case.ckpt"
        if case.startswith("export"):
            shutil.copytree(self.folder / "good_export", place / "export")
            EXPORTS[case](place / "export")
            return place / "export"
        sparse_file(place / "case.ckpt", (self.folder / "good.ckpt").read_bytes())
        return place / "case.ckpt"

    def filled(self, node: Any, depth: int) -> Any:
        """The names of this run's files instead of CANARY and DATA, in the config's first levels."""
        if isinstance(node, dict) and depth < 6:
            return {key: self.filled(child, depth + 1) for key, child in node.items()}
        if isinstance(node, str) and len(node) < 200:
            return node.replace("CANARY", str(self.canary)).replace("DATA", str(self.data))
        return node

    def files(self) -> set[pathlib.Path]:
        return set(self.folder.rglob("*"))

    def read(self, reader: str, path: pathlib.Path, out: pathlib.Path, shown: io.StringIO) -> str | None:
        """The message of the reader, or None if it read the file."""
        try:
            match reader:
                case "load_policy":
                    load_policy(path, device="cpu")
                case "eval":
                    evaluate.main(["-c", str(path), "-o", str(out), "-n", "1", "-d", "cpu"])
                case "convert to .ckpt":
                    convert_checkpoint.main([str(path), str(out / "safe.ckpt")])
                case "export":
                    convert_checkpoint.main([str(path), str(out)])
                case "resume":
                    payload = checkpoint_io.load(path, check_config=False)
                    with contextlib.suppress(ConfigError):  # another config is refused, after it was read
                        check_changes(payload["cfg"], self.payload["cfg"], False, self.folder)
                    self.workspace.load_payload(payload)
        except UserError as error:
            return str(error)
        except SystemExit as error:
            errors = [line for line in shown.getvalue().splitlines() if line.startswith("error: ")]
            return ("\n".join(errors) or "an exit without a message\n\n") if error.code else None
        return None

    def judge(
        self, case: Any, reader: str, message: str | None, shown: str, before: set[pathlib.Path], out: pathlib.Path
    ) -> None:
        unread = ("export: weights of another shape", "export: no weights")  # by a conversion, which builds nothing
        refused_by = case.refused_by if isinstance(case, Case) else BUILDERS if case in unread else ALL
        if message is None and reader in refused_by:
            raise Finding("it was read")
        if message is not None and (len(message) < 20 or len(message) > 2000 or "\n" in message.strip()):
            raise Finding(f"this is not one clear line: {message[:2000]!r}")
        new = [path for path in self.files() - before if out not in (path, *path.parents)]
        if new:
            raise Finding(f"files outside the output folder: {new[:3]}")
        written = "".join(path.read_text(errors="replace") for path in out.rglob("*.json")) if out.exists() else ""
        if SECRET in f"{message}{shown}{written}":
            raise Finding("an environment variable is shown")
