"""Serve a policy over a WebSocket, in the protocol of openpi: its client package works as it is.

    python -m diffusion_policy.scripts.serve --checkpoint run
        for programs on this machine, at ws://127.0.0.1:8000
    POLICY_SERVER_TOKEN=... python -m diffusion_policy.scripts.serve --checkpoint run --host 0.0.0.0
        for other machines, which must send the token

GET /healthz answers OK, GET /metrics numbers for Prometheus.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
from typing import Any

from diffusion_policy.common.command_line import Parser, reporting
from diffusion_policy.common.errors import ConfigError
from diffusion_policy.serving.access import check_address

TOKEN = "POLICY_SERVER_TOKEN"


def positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parser() -> argparse.ArgumentParser:
    out = Parser(prog="serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument(
        "-c", "--checkpoint", required=True, help="a .ckpt file, a run folder, or an export (weights, .onnx)"
    )
    out.add_argument("--best", action="store_true", help="of a run folder: the checkpoint with the best score")
    out.add_argument("-d", "--device", default="auto", help="auto (default), cpu, cuda, cuda:1, mps")
    out.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine only)")
    out.add_argument("--port", type=int, default=8000, help="default %(default)s; 0 takes a free one")
    out.add_argument(
        "--token",
        help=f"what clients must send as api_key (default: {TOKEN} of the environment, which ps does not show)",
    )
    out.add_argument("--max-batch", type=positive, default=16, help="clients per call of the policy (default 16)")
    out.add_argument("--max-clients", type=positive, default=64, help="connections at the same time (default 64)")
    out.add_argument("--trust-checkpoint", action="store_true", help="open a pickled checkpoint, which runs its code")
    return out


async def serve(server: Any) -> None:
    """Serve until SIGINT or SIGTERM, then finish what is being answered."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        await server.start()
    except OSError as error:
        raise ConfigError(f"cannot listen at {server.host}:{server.port}: {error.strerror or error}") from error
    print(f"serving at ws://{server.host}:{server.port}; {server.reader.expected()}", flush=True)
    await stop.wait()
    print("stopping", flush=True)
    await server.stop()


def main(arguments: list[str] | None = None) -> None:
    with reporting():
        options = parser().parse_args(arguments)
        token = options.token or os.environ.get(TOKEN) or None
        check_address(options.host, token)
        try:
            from diffusion_policy.serving.server import PolicyServer
        except ModuleNotFoundError as error:
            raise ConfigError(f"{error.name} is missing: pip install -e .[serve]") from error
        from diffusion_policy.policy.loading import load_policy

        policy = load_policy(options.checkpoint, options.device, options.best, options.trust_checkpoint)
        gc.collect()
        gc.freeze()  # a collection over torch's modules takes longer than a request
        limits = {"max_batch": options.max_batch, "max_clients": options.max_clients}
        asyncio.run(serve(PolicyServer(policy, options.host, options.port, token, **limits)))


if __name__ == "__main__":
    main()
