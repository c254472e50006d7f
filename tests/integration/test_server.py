"""The policy server over real sockets, with openpi's own client."""

import concurrent.futures
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch

pytest.importorskip("websockets")
openpi = pytest.importorskip("openpi_client.websocket_client_policy")
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from benchmarks.untrained import export_untrained, untrained
from diffusion_policy import load_policy
from diffusion_policy.common.errors import ConfigError
from diffusion_policy.scripts import export
from diffusion_policy.serving.background import in_background
from diffusion_policy.serving.codec import decode, encode
from diffusion_policy.serving.server import PolicyServer
from tests.util import ROOT


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")


class Echo:
    """Returns what it saw: actions (B, 3, 2), the last of them the history of the first number, oldest first."""

    n_obs_steps, n_action_steps, action_dim, nfe = 2, 3, 2, 1
    device = torch.device("cpu")

    def __init__(self):
        self.batches, self.open = [], threading.Event()
        self.open.set()

    def obs_shapes(self):
        return {"obs": (4,)}

    def predict_action(self, obs):
        self.open.wait(20)
        history = obs["obs"][:, :, 0]
        self.batches.append(len(history))
        if (history == 13).any():
            raise ValueError("13 is far outside the dataset")
        if (history == 14).any():
            raise RuntimeError("secret details")
        return {"action": history[:, None].expand(-1, 3, -1)}


def obs(number, **extra):
    return {"obs": np.full(4, number, dtype=np.float32), **extra}


@pytest.fixture
def echo():
    return Echo()


@pytest.fixture
def server(echo):
    with in_background(PolicyServer(echo, port=0)) as running:
        echo.batches.clear()  # of the warm-up
        yield running


def client(server, **options):
    return openpi.WebsocketClientPolicy("127.0.0.1", server.port, **options)


def saw(answer):
    return answer["actions"][-1].tolist()


def get(server, path, **headers):
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


# ---------------------------------------------------------------------- what a robot does
@pytest.mark.parametrize("name", ["train_idp_mlp_lowdim", "train_idp_transformer_image"])
def test_a_policy_served_acts_as_the_policy_itself(name):
    policy, _ = untrained(name, "preset=debug")
    generator = np.random.default_rng(0)
    state = lambda: {"obs": generator.random(5, dtype=np.float32)}
    image = lambda: {
        "image": generator.integers(0, 256, (3, 96, 96), dtype=np.uint8),
        "agent_pos": generator.random(2, dtype=np.float32),
    }
    steps = [(image if "image" in name else state)() for _ in range(3)]
    with in_background(PolicyServer(policy, port=0)) as server:
        robot = client(server)
        answers = [robot.infer(step) for step in steps]
        metadata = robot.get_server_metadata()
    history = {key: torch.from_numpy(np.stack([step[key] for step in steps[-2:]]))[None] for key in steps[0]}
    expected = policy.predict_action(history)["action"][0].numpy()
    np.testing.assert_allclose(answers[-1]["actions"], expected, atol=1e-6)
    assert metadata["action_horizon"] == len(expected) and metadata["n_obs_steps"] == 2
    assert set(metadata["observation"]) == set(steps[0])
    assert answers[0]["server_timing"]["infer_ms"] > 0 and answers[1]["server_timing"]["prev_total_ms"] > 0


def test_history_is_kept_per_connection_and_reset_on_request(server):
    one, other = client(server), client(server)
    assert saw(one.infer(obs(1))) == [1, 1]  # the first observation stands for those before it
    assert saw(one.infer(obs(2))) == [1, 2]
    assert saw(other.infer(obs(7))) == [7, 7]
    assert saw(one.infer(obs(3))) == [2, 3]
    assert saw(one.infer(obs(4, reset=True))) == [4, 4]
    assert saw(one.infer(obs(5))) == [4, 5]


def test_a_robot_that_plans_once_per_chunk_still_gives_every_step(server):
    """Otherwise the history would be a chunk apart, which no policy was trained on."""
    robot = client(server)
    robot.infer(obs(1))
    for step in (2, 3, 4):
        assert "actions" not in robot.infer(obs(step, observe_only=True))
    assert saw(robot.infer(obs(5))) == [4, 5]
    whole = {"obs": np.stack([np.full(4, 8.0), np.full(4, 9.0)])}
    assert saw(robot.infer(whole)) == [8, 9]


