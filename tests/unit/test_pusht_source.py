"""Where PushT's demonstrations come from, and the identity that results carry."""

import functools
import http.server
import io
import multiprocessing
import socket
import sys
import threading
import time
import zipfile

import numpy as np
import pytest
import torch

from benchmarks.data import write_pusht
from diffusion_policy.common.errors import DataError, DataNotFoundError
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.dataset import pusht_source
from diffusion_policy.dataset.identity import check_same, dataset_identity
from diffusion_policy.dataset.pusht_dataset import PushTLowdimDataset, PushTStateDataset
from diffusion_policy.dataset.pusht_image_dataset import PushTImageDataset
from diffusion_policy.scripts import download

KEYS = ("action", "state", "keypoint")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An empty project folder that has the shipped rollouts, and no server for the human demonstrations."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(pusht_source, "project_path", str)  # of this folder only, not of the repository
    write_pusht(tmp_path / pusht_source.SHIPPED, seed=1)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        set_source(monkeypatch, unused.getsockname()[1], write_pusht(tmp_path / "made/pusht.zarr"))
        yield tmp_path


def set_source(monkeypatch, port, published):
    buffer = ReplayBuffer.copy_from_path(published, keys=KEYS)
    source = download.Source(
        url=f"http://127.0.0.1:{port}/pusht.zip",
        sha256=None,
        zarr=pusht_source.HUMAN.removeprefix("data/"),
        episodes=buffer.n_episodes,
        steps=buffer.n_steps,
        keys=KEYS,
        content_sha256=download.content_sha256(buffer, KEYS),
    )
    monkeypatch.setitem(download.SOURCES, "pusht", source)


