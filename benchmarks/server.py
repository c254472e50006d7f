"""What the policy server adds to a call, its memory, its clients, and bad input.

    python -m benchmarks.server                     everything; 100,000 pieces of bad input take some minutes
    python -m benchmarks.server --requests 1000 --fuzz 2000

Uses openpi's own client and a server in a process of its own. Writes results.json and README.md to results/server/.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import json
import pathlib
import secrets
import tempfile
import time
import urllib.request
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.__main__ import machine, table
from benchmarks.common import row
from benchmarks.server_fuzz import FAILURES, Fuzzer
from benchmarks.server_process import ServerProcess, running
from benchmarks.untrained import export_untrained
from diffusion_policy.policy.interface import ChunkPredictor
from diffusion_policy.policy.loading import load_policy
from diffusion_policy.storage import atomic

ROOT = pathlib.Path(__file__).resolve().parents[1]
CAMERAS = ("task.image_shape=[3,224,224]", "+task.shape_meta.obs.wrist={shape: [3, 224, 224], type: rgb}")


def client(server: ServerProcess, token: str | None = None) -> Any:
    from openpi_client.websocket_client_policy import WebsocketClientPolicy

    return WebsocketClientPolicy("127.0.0.1", server.port, api_key=token)


def added(server: ServerProcess, observation: dict[str, np.ndarray], calls: int) -> tuple[float, float]:
    """Median milliseconds of a call beside the policy's own, and of the whole call."""
    robot, beside, whole = client(server), [], []
    for _ in tqdm(range(calls + 20), desc="calls", leave=False, disable=None):
        started = time.perf_counter()
        answer = robot.infer(observation)
        whole.append(1000 * (time.perf_counter() - started))
        beside.append(whole[-1] - answer["server_timing"]["infer_ms"])
    return float(np.median(beside[20:])), float(np.median(whole[20:]))