def test_their_chunk_broker_works(server):
    broker = pytest.importorskip("openpi_client.action_chunk_broker")
    robot = broker.ActionChunkBroker(client(server), action_horizon=3)
    assert [robot.infer(obs(step))["actions"].tolist() for step in (1, 2, 3, 4)] == [[1, 1]] * 3 + [[1, 4]]


# ---------------------------------------------------------------------- many clients
def test_waiting_clients_are_answered_by_one_call_and_each_gets_its_own(server, echo):
    echo.open.clear()
    robots = [client(server) for _ in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(robot.infer, obs(100 + i)) for i, robot in enumerate(robots)]
        deadline = time.monotonic() + 20
        while len(server._busy) < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        echo.open.set()
        assert [saw(answer.result()) for answer in answers] == [[100 + i] * 2 for i in range(8)]
    assert sum(echo.batches) == 8 and len(echo.batches) <= 3


def test_an_observation_that_fails_the_policy_fails_its_client_alone(server, echo):
    echo.open.clear()
    robots = {number: client(server) for number in (1, 13, 2, 14)}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = {number: pool.submit(robot.infer, obs(number)) for number, robot in robots.items()}
        deadline = time.monotonic() + 20
        while len(server._busy) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        echo.open.set()
        assert [saw(answers[number].result()) for number in (1, 2)] == [[1, 1], [2, 2]]
        with pytest.raises(RuntimeError, match="13 is far outside the dataset"):
            answers[13].result()
        with pytest.raises(RuntimeError, match="the policy failed with RuntimeError") as refusal:
            answers[14].result()
    assert "secret" not in str(refusal.value) and "Traceback" not in str(refusal.value)
    assert saw(robots[1].infer(obs(3))) == [1, 3]


def test_clients_that_die_stall_or_send_garbage_disturb_nobody(server, echo):
    robot = client(server)
    url = f"ws://127.0.0.1:{server.port}"
    echo.open.clear()
    dying = connect(url, compression=None)
    dying.recv()
    dying.send(encode(obs(5)))
    while not server._busy:
        time.sleep(0.01)
    dying.socket.close()  # in the middle of its request
    echo.open.set()
    stalled = socket.create_connection(("127.0.0.1", server.port))
    stalled.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")  # and nothing more
    half = connect(url, compression=None)
    half.socket.sendall(b"\x82\xfe\x04\x00\0\0\0\0" + b"x" * 100)  # the beginning of a frame
    garbage = socket.create_connection(("127.0.0.1", server.port))
    garbage.sendall(os.urandom(2000))
    greedy = connect(url, compression=None)
    for _ in range(50):
        greedy.send(encode(obs(6)))  # never reads an answer
    assert saw(robot.infer(obs(1))) == [1, 1]
    for other in (stalled, half.socket, garbage, greedy.socket):
        other.close()
    assert saw(robot.infer(obs(2))) == [1, 2]


REFUSED = {
    "text": "hello",
    "no msgpack": b"\xc1\xc1",
    "missing key": encode({"image": np.zeros(3)}),
    "wrong shape": encode({"obs": np.zeros(3)}),
    "not finite": encode({"obs": np.full(4, np.nan)}),
    "no numbers": encode({"obs": "up"}),
    "no map": encode([1, 2]),
}


