"""Reduce the full set of reference numbers to the files of this folder: python -m tests.golden.make FULL_FOLDER.

The full set (6.8 MB, .pt files that are pickles) was computed by running upstream's own modules. Kept here is what the
tests read: fewer rows where rows are alike, weights as the rule that drew them, images as bytes, no pickles.
"""

import argparse
import gzip
import io
import json
import pathlib
import zipfile
from typing import Any

import numpy as np
import torch

from tests.golden import FOLDER, drawn_weights, read, write_tree

ROWS = 6  # of the normalisers' outputs; the fit still uses all rows
DEAD = "train_diffusion_unet_video_workspace"  # does not compose in upstream
TASKS = (
    "blockpush_lowdim_seed",
    "blockpush_lowdim_seed_abs",
    "kitchen_lowdim",
    "kitchen_lowdim_abs",
    "pusht_image",
    "pusht_lowdim",
    "real_pusht_image",
)
LIMIT = 1_000_000  # bytes of all files together


def write_json(name: str, value: Any, compress: bool = False) -> None:
    """Write `value` as JSON, the same bytes every time."""
    text = json.dumps(value, separators=(",", ":")) + "\n"
    if compress:
        (FOLDER / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    else:
        (FOLDER / f"{name}.json").write_text(text)


def model_seed(weights: dict[str, torch.Tensor], scale: float) -> int:
    """Return the seed whose first numbers are the first weight."""
    first = next(value for value in weights.values() if value.numel())
    for seed in range(1000):
        drawn = torch.randn(first.shape, generator=torch.Generator().manual_seed(seed)) * scale
        if torch.equal(drawn, first):
            return seed
    raise ValueError("the weights follow another rule")


def make_model_forward(full: pathlib.Path) -> None:
    """Small transformers and UNets: outputs, gradient norms, optimizer groups."""
    source = torch.load(full / "model_forward_golden.pt", weights_only=False)
    cases = {}
    for name, case in source["cases"].items():
        state, grads = case["state_dict"], {*case["grad_norms"], *case["params_without_grad"]}
        buffers = {key: value for key, value in state.items() if key not in grads}
        parameters = {key: value for key, value in state.items() if key in grads}
        scale = 0.2 if case["class"] == "TransformerForDiffusion" else 0.1
        kept = {key: value for key, value in case.items() if key not in ("state_dict", "init_seed")}
        kept["buffers"] = buffers
        kept["weights"] = {
            "seed": model_seed(parameters, scale),
            "scale": scale,
            "ones": [key for key, value in parameters.items() if value.numel() > 8 and abs(value.mean() - 1) < 0.3],
            "shapes": {key: list(value.shape) for key, value in state.items()},
            "sum_abs": sum(value.double().abs().sum().item() for value in parameters.values()),
        }
        drawn = drawn_weights(kept)
        if not all(torch.equal(drawn[key], value) for key, value in state.items()):
            raise ValueError(f"{name}: the rule gives other weights")
        cases[name] = kept
    write_tree("model_forward", {"cases": cases})


def make_normalizer(full: pathlib.Path) -> None:
    """Every fit mode: parameters, and outputs for the first rows."""
    source = torch.load(full / "normalizer_golden.pt", weights_only=False)
    source.pop("meta")
    for case in source["cases"].values():
        for key in ("normalized", "unnormalized"):
            case[key] = {name: value[:ROWS].clone() for name, value in case[key].items()}
    source["default_key"]["normalized"] = source["default_key"]["normalized"][:ROWS].clone()
    write_tree("normalizer", source)


def make_robomimic(full: pathlib.Path) -> None:
    """Samples and normalisers of the robomimic datasets; images as bytes where that is exact."""
    source = torch.load(full / "robomimic_fixture/expected.pt", weights_only=False)
    for name in ("meta", "image_cache_layout"):
        source.pop(name)
    for name in ("image_abs_nobsNone", "image_abs_nobs2"):
        for sample in ("sample0", "sample_last", "val_sample0"):
            obs = source[name][sample]["obs"]
            for key, value in obs.items():
                if key.endswith("image"):
                    obs[key] = (value * 255).round().to(torch.uint8)
                    torch.testing.assert_close(obs[key] / 255, value, rtol=0, atol=1e-6)
    write_tree("robomimic_dataset", source)


def make_layouts(full: pathlib.Path) -> None:
    """Names, shapes and optimizer groups of the full-size models."""
    lowdim = json.loads((full / "state_dict_layouts_lowdim.json").read_text())
    for layout in lowdim.values():
        for key in ("policy_state_dict", "requires_grad", "n_params_policy", "buffers", "config_name", "overrides"):
            layout.pop(key)
        for key in ("policy_state_dict_before_set_normalizer", "model_state_dict"):
            layout[key] = {name: entry["shape"] for name, entry in layout[key].items()}
    write_json("state_dict_layouts_lowdim", lowdim, compress=True)
    image = json.loads((full / "state_dict_layouts_image.json").read_text())["layouts"]
    for layout in image.values():
        layout["policy_state_dict"] = {
            name: [entry["shape"], entry["dtype"]] for name, entry in layout["policy_state_dict"].items()
        }
    write_json("state_dict_layouts_image", image, compress=True)

    source = json.loads((full / "resolved_configs.json").read_text())
    tasks = {
        override.split("=", 1)[1]
        for layout in image.values()
        for override in layout["overrides"]
        if override.startswith("task=")
    }
    workspaces = {}
    for name in sorted(name for name in source["workspaces"] if name.startswith("train_diffusion") and name != DEAD):
        config = source["workspaces"][name].get("config", source["workspaces"][name])
        workspaces[name] = {key: value for key, value in config.items() if key not in ("logging", "multi_run")}
    shapes = {name: source["tasks"][name]["task"]["shape_meta"] for name in sorted(tasks)}
    described = {name: source["tasks"][name]["task"] for name in TASKS}
    write_json("resolved_configs", {"workspaces": workspaces, "shape_meta": shapes, "tasks": described}, compress=True)


def make_small(full: pathlib.Path) -> None:
    """Schedules, traces and indices: as they are, less the versions, which README.md gives."""
    for name in ("ema", "lr_scheduler", "mask_posemb", "multistep_wrapper", "runner", "sampler", "topk_jsonlogger"):
        value = json.loads((full / f"{name}_golden.json").read_text())
        value.pop("meta")
        write_json(name, value)
    source = torch.load(full / "noise_scheduler_golden.pt", weights_only=False)
    source.pop("meta")
    write_tree("noise_scheduler", source)
    np.savez_compressed(FOLDER / "rotation.npz", **np.load(full / "rotation_golden.npz"))
    arrays = dict(np.load(full / "pusht_env_golden.npz"))
    arrays.pop("versions")
    image = np.rint(arrays["imgenv_image"] * 255).astype(np.uint8)
    np.testing.assert_allclose(image / 255, arrays["imgenv_image"], rtol=0, atol=1e-6)
    arrays["imgenv_image"] = image
    np.savez_compressed(FOLDER / "pusht_env.npz", **arrays)


def make_files(full: pathlib.Path) -> None:
    """Stores that upstream wrote and files it read, in one archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for pattern in ("replay_buffer_fixture/**/*", "tiny_pusht.zarr/**/*", "robomimic_fixture/*.hdf5"):
            for path in sorted(full.glob(pattern)):
                if path.is_file():
                    info = zipfile.ZipInfo(path.relative_to(full).as_posix())
                    info.compress_type = zipfile.ZIP_DEFLATED
                    info.external_attr = 0o644 << 16
                    archive.writestr(info, path.read_bytes())
    (FOLDER / "files.zip").write_bytes(buffer.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("full", type=pathlib.Path, help="folder of the full set")
    full = parser.parse_args().full
    for make in (make_model_forward, make_normalizer, make_robomimic, make_layouts, make_small, make_files):
        make(full)
    sizes = {path.name: path.stat().st_size for path in sorted(FOLDER.iterdir()) if path.suffix != ".py"}
    for name, size in sizes.items():
        print(f"{size:9,d}  {name}")
    print(f"{sum(sizes.values()):9,d}  together")
    if sum(sizes.values()) > LIMIT:
        raise SystemExit(f"more than {LIMIT:,d} bytes")
    for path in FOLDER.iterdir():
        if path.name.endswith((".npz", ".json", ".json.gz")):
            read(path.name.split(".")[0])


if __name__ == "__main__":
    main()
