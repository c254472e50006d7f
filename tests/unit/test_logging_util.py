"""The JSON log and the choice of checkpoints, against upstream's traces."""

import json
import os

import numpy as np
import pytest

from diffusion_policy.common.checkpoint_util import TopKCheckpointManager
from diffusion_policy.common.errors import ConfigError
from diffusion_policy.common.json_logger import JsonLogger, read_json_log
from tests import golden

NAME = "epoch={epoch:04d}-test_mean_score={test_mean_score:.3f}.ckpt"


@pytest.fixture(scope="module")
def upstream():
    return golden.read("topk_jsonlogger")


def manager(folder, **kwargs):
    return TopKCheckpointManager(
        folder, **{"monitor_key": "test_mean_score", "mode": "max", "k": 2, "format_str": NAME, **kwargs}
    )


def save(topk, epoch, value):
    path = topk.get_ckpt_path({"epoch": epoch, "test_mean_score": value, "other": 1})
    if path is not None:
        open(path, "w").close()
    topk.remove_displaced()
    return path


@pytest.mark.parametrize("mode", ["max", "min"])
@pytest.mark.parametrize("resumed", [False, True])
def test_keeps_what_upstream_keeps(upstream, tmp_path, mode, resumed):
    topk = manager(tmp_path / "checkpoints", mode=mode)
    for entry in upstream[mode]:
        if resumed:  # as if every epoch were a new run
            state = json.loads(json.dumps(topk.state_dict()))
            topk = manager(tmp_path / "checkpoints", mode=mode)
            topk.load_state_dict(state)
        path = save(topk, entry["epoch"], entry["value"])
        assert (path and os.path.basename(path)) == entry["returned"]
        assert sorted(os.listdir(tmp_path / "checkpoints")) == entry["on_disk"]


def test_only_listed_files_are_deleted(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "latest.ckpt").touch()
    (tmp_path / "precious.ckpt").touch()
    topk = manager(folder, k=1)
    topk.load_state_dict({"values": {"../precious.ckpt": 0.0, "gone.ckpt": 0.1}})
    assert topk.path_value_map == {}
    save(topk, 0, 0.1)
    save(topk, 1, 0.2)
    assert sorted(os.listdir(folder)) == ["epoch=0001-test_mean_score=0.200.ckpt", "latest.ckpt"]
    assert (tmp_path / "precious.ckpt").exists()


def test_what_is_displaced_stays_until_the_new_one_is_saved(tmp_path):
    topk = manager(tmp_path, k=1)
    old = save(topk, 0, 0.1)
    new = topk.get_ckpt_path({"epoch": 1, "test_mean_score": 0.2, "other": 1})
    assert os.path.exists(old)
    state = (
        topk.state_dict()
    )  # a run that is killed here has the list without the old one, and the old one still on the disk
    open(new, "w").close()
    resumed = manager(tmp_path, k=1)
    resumed.load_state_dict(state)
    assert not os.path.exists(old) and list(resumed.path_value_map) == [new]


def test_nothing_to_keep(tmp_path, caplog):
    assert save(manager(tmp_path, k=0), 0, 1.0) is None
    topk = manager(tmp_path)
    assert save(topk, 0, float("nan")) is None
    assert topk.get_ckpt_path({"epoch": 0, "train_loss": 1.0}) is None
    assert "'test_mean_score' is not among the metrics (epoch, train_loss)" in caplog.text


def test_bad_arguments_delete_nothing(tmp_path):
    topk = manager(tmp_path, k=1)
    kept = save(topk, 0, 0.1)
    with pytest.raises(ConfigError, match="'epoch'"):
        topk.get_ckpt_path({"test_mean_score": 0.5})
    assert os.path.exists(kept)
    with pytest.raises(ConfigError, match="best"):
        manager(tmp_path, mode="best")


def test_log_file_is_upstreams(upstream, tmp_path):
    path = tmp_path / "logs.json.txt"
    with JsonLogger(path) as log:
        assert log.get_last_log() is None
        log.log({"train_loss": 0.5, "global_step": 0, "epoch": 0, "lr": 1e-4, "video": object(), "flag": True})
        log.log(
            {"train_loss": np.float32(0.25), "global_step": np.int64(1), "epoch": 0, "lr": 1e-4, "test/mean_score": 1.0}
        )
    with JsonLogger(path) as log:
        assert log.get_last_log() == upstream["last_log_after_reopen"]
        log.log({"global_step": 2})
    assert path.read_text() == upstream["json_log_file"]


def test_a_cut_line_is_dropped_on_reopening(tmp_path):
    path = tmp_path / "logs.json.txt"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": 3, "b"')
    assert read_json_log(path) == [{"a": 1}, {"a": 2}]
    with JsonLogger(path) as log:
        assert log.get_last_log() == {"a": 2}
        log.log({"a": 4})
        assert read_json_log(path)[-1] == {"a": 4}  # on disk at once
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n{"a": 4}\n'
    path.write_text('{"a"')
    with JsonLogger(path) as log:
        assert log.get_last_log() is None
    assert path.read_text() == ""


def test_filters(tmp_path):
    path = tmp_path / "logs.json.txt"
    with JsonLogger(path, filter_fn=lambda key, value: key != "skip") as log:
        log.log({"name": "run", "skip": 1})
        log.log({"loss": 2})
    assert read_json_log(path) == [{"name": "run"}, {"loss": 2}]
    assert read_json_log(path, required_keys=["loss", "nope"]) == [{"loss": 2}]
