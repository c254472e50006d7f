"""Bad input for the policy server; `python -m benchmarks.server` sends 100,000 pieces."""

import asyncio

import numpy as np
import pytest

pytest.importorskip("websockets")
openpi = pytest.importorskip("openpi_client.websocket_client_policy")

from benchmarks.server_fuzz import FAILURES, Fuzzer
from benchmarks.untrained import untrained
from diffusion_policy.serving.background import in_background
from diffusion_policy.serving.server import PolicyServer


def test_bad_input_crashes_nothing_and_lets_nobody_in(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    policy, _ = untrained("train_regression_mlp_lowdim", "preset=debug")
    with in_background(PolicyServer(policy, host="0.0.0.0", port=0, token="s3cret")) as server:
        robot = openpi.WebsocketClientPolicy("127.0.0.1", server.port, api_key="s3cret")
        observation = {"obs": np.full(5, 0.5, dtype=np.float32)}
        expected = robot.infer(observation)["actions"]
        counts = asyncio.run(Fuzzer(server.port, "s3cret", 5, seed=3).run(400))
        assert not any(counts[name] for name in FAILURES), counts
        assert min(counts[kind] for kind in ("refused with a line", "kept out", "broken frame", "answered")) > 0
        np.testing.assert_array_equal(robot.infer(observation)["actions"], expected)
    assert server.metrics.counts["errors_total", 'kind="server"'] == 0


def test_the_fuzzer_sees_a_server_without_a_token():
    policy, _ = untrained("train_regression_mlp_lowdim", "preset=debug")
    with in_background(PolicyServer(policy, port=0)) as server:
        assert asyncio.run(Fuzzer(server.port, "s3cret", 5, seed=3).run(60))["let in"] > 0