@pytest.mark.parametrize("message", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_answered_with_one_line_and_the_end(server, message):
    with connect(f"ws://127.0.0.1:{server.port}", compression=None) as socket:
        decode(socket.recv())
        socket.send(message)
        answer = socket.recv()
        assert isinstance(answer, str) and len(answer.splitlines()) == 1 and "Traceback" not in answer
        with pytest.raises(ConnectionClosed) as end:
            socket.recv()
        assert end.value.rcvd.code == 1011


def test_a_message_larger_than_any_observation_is_refused(server):
    with connect(f"ws://127.0.0.1:{server.port}", compression=None) as socket:
        socket.recv()
        with pytest.raises(ConnectionClosed) as end:
            socket.send(b"x" * (server.reader.max_bytes + 1))
            socket.recv()
        assert end.value.rcvd.code == 1009


# ---------------------------------------------------------------------- who may connect
def test_a_token_is_needed_where_others_can_connect():
    for host in ("0.0.0.0", "192.168.1.5", "::", "robot.local", ""):
        with pytest.raises(ConfigError, match="token"):
            PolicyServer(Echo(), host=host)
    for host in ("127.0.0.1", "localhost", "::1"):
        PolicyServer(Echo(), host=host)


def test_nobody_gets_in_without_the_token():
    with in_background(PolicyServer(Echo(), host="0.0.0.0", port=0, token="s3cret")) as server:
        assert saw(client(server, api_key="s3cret").infer(obs(1))) == [1, 1]
        url = f"ws://127.0.0.1:{server.port}"
        headers = ["", "s3cret", "Api-Key", "Api-Key ", "Api-Key s3cre", "Bearer s3cret", "Api-Key é"]
        for header in headers:
            with pytest.raises(InvalidStatus) as refusal:
                connect(url, additional_headers={"Authorization": header} if header else None)
            assert refusal.value.response.status_code == 401
        with pytest.raises(InvalidStatus):
            connect(url, additional_headers=[("Authorization", "Api-Key s3cret"), ("Authorization", "x")])
        assert get(server, "/healthz") == (200, "OK\n")
        assert get(server, "/metrics")[0] == 401
        status, text = get(server, "/metrics", Authorization="Api-Key s3cret")
        assert status == 200 and 'policy_server_refused_total{reason="token"}' in text


def test_no_web_page_may_connect(server):
    with pytest.raises(InvalidStatus) as refusal:
        connect(f"ws://127.0.0.1:{server.port}", origin="https://evil.example")
    assert refusal.value.response.status_code == 403


def test_there_is_a_limit_of_clients():
    with in_background(PolicyServer(Echo(), port=0, max_clients=2)) as server:
        robots = [client(server), client(server)]
        with pytest.raises(InvalidStatus) as refusal:
            client(server)
        assert refusal.value.response.status_code == 503
        robots[0]._ws.close()
        assert saw(client(server).infer(obs(1))) == [1, 1]


def test_metrics(server):
    robot = client(server)
    for step in range(5):
        robot.infer(obs(step))
    status, text = get(server, "/metrics")
    assert status == 200
    values = dict(re.findall(r"^(\w+(?:\{[^}]*\})?) (\S+)$", text, re.M))
    assert values["policy_server_requests_total"] == "5" and values["policy_server_connections"] == "1"
    assert values['policy_server_inference_seconds_bucket{le="+Inf"}'] == "5"
    assert float(values["policy_server_request_seconds_sum"]) > 0
    assert all(re.fullmatch(r"(# (HELP|TYPE) .+)|(\w+(\{[^}]+\})? \S+)", line) for line in text.splitlines())


# ---------------------------------------------------------------------- the end
def test_stopping_answers_what_is_being_computed(echo):
    server = PolicyServer(echo, port=0)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with in_background(server):
            busy, idle = client(server), client(server)
            echo.open.clear()
            answer = pool.submit(busy.infer, obs(1))
            while not server._busy:
                time.sleep(0.01)
            threading.Timer(0.3, echo.open.set).start()
        assert saw(answer.result()) == [1, 1]
    for robot in (busy, idle):
        with pytest.raises(ConnectionClosed) as end:
            robot.infer(obs(2))
        assert end.value.rcvd.code == 1001


def start(checkpoint, *arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "diffusion_policy.scripts.serve", "-c", str(checkpoint), "--port", "0", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("file", ["weights", "weights.onnx"])
def test_the_command_serves_a_policy_and_ends_well(file, tmp_path):
    weights = export_untrained(tmp_path / "weights", "train_regression_mlp_lowdim", "preset=debug")
    if file.endswith(".onnx"):
        export.main(["-c", str(weights)])
    process = start(tmp_path / file, POLICY_SERVER_TOKEN="s3cret")
    try:
        first = process.stdout.readline()
        port = int(re.search(r"ws://127.0.0.1:(\d+)", first)[1])
        robot = openpi.WebsocketClientPolicy("127.0.0.1", port, api_key="s3cret")
        step = np.linspace(0, 1, 5, dtype=np.float32)
        actions = [robot.infer({"obs": factor * step})["actions"] for factor in (1, 2)]
    finally:
        process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "stopping" in out and not err
    history = torch.from_numpy(np.stack([step, 2 * step]))[None]
    expected = load_policy(weights, "cpu").predict_action({"obs": history})["action"][0]
    np.testing.assert_allclose(actions[1], expected, atol=1e-5)


@pytest.mark.parametrize(
    "arguments, text", [(["--host", "0.0.0.0"], "a token is needed"), (["--max-batch", "0"], "at least 1")]
)
def test_mistakes_are_one_line(arguments, text, tmp_path):
    process = start(tmp_path, *arguments, POLICY_SERVER_TOKEN="")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and text in err and len(err.splitlines()) == 1
