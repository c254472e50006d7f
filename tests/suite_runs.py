"""Finished runs of a suite in the real file format, without training: for tests of reports."""

import json
import pathlib

import imageio
import numpy as np
import yaml

from idp_workspace.suite import grid, jobs, records


def write_suite(path: pathlib.Path, **changes) -> pathlib.Path:
    """A small suite file."""
    data = {
        "name": "small",
        "title": "A small suite",
        "description": "Two methods.",
        "methods": ["idp", "mip"],
        "tasks": ["pusht_state"],
        "backbones": ["mlp"],
        "overrides": ["preset=debug"],
        "eval": ["--n_episodes", "3"],
        "reference": "idp",
        "seeds": [0, 1],
    }
    path.write_text(
        yaml.safe_dump({key: value for key, value in (data | changes).items() if value != "-"}, sort_keys=False)
    )
    return path


def video(path: pathlib.Path) -> pathlib.Path:
    """Half a second of noise, encoded as runs encode theirs."""
    frames = np.random.default_rng(0).integers(0, 255, (5, 64, 64, 3), dtype=np.uint8)
    imageio.mimwrite(path, list(frames), fps=10, codec="libx264", pixelformat="yuv420p")
    return path


def fabricate(suite: grid.Suite, starts: int = 50, records_each: int = 300, clip: pathlib.Path | None = None) -> None:
    """Write every run of the suite as if it were done: success with a probability that depends on its method."""
    methods = suite.axis("method")
    for number, run in enumerate(suite.runs):
        random = np.random.default_rng(number)
        folder = suite.output / grid.folder_name(run.name)
        folder.mkdir(parents=True)
        rate = 0.9 - 0.7 * methods.index(run.method) / len(methods)
        evaluations = [float(np.clip(rate - 0.1 * (5 - n) + 0.02 * random.normal(), 0, 1)) for n in range(6)]
        with open(folder / "logs.json.txt", "w") as log:
            for step in range(records_each):
                record = {
                    "global_step": step,
                    "epoch": 0,
                    "lr": 1e-3,
                    "train_loss": 1 / (1 + step) + 0.01 * random.random(),
                }
                if run.method.startswith("idp"):
                    record |= {"m_mean": 0.1 + random.random() / 100, "m_p99": 0.4, "effective_neighbors": 10.0}
                if (step + 1) % (records_each // 6) == 0:
                    record["test/mean_score"] = evaluations[min(5, step * 6 // records_each)]
                log.write(json.dumps(record) + "\n")
        scores = {f"{records.SCORE}{100000 + n}": float(random.random() < rate) for n in range(starts)}
        mean = float(np.mean(list(scores.values())))
        log = {
            "test/mean_score": mean,
            "interval_95": [max(0, mean - 0.1), min(1, mean + 0.1)],
            "n_episodes": starts,
            "nfe": 2.0 if run.method == "mip" else 1.0,
            "latency_ms": {"p50": 0.5 + random.random()},
            **scores,
        }
        if run.method == "mip":  # evaluated with --nfe 2,1
            log["by_nfe"] = {str(calls): log | {"nfe": calls} for calls in (2.0, 1.0)}
        summary = {
            "score": evaluations[-1],
            "best_score": max(evaluations),
            "mean_of_last_scores": float(np.mean(evaluations[-5:])),
            "mean_of_best_scores": float(np.mean(sorted(evaluations)[-5:])),
            "evaluations": 6,
            "steps": records_each,
            "dataset": {"name": "demos.zarr", "sha256": "0" * 64, "warning": None},
        }
        (folder / "eval/media").mkdir(parents=True)
        if clip is not None:
            (folder / "eval/media" / "test_seed100000_score1.00.mp4").write_bytes(clip.read_bytes())
        jobs.write_json(folder / "eval/eval_log.json", log)
        jobs.write_json(folder / jobs.JOB, records.description(run, 1, {}, None))
        jobs.write_json(folder / "made.json", {"date": "2026-01-01", "commit": "abc", "versions": {}})
        jobs.write_json(folder / jobs.COST, {"minutes": 3.0 + random.random(), "seconds": 200.0, "peak_gb": 0.5})
        jobs.write_json(folder / "summary.json", summary)
