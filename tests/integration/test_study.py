"""benchmarks.study: what is trained, what is reused, and where the tables go."""

import json

import pytest
import yaml

from benchmarks import study

RUNS = [{"name": "a", "config": "train_idp_mlp_lowdim"}, {"name": "b", "config": "train_mip_mlp_lowdim"}]


@pytest.fixture
def made(monkeypatch, tmp_path):
    """A study outside the repository whose runs take no time -> (call it with arguments, the commands it ran)."""
    file = tmp_path / "my study.yaml"
    spec = {"name": "mine", "title": "Mine", "description": "A study.", "notes": "By hand.", "eval": None, "runs": RUNS}
    file.write_text(yaml.safe_dump(spec))
    commands = []

    def train(command, cwd, env, stdout, stderr):
        folder = next(word.split("=", 1)[1] for word in command if word.startswith("hydra.run.dir="))
        commands.append(command)
        if any(word in command for word in stop):
            raise study.subprocess.CalledProcessError(1, command)
        summary = {"score": 0.5, "best_score": 0.5, "mean_of_best_scores": 0.5, "evaluations": 1, "steps": 1}
        (study.pathlib.Path(folder) / "summary.json").write_text(json.dumps(summary))
        return 1.5

    stop = []
    monkeypatch.setattr(study, "processor_minutes", train)
    monkeypatch.setattr(study, "provenance", lambda: {"date": "2026-01-01", "commit": "abc", "versions": {}})
    monkeypatch.setattr(study, "measure", lambda *_: None)
    monkeypatch.setattr(study, "table", lambda rows: f"{len(rows)} rows")
    monkeypatch.setattr(study, "ROOT", tmp_path / "root")

    def call(*arguments, failing=()):
        commands.clear()
        stop[:] = failing
        study.main([str(file), "--jobs", "1", *arguments])
        return len(commands)

    return call, tmp_path / "root/data/studies/mine", tmp_path / "root/results/mine", file


def rows(folder):
    return json.loads((folder / "results.json").read_text())["rows"]


def test_a_study_retrains_by_default_and_publishes_only_if_asked(made):
    call, output, published, _ = made
    assert call() == 2 and not published.exists()
    assert "By hand." in (output / "README.md").read_text()
    assert [row["made"]["commit"] for row in rows(output)] == ["abc", "abc"]
    assert call("--publish") == 2 and (published / "README.md").is_file()  # the finished one is moved aside
    assert (output.with_name("mine.1") / "results.json").is_file()
    assert not any(row.get("reused") for row in rows(published))


def test_keep_reuses_published_rows_with_the_same_command_and_marks_them(made):
    call, output, published, file = made
    call("--publish")
    for path in sorted(output.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    assert call("--keep") == 0 and [row["reused"] for row in rows(output)] == [True, True]
    spec = yaml.safe_load(file.read_text())
    spec["runs"][1]["overrides"] = ["training.seed=1"]
    file.write_text(yaml.safe_dump(spec))
    assert call("--keep") == 1 and [row.get("reused") for row in rows(output)] == [True, None]


def test_an_interrupted_study_continues(made):
    call, output, _, _ = made
    with pytest.raises(SystemExit, match="failed: b"):
        call(failing=["--config-name=train_mip_mlp_lowdim"])
    assert [row["name"] for row in rows(output)] == ["a"]
    assert call() == 1 and [row["name"] for row in rows(output)] == ["a", "b"]


@pytest.mark.parametrize("text", ["a: [", "just words", "name: x"])
def test_a_file_that_is_not_a_study(text, tmp_path):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(SystemExit, match="error: .*study"):
        study.main([str(tmp_path / "bad.yaml")])


def test_a_real_study(tmp_path, capsys):
    overrides = ["preset=debug", "task.env_runner.max_steps=8", "task.env_runner.n_test_vis=0"]
    spec = {"name": "real", "title": "Real", "description": "One run.", "overrides": overrides, "runs": RUNS[:1]}
    file = tmp_path / "real.yaml"
    seeds = {"seeds": [1], "also": {"from zero": ["--seeds", "0", "--n_episodes", "1"]}}
    file.write_text(yaml.safe_dump(spec | {"eval": ["--n_episodes", "2"]} | seeds))
    study.main([str(file), "--output", str(tmp_path / "out"), "--jobs", "1"])
    (row,) = rows(tmp_path / "out")
    assert row["n_episodes"] == 2 and row["step_ms"] > 0 and row["made"]["versions"]["torch"]
    assert list(row["also"]) == ["from zero"]
    printed = capsys.readouterr().out
    assert "| from zero |" in printed and "| a | 0." in printed
    assert "| a 1 | 0." in study.table([row])
