"""One observation to one action chunk on one core: IDP beside iterative methods, and ONNX Runtime beside eager."""

from __future__ import annotations

import torch

from benchmarks.common import row
from benchmarks.latency import PRESETS, measure, p50, ratios


def run(quick: bool = False) -> list[dict]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out = []
    try:
        for preset in ("cpu",) if quick else PRESETS:
            for backbone in ("mlp",) if quick else ("transformer", "unet", "mlp"):
                methods = ("MIP",) if quick else ("DP", "DDIM", "MIP")
                rows = measure(backbone, preset, methods, 2 if quick else 3, 50 if quick else 200)
                detail = (
                    f"IDP {p50(rows, 'IDP', 'eager'):.3g} ms, in ONNX Runtime {p50(rows, 'IDP', 'ONNX Runtime'):.3g} ms"
                )
                for what, value, target in ratios(rows, preset):
                    out.append(row(f"{what}, {backbone}, {PRESETS[preset]}", value, "x", target or None, detail))
    finally:
        torch.set_num_threads(threads)
    return out
