"""The table of a study without a simulator."""

import pytest

from benchmarks.study import runs_of
from benchmarks.study_open_loop import copy_pictures, table
from idp_workspace.suite.records import open_loop_row as row


def log(explained, rmse, episodes=(3,)):
    found = {
        "names": ["a", "b"],
        "rmse": rmse,
        "variance_explained": [explained, None],
        "hold": {"variance_explained": [0.5, None]},
        "by_chunk_step": {"rmse": [rmse]},
        "jerk": {"policy": [1.0, 1.0], "expert": [1.0, 1.0]},
        "jerk_per": "second",
        "episodes": [*episodes],
        "steps": 10,
    }
    means = {"variance_explained": explained, "open_loop_rmse": 0.1, "step_size_ratio": 1.0, "jerk_ratio": 2.0}
    means |= {"hold_variance_explained": 0.5, "inside_ratio": 1.5, "seams_ratio": 3.0}
    return {f"val/{key}": value for key, value in means.items()} | {
        "open_loop": found,
        "nfe": 1.0,
        "latency_ms": {"p50": 1.5},
    }


def made(name, *arguments):
    return {"name": name, "steps": 100, **row(log(*arguments))}


def test_rows_of_a_method_share_a_line():
    rows = [
        made("mip 0", 0.6, [0.2, 0.0]),
        made("idp 0", 0.8, [0.1, 0.0]),
        made("idp 1", 0.9, [0.3, 0.0]),
        made("idp image 0", 0.7, [0.1, 0.0], (1, 2)),
    ]
    lines = table(rows, "idp").splitlines()
    assert "| minus idp |" in lines[0]
    assert lines[2].startswith(
        "| idp | 0.850 (0.800 to 0.900) | - | 0.100 (0.100 to 0.100) | 1.50 (1.50 to 1.50) | 3.00"
    )
    assert lines[2].endswith("| 1.50 | 1 | 100 | 1 | 2 |")
    assert lines[3].startswith("| idp image | 0.700 | - |")  # other episodes were held out
    assert lines[4].startswith("| mip | 0.600 | -0.200 | 0.100 |") and "0.500" in lines[5] and "0.500" in lines[6]
    assert "| a | 0.2000 (0.85) | 0.1000 (0.70) | 0.2000 (0.60) |" in lines
    assert "| b | 0.0000 (still) | 0.0000 (still) | 0.0000 (still) |" in lines
    del rows[0]["inside_ratio"]  # a reused row from before there was this number
    assert "| 0.100 | - | 3.00 | 2.00 |" in table(rows, "idp").splitlines()[4]
    assert rows[0]["latency_ms"] == pytest.approx(1.5)


def test_a_run_may_have_fewer_seeds_than_the_study():
    runs = [{"name": "idp", "config": "a"}, {"name": "idp image", "config": "b", "seeds": [0]}]
    names = [run.name for run in runs_of({"name": "mine", "seeds": [0, 1], "runs": runs})]
    assert names == ["idp 0", "idp image 0", "idp 1"]


def test_pictures_are_those_of_the_reference(tmp_path):
    for name in ("idp 0", "idp 1", "mip 0"):
        media = tmp_path / name / "eval/media"
        media.mkdir(parents=True)
        for picture in ("errors.png", "episode_4.png", "episode_7.png"):
            (media / picture).write_text(f"{name} {picture}")
    rows = [{"name": "mip 0"}, {"name": "idp 0"}, {"name": "idp 1"}]
    copy_pictures(tmp_path, rows, "idp", tmp_path)
    assert (tmp_path / "errors.png").read_text() == "idp 0 errors.png"
    assert (tmp_path / "episode.png").read_text() == "idp 0 episode_4.png"