def serve(monkeypatch, project, body):
    """Publish `body` as the archive of the human demonstrations."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    set_source(monkeypatch, server.server_port, project / "made/pusht.zarr")
    return server


def archive(folder):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        for path in folder.rglob("*"):
            if path.is_file():
                name = pusht_source.HUMAN.removeprefix("data/")
                file.writestr(f"{name}/{path.relative_to(folder)}", path.read_bytes())
    return data.getvalue()


def test_the_human_demonstrations_at_their_default_path_are_used(project):
    write_pusht(project / pusht_source.HUMAN)
    assert pusht_source.find_pusht("auto") == (pusht_source.HUMAN, None)


def test_they_are_downloaded_and_checked(project, monkeypatch):
    server = serve(monkeypatch, project, archive(project / "made/pusht.zarr"))
    dataset = PushTStateDataset("auto", horizon=4)
    server.shutdown()
    assert dataset.source == pusht_source.HUMAN and dataset.source_warning is None
    assert not (project / "data/pusht.zip.part").exists()
    assert PushTStateDataset("auto", horizon=4).source == pusht_source.HUMAN  # without the server


def test_runs_that_start_at_once_download_once(project, monkeypatch):
    """A lock between processes: the second one waits, and then finds the data complete."""
    server = serve(monkeypatch, project, archive(project / "made/pusht.zarr"))
    source, start = download.SOURCES["pusht"], multiprocessing.get_context("fork")
    monkeypatch.setattr(download, "fetch", functools.partial(slowly, download.fetch))
    runs = [start.Process(target=find_or_fail) for _ in range(2)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    server.shutdown()
    assert [run.exitcode for run in runs] == [0, 0]
    assert (project / "fetched").read_text() == "x"
    download.verify(project / pusht_source.HUMAN, source)


def slowly(fetch, *arguments):
    with open("fetched", "a") as file:
        file.write("x")
    time.sleep(0.3)
    return fetch(*arguments)


def find_or_fail():
    sys.exit(pusht_source.find_pusht("auto") != (pusht_source.HUMAN, None))


def test_a_wrong_download_is_an_error_and_not_a_reason_for_other_data(project, monkeypatch):
    other = write_pusht(project / "other.zarr", seed=9)
    server = serve(monkeypatch, project, archive(other))
    with pytest.raises(DataError, match="differ from the published dataset"):
        PushTStateDataset("auto", horizon=4)
    server.shutdown()


@pytest.mark.parametrize("cls", [PushTStateDataset, PushTLowdimDataset, PushTImageDataset])
def test_without_a_network_the_rollouts_are_used_with_a_loud_warning(project, caplog, cls):
    dataset = cls("auto", horizon=4)
    assert dataset.source == pusht_source.SHIPPED
    identity = dataset_identity(dataset, {"zarr_path": "auto"})
    assert identity["name"] == "pusht_policy_rollouts.zarr" and "DO NOT COMPARE WITH PAPERS" in identity["warning"]
    (record,) = [record for record in caplog.records if record.name == pusht_source.__name__]
    assert record.levelname == "WARNING" and record.getMessage() == identity["warning"]
    # Named by the user, the same file is what was asked for.
    assert cls(pusht_source.SHIPPED, horizon=4).source_warning is None


def test_a_silent_server_counts_as_no_network(project, monkeypatch):
    monkeypatch.setattr(download, "CONNECT_SECONDS", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        set_source(monkeypatch, silent.getsockname()[1], project / "made/pusht.zarr")
        path, warning = pusht_source.find_pusht("auto")
    assert path == pusht_source.SHIPPED and "timed out" in warning


def test_without_a_network_and_without_the_repository(project, monkeypatch):
    monkeypatch.setattr(pusht_source, "SHIPPED", "data/nothing.zarr")
    with pytest.raises(DataNotFoundError, match="diffusion_policy.scripts.download pusht"):
        pusht_source.find_pusht("auto")


# ---------------------------------------------------------------------- identity
def test_identity_depends_on_the_numbers_and_not_on_their_storage(tmp_path):
    plain = write_pusht(tmp_path / "a.zarr")
    buffer = ReplayBuffer.copy_from_path(plain)
    buffer.save_to_path(tmp_path / "b.zarr", chunks={"state": (7, 5)}, compressors="disk")
    buffer.data["action"][3, 1] += 1e-3
    buffer.save_to_path(tmp_path / "c.zarr")
    first, same, other = (
        dataset_identity(PushTStateDataset(tmp_path / name, horizon=4, max_train_episodes=count), {})
        for name, count in (("a.zarr", None), ("b.zarr", 2), ("c.zarr", None))
    )
    assert (first["name"], same["name"], first["warning"]) == ("a.zarr", "b.zarr", None)
    assert len(first["sha256"]) == 64 and first["sha256"] == same["sha256"] != other["sha256"]
    check_same(first, same)
    check_same(None, other)  # a checkpoint from before there were identities
    with pytest.raises(DataError, match=r"trained on a.zarr .*the dataset is now c.zarr"):
        check_same(first, other)


def test_identity_of_a_user_s_own_dataset():
    class Own(torch.utils.data.Dataset):
        def get_all_actions(self):
            return torch.arange(6.0).view(3, 2)

    identity = dataset_identity(Own(), {"dataset_path": "data/mine/"})
    assert identity["name"] == "mine" and len(identity["sha256"]) == 64
    assert dataset_identity(Own(), {"dataset_dir": "data/kitchen"})["name"] == "kitchen"
    assert dataset_identity(torch.utils.data.Dataset(), {}) == {"name": "Dataset", "sha256": None, "warning": None}


def test_the_human_demonstrations_have_one_identity(human_pusht):
    dataset = PushTStateDataset(human_pusht, horizon=16, pad_before=1, pad_after=7)
    identity = dataset_identity(dataset, {})
    assert identity["name"] == "pusht_cchi_v7_replay.zarr"
    assert identity["sha256"] == "fdee323cfdd0dec6fe09878feb6205faba841fa47a53d7ab86ffb5edbde62bf5"


# ---------------------------------------------------------------------- MIP's normalisation
def test_mip_s_keypoints_share_a_scale(tmp_path):
    path = write_pusht(tmp_path / "pusht.zarr")
    dataset = PushTLowdimDataset(path, horizon=4, normalization="min_max")
    keypoints, state = (ReplayBuffer.copy_from_path(path)[key] for key in ("keypoint", "state"))
    normalizer = dataset.get_normalizer()["obs"]
    low, high = keypoints.min(axis=(0, 1)), keypoints.max(axis=(0, 1))  # of x and of y
    expected = [2 * (keypoints - low) / (high - low) - 1]
    low, high = state[:, :2].min(axis=0), state[:, :2].max(axis=0)
    expected = np.concatenate([expected[0].reshape(-1, 18), 2 * (state[:, :2] - low) / (high - low) - 1], axis=1)
    np.testing.assert_allclose(normalizer.normalize(dataset.steps["obs"]), expected, atol=1e-5)
    own = PushTLowdimDataset(path, horizon=4).get_normalizer()["obs"].params_dict["scale"]  # upstream's: one each
    assert len(own.unique()) > 4 and len(normalizer.params_dict["scale"].unique()) == 4
