"""Short benchmark of the real-time runtime: late steps of IDP and DP; `benchmarks.runtime` takes ten minutes."""

from __future__ import annotations

import torch

from benchmarks.common import row
from benchmarks.runtime import CASES, Case
from benchmarks.runtime import run as run_case


def _row(case: Case, seconds: float) -> dict:
    found = run_case(case, seconds, real_time=True).as_dict()
    plans = found["plans"]
    detail = (
        f"of {found['steps']} in {seconds:g} s; worst {found['worst_ms']:.1f} ms after it was due; a plan takes "
        f"{plans['latency_ms']['p50']:.1f} ms, {found['held_steps']} steps without an action; real-time priority: "
        f"{'yes' if found['real_time'] else 'no'}"
    )
    target = "<= 0" if case.target else None
    return row(f"late steps, {case.name}", found["late_steps"], "steps", target, detail)


def run(quick: bool = False) -> list[dict]:
    threads = torch.get_num_threads()
    cases = [case for case in CASES if not case.process]
    try:
        return [_row(case, 2.0 if quick else 20.0) for case in (cases[1:2] if quick else cases)]
    finally:
        torch.set_num_threads(threads)