def overhead(folder: pathlib.Path, calls: int) -> list[dict[str, Any]]:
    state = {"obs": np.random.default_rng(0).random(5, dtype=np.float32)}
    images = np.random.default_rng(0).integers(0, 256, (2, 224, 224, 3), dtype=np.uint8)
    seen = {"image": images[0], "wrist": images[1], "agent_pos": np.zeros(2, dtype=np.float32)}
    cases = {
        "state": (state, 1.0, "train_idp_mlp_lowdim", ["preset=cpu"], calls),
        "two 224x224 images": (seen, 4.0, "train_idp_mlp_image", ["preset=debug", *CAMERAS], max(calls // 10, 20)),
    }
    rows = []
    for name, (observation, limit, config, overrides, count) in cases.items():
        with running(export_untrained(folder / config, config, *overrides)) as server:
            value, whole = added(server, observation, count)
        detail = f"{count} calls, the whole call {whole:.2f} ms"
        rows.append(row(f"added to a call, p50, {name}", value, "ms", f"<= {limit}", detail))
    return rows


def many_clients(checkpoint: pathlib.Path, requests: int, clients: int = 8) -> list[dict[str, Any]]:
    """Requests of several clients at once: every answer must be that of the policy for this client's observations."""
    predict = ChunkPredictor(load_policy(checkpoint, "cpu"))
    generator = np.random.default_rng(1)
    steps = generator.random((clients, requests // clients, 5), dtype=np.float32)

    def talk(server: ServerProcess, mine: np.ndarray) -> int:
        robot, right = client(server), 0
        for i, step in enumerate(mine):
            actions = robot.infer({"obs": step})["actions"]
            history = np.stack([mine[max(i - 1, 0)], step])
            right += i % 50 > 0 or np.allclose(actions, predict.executed({"obs": history[None]})[0], atol=1e-4)
        return right

    with running(checkpoint) as server, concurrent.futures.ThreadPoolExecutor(clients) as pool:
        list(pool.map(lambda mine: talk(server, mine[:200]), steps))
        before, started = server.memory(), time.perf_counter()
        right = sum(pool.map(lambda mine: talk(server, mine), steps))
        seconds, growth = time.perf_counter() - started, server.memory() - before
        text = urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics").read().decode()
    batches = next(line.split()[1] for line in text.splitlines() if line.startswith("policy_server_batches_total"))
    asked = steps.shape[0] * steps.shape[1]
    detail = f"{clients} clients, {asked / seconds:.0f} requests per second, {batches} calls of the policy in all"
    return [
        row(f"lost or wrong of {asked} requests, {clients} clients", asked - right, "", "<= 0", detail),
        row(f"growth of memory over {asked} requests", growth, "MB", "<= 2", f"of {before:.0f} MB"),
    ]


def fuzz(checkpoint: pathlib.Path, count: int) -> list[dict[str, Any]]:
    token = secrets.token_urlsafe(16)
    with running(checkpoint, "--host", "0.0.0.0", "--token", token) as server:
        observation = {"obs": np.zeros(5, dtype=np.float32)}
        expected = client(server, token).infer(observation)["actions"]
        asyncio.run(Fuzzer(server.port, token, 5).run(min(count, 2000)))
        before = server.memory()
        fuzzer = Fuzzer(server.port, token, 5, seed=1)
        counts = asyncio.run(fuzzer.run(count))
        growth, alive = server.memory() - before, server.alive()
        works = alive and np.array_equal(client(server, token).infer(observation)["actions"], expected)
    failures = sum(counts[name] for name in FAILURES) + (not works)
    detail = ", ".join(f"{name}: {number}" for name, number in counts.most_common())
    return [
        row(f"failures in {count} pieces of bad input", failures, "", "<= 0", detail),
        row("connections without the token", counts["let in"], "", "<= 0"),
        row("growth of memory meanwhile", growth, "MB", "<= 20", f"of {before:.0f} MB"),
    ]


README = """# The policy server

openpi's own client over loopback, the server in a process of its own, one thread, weights at random. `added` is the
time of a call at the client minus that of the policy's own work in it. `load` is the machine's when a part began: with
more than its two cores busy, the times include waiting for a core.

| what | value | target | met | load | detail |
|---|---|---|---|---|---|
{rows}

Made with `python -m benchmarks.server`; versions are in results.json.
"""


def write(folder: pathlib.Path, parts: dict[str, dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write_text(folder / "results.json", json.dumps(parts, indent=2) + "\n")
    lines = [
        f"| {r['name']} | {r['value']:.3g} {r['unit']} | {r['target']} | {['NO', 'yes'][r['met']]} "
        f"| {part['load_average'][0]:.1f} | {r['detail']} |"
        for part in parts.values()
        for r in part["rows"]
    ]
    atomic.write_text(folder / "README.md", README.format(rows="\n".join(lines)))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.server", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000, help="of eight clients (default 10000)")
    parser.add_argument("--calls", type=int, default=1000, help="of one client, timed (default 1000)")
    parser.add_argument("--fuzz", type=int, default=100_000, help="pieces of bad input (default 100000)")
    parser.add_argument(
        "--only", nargs="+", choices=("overhead", "clients", "fuzz"), help="parts; others keep their rows"
    )
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "results/server")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of openpi's client with current websockets
    before = options.output / "results.json"
    parts: dict[str, Any] = json.loads(before.read_text()) if before.is_file() else {}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        small = export_untrained(folder / "small", "train_idp_mlp_lowdim", "preset=cpu")
        work: dict[str, Callable[[], list[dict[str, Any]]]] = {
            "overhead": lambda: overhead(folder, options.calls),
            "clients": lambda: many_clients(small, options.requests),
            "fuzz": lambda: fuzz(small, options.fuzz),
        }
        for part in options.only or work:
            about = machine()
            parts[part] = {**about, "rows": work[part]()}
            print(table(parts[part]["rows"]), flush=True)
            write(options.output, {part: parts[part] for part in work if part in parts})


if __name__ == "__main__":
    main()
