"""The table of a study without a simulator."""

import pytest

from benchmarks.study_open_loop import row, table


def log(explained, rmse):
    found = {
        "names": ["a", "b"],
        "rmse": rmse,
        "variance_explained": [explained, None],
        "hold": {"variance_explained": [0.5, None]},
        "by_chunk_step": {"rmse": [rmse]},
        "jerk": {"policy": [1.0, 1.0], "expert": [1.0, 1.0]},
        "jerk_per": "second",
        "episodes": [3],
        "steps": 10,
    }
    means = {"variance_explained": explained, "open_loop_rmse": 0.1, "step_size_ratio": 1.0, "jerk_ratio": 2.0}
    means["hold_variance_explained"] = 0.5
    return {f"val/{key}": value for key, value in means.items()} | {
        "open_loop": found,
        "nfe": 1.0,
        "latency_ms": {"p50": 1.5},
    }


def test_rows_of_a_method_share_a_line():
    rows = [
        {"name": "mip 0", **row(log(0.6, [0.2, 0.0]))},
        {"name": "idp 0", **row(log(0.8, [0.1, 0.0]))},
        {"name": "idp 1", **row(log(0.9, [0.3, 0.0]))},
    ]
    lines = table(rows).splitlines()
    assert lines[2].startswith("| idp | 0.850 (0.800 to 0.900) | 0.100 (0.100 to 0.100) | 1.00")
    assert lines[3].startswith("| mip | 0.600 | 0.100 |") and "0.500" in lines[4]
    assert "| a | 0.2000 (0.85) | 0.2000 (0.60) |" in lines and "| b | 0.0000 (still) | 0.0000 (still) |" in lines
    assert rows[0]["latency_ms"] == pytest.approx(1.5)
