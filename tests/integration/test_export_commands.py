"""From a run to an exported file, an evaluation of that file, and its latency: the commands that a user types."""

import json

import pytest
import torch

from benchmarks.untrained import export_untrained
from diffusion_policy import load_policy
from diffusion_policy.export import parity, quantization
from diffusion_policy.latency import timing, variants
from diffusion_policy.scripts import eval as eval_script
from diffusion_policy.scripts import export, latency
from diffusion_policy.storage import onnx_io
from tests.util import train_here, write_pusht


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    data = write_pusht(folder / "pusht.zarr")
    overrides = (f"task.dataset.zarr_path={data}", "task.env_runner.n_test_vis=0", "task.env_runner.max_steps=16")
    train_here(folder / "run", "train_idp_mlp_lowdim", "preset=debug", "state_features=features", *overrides)
    export.main(["-c", str(folder / "run")])
    return folder / "run"


def scores(checkpoint, output):
    eval_script.main(["-c", str(checkpoint), "-o", str(output), "-n", "2", "-d", "cpu"])
    return json.loads((output / "eval_log.json").read_text())


def test_eval_of_the_exported_file_is_eval_of_the_checkpoint(run, tmp_path):
    exported, trained = scores(run / "latest.onnx", tmp_path / "a"), scores(run, tmp_path / "b")
    assert exported["nfe"] == trained["nfe"] == 1 and exported["latency_ms"]["p50"] > 0
    assert exported["test/mean_score"] == pytest.approx(trained["test/mean_score"], abs=1e-3)
    assert exported["global_step"] == trained["global_step"] and exported["name"] == trained["name"]


def test_the_metadata_of_the_file(run):
    about = onnx_io.read(run / "latest.onnx")["onnx"]["about"]
    assert about["check"]["source"] == "of the dataset" and about["check"]["largest_error"] < parity.TOLERANCE
    assert about["signature"]["rate_hz"] == 10 and about["cfg"]["policy"] == {}
    assert set(about["cfg"]["task"]) == {"name", "env_runner"}
    policy = load_policy(run / "latest.onnx")
    assert policy.predict_action({"obs": torch.rand(3, 2, 5) * 400})["action"].shape == (3, 8, 2)


def test_other_formats(run, tmp_path, capsys):
    export.main(["-c", str(run), "-f", "torchscript", "-o", str(tmp_path / "model.pt")])
    assert "largest error" in capsys.readouterr().out
    weights = tmp_path / "weights"
    export.main(["-c", str(run), "-f", "safetensors", "-o", str(weights)])
    assert (weights / "model.safetensors").is_file()
    export.main(["-c", str(weights), "--rate", "20"])
    assert "drawn" in capsys.readouterr().out  # the export does not name the dataset
    assert onnx_io.read(tmp_path / "weights.onnx")["onnx"]["about"]["signature"]["rate_hz"] == 20


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "exists already"),
        (["-o", "model"], "ends in .onnx"),
        (["--nfe", "3", "-o", "x.onnx"], "--nfe 3 does not fit"),
        (["--ddim", "10", "-o", "x.onnx"], "diffusion policies"),
        (["--quantize", "-f", "torchscript"], "--quantize is for"),
        (["-f", "tflite"], "invalid choice"),
        (["--rate", "nan"], "rate in Hz"),
    ],
)
def test_mistakes_end_in_one_line(run, arguments, message, capsys):
    with pytest.raises(SystemExit):
        export.main(["-c", str(run), *arguments])
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_an_exported_file_is_not_exported_again(run, tmp_path, capsys):
    with pytest.raises(SystemExit):
        export.main(["-c", str(run / "latest.onnx"), "-o", str(tmp_path / "again.onnx")])
    assert "exported graph already" in capsys.readouterr().err


def test_a_graph_that_differs_is_not_written(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(parity, "TOLERANCE", -1.0)
    with pytest.raises(SystemExit):
        export.main(["-c", str(run), "-o", str(tmp_path / "model.onnx")])
    assert "nothing was written" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_int8_is_kept_only_if_the_score_holds(run, tmp_path, monkeypatch, capsys):
    arguments = ["-c", str(run), "-o", str(tmp_path / "model.onnx"), "--quantize", "-n", "2", "--overwrite"]
    small = tmp_path / "model_int8.onnx"
    monkeypatch.setattr(quantization.Verdict, "holds", True)
    export.main(arguments)
    assert "int8     score" in capsys.readouterr().out
    assert onnx_io.read(small)["onnx"]["about"]["quantized"] == "int8"
    assert load_policy(small).predict_action({"obs": torch.zeros(2, 2, 5)})["action"].shape == (2, 8, 2)
    monkeypatch.setattr(quantization.Verdict, "holds", False)
    with pytest.raises(SystemExit) as stop:
        export.main(arguments)
    assert stop.value.code == 1 and "was not kept" in capsys.readouterr().err
    assert not small.exists() and (tmp_path / "model.onnx").is_file()


def test_int8_holds_inside_the_interval():
    assert quantization.Verdict(0.5, 0.4, 0.6, 0.45, 10).holds
    assert not quantization.Verdict(0.5, 0.4, 0.6, 0.39, 10).holds


def test_latency_beside_iterative_methods(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(variants.shutil, "which", lambda name: None)  # compiling takes a minute
    monkeypatch.setattr(variants, "UNROLLED", 1)
    monkeypatch.setattr(timing, "WARMUP_SECONDS", 0.0)
    threads = torch.get_num_threads()
    latency.main(["-c", str(run), "-o", str(tmp_path), "--calls", "3", "--windows", "1", "--seconds", "0.01"])
    torch.set_num_threads(threads)
    rows = json.loads((tmp_path / "latency.json").read_text())["rows"]
    found = {(row["method"], row["backend"]): row for row in rows}
    calls = {row["method"]: row["nfe"] for row in rows}
    assert calls == {"IDP": 1, "DP": 100, "DDIM": 10, "Flow": 9, "MIP": 2}
    assert found["IDP", "ONNX Runtime"]["p50"] > 0 and found["DP", "eager"]["warmup"]["calls"] >= 3
    assert "too many" in found["DP", "ONNX Runtime"]["note"] and "C++ compiler" in found["IDP", "compiled"]["note"]
    assert (tmp_path / "latency.png").stat().st_size > 1000
    out = capsys.readouterr().out
    assert "| IDP | 1 | eager |" in out and "untrained" in out


def test_latency_beside_a_trained_policy(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(variants.shutil, "which", lambda name: None)
    monkeypatch.setattr(timing, "WARMUP_SECONDS", 0.0)
    threads = torch.get_num_threads()
    short = ["-o", str(tmp_path), "--calls", "3", "--windows", "1", "--seconds", "0.01"]
    latency.main(["-c", str(run), "-b", str(run), *short])
    content = json.loads((tmp_path / "latency.json").read_text())
    assert {row["method"] for row in content["rows"]} == {"IDP", f"IDP ({run})"} and content["stand_ins"] == []
    other = export_untrained(tmp_path / "other", "train_idp_mlp_lowdim", "preset=debug", "task=pusht_keypoint")
    with pytest.raises(SystemExit):
        latency.main(["-c", str(run), "-b", str(other), *short])
    torch.set_num_threads(threads)
    assert "has other observations than" in capsys.readouterr().err
