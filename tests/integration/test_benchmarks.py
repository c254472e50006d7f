"""The benchmarks' instruments. Times are not asserted."""

import json
import os
import subprocess
import sys

import hydra
import pytest
import torch

from benchmarks import bench_distributed, latency
from benchmarks.__main__ import BENCHMARKS, machine, main, table, write
from benchmarks.bench_geometry import ACTION_DIM, FEATURES, HORIZON, expected_peak
from benchmarks.common import Times, fetch_and_step, interleaved, make_policy, peak_bytes, ratio, row
from benchmarks.data import write_pusht
from idp_workspace.geometry import geometry_excess
from tests.util import load_config

SIZE = 256
MATRIX = 4 * SIZE**2


def matrices(task) -> float:
    return peak_bytes(task) / MATRIX


def test_memory_of_what_is_alive_together():
    assert matrices(lambda: [torch.empty(SIZE, SIZE) for _ in range(3)]) == pytest.approx(3, abs=0.01)


def test_memory_of_in_place_operators_is_nothing():
    x = torch.rand(SIZE, SIZE)
    assert matrices(lambda: x.sub_(1).exp_().div_(2)) < 0.01


def test_memory_that_was_freed_is_counted_once():
    def one_after_the_other():
        for _ in range(5):
            x = torch.rand(SIZE, SIZE)
            del x

    assert matrices(one_after_the_other) == pytest.approx(1, abs=0.01)


def test_memory_of_a_temporary_counts():
    x = torch.rand(SIZE, SIZE)
    assert matrices(lambda: (x + 1) * 2) == pytest.approx(2, abs=0.01)  # x + 1 lives until the product is there


def test_memory_inside_an_operator_counts():
    x = torch.rand(SIZE, SIZE).T
    assert (
        matrices(lambda: torch.nn.functional.layer_norm(x, (SIZE,))) >= 1.99
    )  # its result, and a contiguous copy of x


def test_memory_held_before_does_not_count():
    held = [torch.rand(SIZE, SIZE)]
    assert matrices(lambda: (held.clear(), torch.empty(SIZE, SIZE))) == pytest.approx(1, abs=0.01)


def test_memory_of_the_geometry_is_what_counting_says():
    batch = 512
    features, actions = torch.randn(batch, FEATURES), torch.randn(batch, HORIZON, ACTION_DIM)
    geometry_excess(features, actions)
    assert peak_bytes(lambda: geometry_excess(features, actions)) / (4 * batch**2) == pytest.approx(
        expected_peak(batch), abs=0.05
    )


def test_tasks_take_turns():
    calls = []
    times = interleaved(
        "", {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=2, repeats={"b": 2}, warmup=1
    )
    assert "".join(calls) == "abb" * 3
    assert len(times["a"].wall) == len(times["b"].cpu) == 2


def test_ratio_is_the_median_of_rounds():
    assert ratio(Times(wall=[2, 30, 4]), Times(wall=[1, 1, 1])) == 4


@pytest.mark.parametrize(
    "value, target, met",
    [
        (5.0, "<= 5", True),
        (5.1, "<= 5", False),
        (4.0, "< 4", False),
        (20.0, ">= 20", True),
        (None, ">= 20", None),
        (3.0, None, None),
    ],
)
def test_row_judges_its_target(value, target, met):
    assert row("x", value, "%", target)["met"] is met


ROWS = [
    row("fast thing", 1.234, "x", "<= 2"),
    row("slow thing", 9.0, "%", "<= 5", "much to do"),
    row("absent", None, "x", ">= 1"),
    row("for information", 1.0, "s"),
]


def test_table():
    lines = table(ROWS).splitlines()
    assert lines[0].split() == ["what", "value", "target", "met"]
    assert "1.23 x" in lines[2] and lines[2].endswith("yes")
    assert lines[3].endswith("NO")
    assert "not measured" in lines[4] and not lines[4].endswith(("yes", "NO"))
    assert lines[5].endswith("s")


def test_json(tmp_path):
    path = tmp_path / "deep" / "bench.json"
    write(path, ROWS, {"command": "c", **machine()})
    written = json.loads(path.read_text())
    assert written["rows"] == ROWS and written["command"] == "c"
    assert written["versions"]["torch"] and written["threads"] >= 1 and written["date"] and "cpu" in written
    assert list(path.parent.iterdir()) == [path]


def test_a_missed_target_is_not_an_error(tmp_path, monkeypatch, capsys):
    import benchmarks.bench_env

    monkeypatch.setattr(benchmarks.bench_env, "run", lambda quick: [row("env", 1.0, "x", ">= 1.5", f"quick={quick}")])
    main(["env", "--quick", "--output", str(tmp_path / "b.json")])
    assert "NO" in capsys.readouterr().out
    written = json.loads((tmp_path / "b.json").read_text())
    assert written["rows"][0]["met"] is False and written["rows"][0]["detail"] == "quick=True"
    assert written["command"].startswith("python -m benchmarks env --quick")


@pytest.mark.parametrize("backbone", latency.BACKBONES)
def test_the_small_preset_fits_the_latency_benchmark(backbone):
    policy = make_policy(latency.policy_config(backbone, "cpu")).eval()
    assert policy.predict_action({"obs": torch.zeros(1, 2, 19)})["action"].shape == (1, 10, 10)


def test_the_latency_benchmark_times_weights_in_int8():
    rows = latency.measure("mlp", "cpu", (), windows=1, calls=2)
    assert [row.backend for row in rows] == ["eager", "ONNX Runtime", latency.INT8]
    asked = [what for what, _, target in latency.ratios(rows, "cpu") if target == ">= 5"]
    assert asked == ["eager / ONNX Runtime, IDP", "eager / ONNX Runtime, int8, IDP"]


def test_batches_of_a_small_run_are_fetched_and_trained_on(tmp_path):
    """With the optimiser of the preset, which divides the parameters into groups."""
    data = write_pusht(tmp_path / "pusht.zarr")
    cfg = load_config("train_idp_mlp_lowdim", "preset=cpu", f"task.dataset.zarr_path={data}")
    tasks = fetch_and_step(cfg, hydra.utils.instantiate(cfg.task.dataset))
    with pytest.raises(KeyError):
        tasks["step"]()
    for name in ("fetch", "step"):
        tasks[name]()


def test_every_name_has_a_module(repo_root):
    assert {path.stem for path in (repo_root / "benchmarks").glob("bench_*.py")} == {
        f"bench_{name}" for name in BENCHMARKS
    }


def test_help(repo_root):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--help"],
        cwd=repo_root,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(repo_root)},
    )
    assert done.returncode == 0
    assert all(name in done.stdout for name in BENCHMARKS)


def test_unknown_name(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["geometri"])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert "geometri" in message and all(name in message for name in BENCHMARKS)


def test_the_cost_model_adds_what_ranks_compute_and_send():
    work = {"network": bench_distributed.FLOPS, "geometry": 0.0, "gathered": 0.0, "gradient": 0.0}
    assert bench_distributed.step_seconds(work, 1) == 1
    assert bench_distributed.step_seconds(work, 8) == pytest.approx(1 / 8 + 4 * bench_distributed.LATENCY)
    work["gradient"] = bench_distributed.NEAR
    assert bench_distributed.step_seconds(work, 8) == pytest.approx(1 / 8 + 2 * 7 / 8, rel=1e-3)
    assert bench_distributed.step_seconds(work, 64) > bench_distributed.step_seconds(work, 8)
