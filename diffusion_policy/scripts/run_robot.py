"""Run a policy on a robot in real time, and report how well the loop kept its rate.

    python -m diffusion_policy.scripts.run_robot --checkpoint run --seconds 30
        PushT's simulator as the robot
    python -m diffusion_policy.scripts.run_robot --checkpoint run --robot my_robot:make --hz 20 --max-step 0.02
        your own: my_robot.py has a function make(interface), which returns an object with the methods
        read_observation() -> {key: array} and send_action(action). A method close() and an attribute `finished` that
        ends the run are optional. `interface` tells what the policy observes.

Writes cadence.json and cadence.png.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

from diffusion_policy.common.command_line import Parser, reporting
from diffusion_policy.common.errors import ConfigError


def parser() -> argparse.ArgumentParser:
    out = Parser(prog="run_robot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument(
        "-c", "--checkpoint", required=True, help="a .ckpt file, a run folder, or an export (weights, .onnx)"
    )
    out.add_argument("--best", action="store_true", help="of a run folder: the checkpoint with the best score")
    out.add_argument("-d", "--device", default="auto", help="auto (default), cpu, cuda, cuda:1, mps")
    out.add_argument(
        "--robot",
        default="diffusion_policy.real_world.simulated:pusht",
        help="module:function that makes the robot (default: PushT's simulator)",
    )
    out.add_argument("--hz", type=float, help="control rate (default: the robot's `hz`)")
    out.add_argument("--seconds", type=float, default=30.0, help="duration (default %(default)s)")
    out.add_argument("--replan-every", type=int, help="control steps between plans (default: the policy's chunk)")
    out.add_argument("--blend", type=int, default=0, help="steps over which a new chunk fades in (default 0)")
    out.add_argument("--patience", type=float, default=0.0, help="seconds a step may wait for its plan (default 0)")
    out.add_argument("--watchdog", type=float, default=2.0, help="seconds without a plan before it stops (default 2)")
    out.add_argument("--real-time", action="store_true", help="real-time priority of the loop, if permitted (Linux)")
    out.add_argument("--low", type=float, nargs="+", help="smallest action: one number, or one per dimension")
    out.add_argument("--high", type=float, nargs="+", help="largest action, likewise")
    out.add_argument("--max-step", type=float, nargs="+", help="largest change of the action in one control step")
    out.add_argument("-o", "--output", default="robot_run", help="folder of the report (default %(default)s)")
    out.add_argument("--trust-checkpoint", action="store_true", help="open a pickled checkpoint, which runs its code")
    return out


def make_robot(name: str, interface: Any) -> Any:
    """Call module:function with the policy's interface."""
    module, colon, function = name.partition(":")
    if not colon:
        raise ConfigError(f"--robot {name}: expected module:function")
    sys.path.insert(0, "")  # a module beside the user
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--robot {name} cannot be imported: {error}") from error
    return make(interface)


@contextlib.contextmanager
def stopping(executor: Any) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the loop after the current step."""
    before = {number: signal.signal(number, lambda *_: executor.stop()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def limits_of(options: argparse.Namespace) -> Any:
    from diffusion_policy.real_world import ActionLimits

    given = {name: getattr(options, name) for name in ("low", "high", "max_step")}
    return ActionLimits(**{name: value for name, value in given.items() if value is not None})


def run(options: argparse.Namespace) -> None:
    from diffusion_policy.policy.interface import interface_of
    from diffusion_policy.policy.loading import load_policy
    from diffusion_policy.real_world import ActionChunkExecutor

    policy = load_policy(options.checkpoint, options.device, options.best, options.trust_checkpoint)
    robot = make_robot(options.robot, interface_of(policy))
    hz = options.hz or getattr(robot, "hz", None)
    if not hz:
        raise ConfigError("the control rate is not known: pass --hz, that of the demonstrations")

    def send_action(action: Any) -> None:
        robot.send_action(action)
        if getattr(robot, "finished", False):
            executor.stop()

    executor = ActionChunkExecutor(
        policy,
        robot.read_observation,
        send_action,
        hz,
        replan_every=options.replan_every,
        blend=options.blend,
        patience=options.patience,
        watchdog=options.watchdog,
        real_time=options.real_time,
        limits=limits_of(options),
    )
    try:
        with stopping(executor):
            executor.run(seconds=options.seconds)
    finally:
        if hasattr(robot, "close"):
            robot.close()
        print(executor.report)
        print(f"written to {executor.report.save(options.output)}")
    if hasattr(robot, "score"):
        print(f"score {robot.score:.3f}")


def main(arguments: list[str] | None = None) -> None:
    with reporting():
        run(parser().parse_args(arguments))


if __name__ == "__main__":
    main()
