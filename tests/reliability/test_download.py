"""The download command, against a server on this machine."""

import dataclasses
import functools
import hashlib
import http.server
import io
import os
import re
import socket
import subprocess
import sys
import threading
import zipfile

import numpy as np
import pytest

from benchmarks.data import write_robomimic
from diffusion_policy.common.errors import DataError
from diffusion_policy.common.replay_buffer import ReplayBuffer
from diffusion_policy.scripts import download
from diffusion_policy.storage import zarr_io

ZARR = "tiny/tiny.zarr"


class Server(http.server.BaseHTTPRequestHandler):
    """Serves `files` with ranges; can break off after `cut_after` bytes, or ignore ranges."""

    files, cut_after, ranges, seen = {}, None, True, []

    def do_GET(self):
        body = self.files.get(self.path)
        if body is None:
            self.send_error(404)
            return
        if isinstance(body, tuple):  # (address, sha256): redirected, as by Hugging Face
            self.send_response(302)
            self.send_header("Location", body[0])
            self.send_header("X-Linked-Etag", f'"{body[1]}"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        start = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(start[1]) if start and self.ranges else 0
        self.seen.append(start)
        if start and start >= len(body):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start : self.cut_after])

    def log_message(self, *args):
        pass


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server():
    handler = type("Handler", (Server,), {"files": {}, "seen": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        handler.url = f"http://127.0.0.1:{httpd.server_port}/tiny.zip"
        yield handler
        httpd.shutdown()
        thread.join()


@pytest.fixture
def archive(tmp_path, monkeypatch) -> bytes:
    """A zip with a small replay buffer, known to the command as `tiny`."""
    rng = np.random.default_rng(0)
    buffer = ReplayBuffer.create_empty_numpy()
    for n in (5, 8):
        buffer.add_episode({key: rng.normal(size=(n, 40)).astype(np.float32) for key in ("action", "state")})
    buffer.save_to_path(tmp_path / "made" / ZARR)
    keys = ("action", "state")
    monkeypatch.setitem(
        download.SOURCES,
        "tiny",
        download.Source(
            url="http://127.0.0.1:9/unused",
            sha256=None,
            zarr=ZARR,
            episodes=2,
            steps=13,
            keys=keys,
            content_sha256=download.content_sha256(buffer, keys),
        ),
    )
    return zipped(
        {
            str(path.relative_to(tmp_path / "made")): path.read_bytes()
            for path in (tmp_path / "made").rglob("*")
            if path.is_file()
        }
    )


def zipped(files: dict) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        for name, content in files.items():
            file.writestr(name, content)
    return data.getvalue()


@pytest.fixture
def run(server, tmp_path):
    return functools.partial(call, server, tmp_path / "data")


def call(server, output, *arguments):
    return download.main(["tiny", "--output", str(output), "--url", server.url, *arguments])


def left_in(tmp_path):
    return sorted(os.listdir(tmp_path / "data"))


def test_full_download(server, archive, run, tmp_path, capsys):
    server.files["/tiny.zip"] = archive
    digest = hashlib.sha256(archive).hexdigest()
    assert run("--sha256", digest.upper()) == 0
    assert digest in capsys.readouterr().out
    assert left_in(tmp_path) == ["tiny"]
    assert ReplayBuffer.copy_from_path(tmp_path / "data" / ZARR).n_episodes == 2

    assert run() == 0 and server.seen == [0]  # not fetched again
    assert "exists" in capsys.readouterr().out
    assert run("--force") == 0 and server.seen == [0, 0]
    assert left_in(tmp_path) == ["tiny"]


@pytest.mark.parametrize("ranges", [True, False])
def test_resumes_after_a_cut(server, archive, run, tmp_path, capsys, ranges):
    server.files["/tiny.zip"], server.cut_after, server.ranges = archive, 1000, ranges
    assert run() == 1
    assert f"cut after 1000 of {len(archive)} bytes" in capsys.readouterr().err
    assert left_in(tmp_path) == ["tiny.zip.part"]
    server.cut_after = None
    assert run() == 0
    assert server.seen == [0, 1000 if ranges else 0]
    assert left_in(tmp_path) == ["tiny"]


def test_a_whole_file_left_by_an_interruption_is_used(server, archive, run, tmp_path):
    server.files["/tiny.zip"] = archive
    (tmp_path / "data").mkdir()
    (tmp_path / "data/tiny.zip.part").write_bytes(archive)
    assert run() == 0
    assert left_in(tmp_path) == ["tiny"]


def test_wrong_checksum(server, archive, run, tmp_path, capsys):
    server.files["/tiny.zip"] = archive
    assert run("--sha256", "0" * 64) == 1
    assert "expected 0000" in capsys.readouterr().err
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("name", ["../evil.txt", "tiny/../../evil.txt", "/tmp/evil-from-a-zip.txt"])
def test_names_outside_the_folder_are_rejected(server, archive, run, tmp_path, capsys, name):
    server.files["/tiny.zip"] = zipped({"tiny/readme": b"x", name: b"evil"})
    assert run() == 1
    assert "is outside the folder" in capsys.readouterr().err
    assert (
        left_in(tmp_path) == [] and not list(tmp_path.rglob("evil*")) and not os.path.exists("/tmp/evil-from-a-zip.txt")
    )


def test_links_are_rejected(server, archive, run, tmp_path, capsys):
    link = zipfile.ZipInfo("tiny/link")
    link.external_attr = 0o120777 << 16
    server.files["/tiny.zip"] = zipped({link: "/etc/passwd"})
    assert run() == 1
    assert "is outside" in capsys.readouterr().err and left_in(tmp_path) == []


def test_wrong_content(server, archive, run, tmp_path, capsys):
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        good = {name: file.read(name) for name in file.namelist()}
    chunk = next(name for name in good if "data/action/0" in name)
    for files, words in (
        ({"tiny/readme": b"x"}, "is missing"),
        ({name: content for name, content in good.items() if name != chunk}, "chunks are missing"),
        ({**good, chunk: good[chunk.replace("action", "state")]}, "is not what was written"),
    ):
        server.files["/tiny.zip"] = zipped(files)
        assert run() == 1
        assert words in capsys.readouterr().err
        assert left_in(tmp_path) == []
    damaged = bytearray(archive)
    damaged[len(archive) // 2] ^= 0xFF
    for body in (bytes(damaged), archive[:500], b"<html>sorry</html>"):
        server.files["/tiny.zip"] = body
        assert run() == 1 and left_in(tmp_path) == []


def test_a_failed_replacement_keeps_the_old(server, archive, run, tmp_path):
    server.files["/tiny.zip"] = archive
    assert run() == 0
    server.files["/tiny.zip"] = archive[:500]
    assert run("--force") == 1
    assert run() == 0  # the old one is there and complete


def test_a_damaged_dataset_is_not_taken_for_complete(server, archive, run, tmp_path, capsys):
    server.files["/tiny.zip"] = archive
    assert run() == 0
    next((tmp_path / "data" / ZARR).glob("data/action/0*")).unlink()
    assert run() == 1
    assert "chunks are missing" in capsys.readouterr().err
    assert run("--force") == 0 and run() == 0


def test_not_found(server, run, archive, tmp_path, capsys):
    assert run() == 1
    assert "answers 404" in capsys.readouterr().err
    assert left_in(tmp_path) == []


def test_without_a_server(archive, tmp_path, capsys):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/tiny.zip"
        assert download.main(["tiny", "--output", str(tmp_path / "data"), "--url", url]) == 1
    message = capsys.readouterr().err
    assert "cannot be reached" in message and url in message and message.count("\n") == 1


def test_a_silent_server_times_out(archive, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT_SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/tiny.zip"
        assert download.main(["tiny", "--output", str(tmp_path), "--url", url]) == 1
    assert "timed out" in capsys.readouterr().err


def test_as_a_command(repo_root, tmp_path):
    command = [
        sys.executable,
        "-m",
        "diffusion_policy.scripts.download",
        "pusht",
        "--output",
        str(tmp_path),
        "--url",
        "http://127.0.0.1:9/pusht.zip",
    ]
    result = subprocess.run(command, cwd=repo_root, capture_output=True, text=True)
    assert result.returncode == 1 and "cannot be reached" in result.stderr and "Traceback" not in result.stderr


def test_the_published_facts_hold_of_the_human_data(human_pusht):
    download.verify(human_pusht, download.SOURCES["pusht"])


def test_the_images_have_a_checksum_too(archive, tmp_path):
    path, source = tmp_path / "made" / ZARR, download.SOURCES["tiny"]
    group = zarr_io.open_group(path, "r")["data"]
    source = dataclasses.replace(source, images=("state", zarr_io.sha256(group["state"])))
    download.verify(path, source)
    values = group["state"][:]
    assert zarr_io.sha256(group["state"]) == hashlib.sha256(values.tobytes()).hexdigest()
    for images in (("state", "0" * 64), ("img", "0" * 64)):
        with pytest.raises(DataError, match="its images"):
            download.verify(path, dataclasses.replace(source, images=images))


# robomimic files


@pytest.fixture
def demos(tmp_path):
    return write_robomimic(tmp_path / "made.hdf5", size=4).read_bytes()


def fetch_robomimic(server, tmp_path, *arguments, task="lift"):
    url = server.url.replace("tiny.zip", "demos.hdf5")
    return download.main(["robomimic", "--task", task, "--output", str(tmp_path / "data"), "--url", url, *arguments])


def test_robomimic_file(server, demos, tmp_path, capsys):
    server.files["/demos.hdf5"] = demos
    assert fetch_robomimic(server, tmp_path, "--kind", "mh", "--obs", "image_abs") == 0
    digest, out = hashlib.sha256(demos).hexdigest(), capsys.readouterr().out
    folder = tmp_path / "data/robomimic/datasets/lift/mh"
    assert (
        sorted(os.listdir(folder)) == ["image_abs.hdf5", "image_abs.hdf5.sha256"]
        and (folder / "image_abs.hdf5").read_bytes() == demos
    )
    assert (folder / "image_abs.hdf5.sha256").read_text() == f"{digest}  image_abs.hdf5\n"
    assert f"sha256 {digest}" in out and "No published checksum" in out and "3 demonstrations, 36 steps" in out

    arguments = ("--kind", "mh", "--obs", "image_abs")
    assert fetch_robomimic(server, tmp_path, *arguments) == 0 and server.seen == [0]
    assert "exists and is complete" in capsys.readouterr().out
    with open(folder / "image_abs.hdf5", "ab") as file:
        file.write(b"x")
    assert fetch_robomimic(server, tmp_path, *arguments) == 1
    assert "has changed since it was fetched" in capsys.readouterr().err
    assert (
        fetch_robomimic(server, tmp_path, *arguments, "--force") == 0
        and (folder / "image_abs.hdf5").read_bytes() == demos
    )
    (folder / "image_abs.hdf5.sha256").unlink()
    assert fetch_robomimic(server, tmp_path, *arguments) == 0 and "Its checksum is not known" in capsys.readouterr().out


def test_robomimic_file_resumes(server, demos, tmp_path, capsys):
    server.files["/demos.hdf5"], server.cut_after = demos, 1000
    folder = tmp_path / "data/robomimic/datasets/lift/ph"
    assert fetch_robomimic(server, tmp_path) == 1
    message = capsys.readouterr().err
    assert (
        "cut after 1000" in message
        and f"put it at {folder / 'low_dim_abs.hdf5'}" in message
        and os.listdir(folder) == ["low_dim_abs.hdf5.part"]
    )
    server.cut_after = None
    assert fetch_robomimic(server, tmp_path) == 0
    assert server.seen == [0, 1000] and (folder / "low_dim_abs.hdf5").read_bytes() == demos


def test_the_checksum_from_hugging_face_is_compared(server, demos, tmp_path, capsys):
    server.files["/there"] = demos
    server.files["/demos.hdf5"] = ("/there", hashlib.sha256(demos).hexdigest())
    assert fetch_robomimic(server, tmp_path) == 0 and "published by the server" in capsys.readouterr().out
    server.files["/demos.hdf5"] = ("/there", "0" * 64)
    assert fetch_robomimic(server, tmp_path, "--force") == 1 and "expected 0000" in capsys.readouterr().err
    assert fetch_robomimic(server, tmp_path) == 0  # the old one is there
    server.files["/demos.hdf5"] = ("/there", "an etag of another kind")
    assert fetch_robomimic(server, tmp_path, "--force") == 0 and "No published checksum" in capsys.readouterr().out


def test_robomimic_s_own_files_have_pinned_checksums(server, demos, tmp_path, capsys, monkeypatch):
    server.files["/demos.hdf5"] = demos
    own = ("--source", "robomimic", "--obs", "low_dim")
    assert fetch_robomimic(server, tmp_path, *own) == 1
    assert f"expected {download.ROBOMIMIC_PH_SHA256['lift']}" in capsys.readouterr().err
    assert fetch_robomimic(server, tmp_path, *own, "--kind", "mh") == 0  # no checksum of it is public
    monkeypatch.setitem(download.ROBOMIMIC_PH_SHA256, "lift", hashlib.sha256(demos).hexdigest())
    assert fetch_robomimic(server, tmp_path, *own) == 0 and "the expected one" in capsys.readouterr().out
    assert set(download.ROBOMIMIC_PH_SHA256) == set(download.TASKS)


def test_wrong_robomimic_files(server, demos, tmp_path, capsys):
    folder = tmp_path / "data/robomimic/datasets/lift/ph"
    for body in (b"<html>sorry</html>", b"version https://git-lfs.github.com/spec/v1\n", demos[: len(demos) // 2]):
        server.files["/demos.hdf5"] = body
        assert fetch_robomimic(server, tmp_path) == 1 and os.listdir(folder) == []
        assert "not an HDF5 file or it is damaged" in capsys.readouterr().err
    server.files["/demos.hdf5"] = demos
    assert fetch_robomimic(server, tmp_path, "--sha256", "0" * 64) == 1 and os.listdir(folder) == []


def test_a_full_disk_is_reported_before_the_download(server, demos, tmp_path, capsys, monkeypatch):
    server.files["/demos.hdf5"] = demos
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    assert fetch_robomimic(server, tmp_path) == 1
    assert "where 0.0 GB are free" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--task", "lift", "--kind", "scripted"], "invalid choice: 'scripted'"),
        (["--task", "tool_hang", "--kind", "mh"], "only demonstrations of kind ph"),
        (["--task", "pour"], "invalid choice: 'pour'"),
        (["--task", "lift", "--obs", "image", "--source", "robomimic"], "only low_dim"),
        ([], "--task"),
    ],
)
def test_what_robomimic_does_not_have(arguments, words, capsys):
    with pytest.raises(SystemExit):
        download.main(["robomimic", *arguments])
    assert words in capsys.readouterr().err


def test_robomimic_urls():
    assert download.robomimic_url("can", "mh", "image_abs", "mip").endswith(
        "/ChaoyiPan/mip-dataset/resolve/main/robomimic/can/mh/image_abs.hdf5"
    )
    assert download.robomimic_url("can", "ph", "low_dim", "robomimic").endswith(
        "/amandlek/robomimic/resolve/main/v1.5/can/ph/low_dim_v15.hdf5"
    )
