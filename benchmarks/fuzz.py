"""Input validation: thousands of damaged, unusual and malicious inputs for every reader.

    python -m benchmarks.fuzz                                        # all targets, about 10,000 cases
    python -m benchmarks.fuzz --targets zarr --cases 500 --seed 7
    python -m benchmarks.fuzz --reproduce hdf5 0 1234                # one case: target, seed, number

A case must end in a clear error, or in a read that is correct by the target's oracle. Anything else is a finding:
another exception, a wrong value, a payload that ran (it would create a file), a crash, a hang, growing memory. Cases
run in a worker process that is replaced when it dies; each depends on (target, seed, number) only.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import math
import os
import pathlib
import re
import select
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

ROOT = pathlib.Path(__file__).resolve().parents[1]
#: Default number of cases per target; slow targets have fewer.
CASES = {
    "zarr": 4500,
    "hdf5": 3000,
    "checkpoint": 1800,
    "overrides": 600,
    "observations": 1800,
    "hostile": 790,
    "downloads": 240,
    "recordings": 1500,
    "onnx": 1000,
}
CPU_SECONDS = 20.0  # for one case; the slowest take one or two
WALL_SECONDS = 300.0  # for one case that waits, for instance for a pipe; long enough for a busy machine
START_SECONDS = 1200.0  # for imports and for making the valid inputs
GROWTH_BYTES = 400e6  # of resident memory, in one case
ADDRESS_BYTES = 3e9  # that a worker may map beyond what it has when it starts
SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # in memory: a case writes a dozen small files
RESTART_AFTER = 2000  # cases, so that leaks in libraries do not accumulate


class Finding(Exception):
    """A case with a wrong result."""


# ---------------------------------------------------------------------- in the worker
def worker() -> None:
    """Read jobs {target, seed, start, stop} from stdin; write {number} before and its outcome after a case."""
    from benchmarks.fuzz_targets import load

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not be taken for an answer

    def say(**answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    targets: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="fuzz_", dir=SCRATCH) as folder:
        canary = pathlib.Path(folder) / "canary"
        for line in sys.stdin:
            job = json.loads(line)
            name = job["target"]
            if name not in targets:
                home = pathlib.Path(folder) / name
                home.mkdir()
                targets[name] = load(name)(home, canary)
                limit_addresses()

            def use(number: int, value: Any, job: dict[str, Any] = job) -> None:
                if job["start"] <= number < job["stop"]:
                    say(number=number)
                    say(number=number, **judged(targets[job["target"]], value, canary))

            targets[name].inputs(job["seed"], job["start"], job["stop"], use)
            say(done=True)
        for target in targets.values():
            getattr(target, "close", lambda: None)()


def limit_addresses() -> None:
    """Limit the address space, where supported, so that an unbounded allocation is a MemoryError."""
    try:
        import resource

        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (int(pages * resource.getpagesize() + ADDRESS_BYTES), hard))
    except (ImportError, OSError, ValueError):
        pass


def judged(target: Any, value: Any, canary: pathlib.Path) -> dict[str, Any]:
    """{outcome} of a case, or {finding}."""
    start, before = time.perf_counter(), forget_peak()
    try:
        outcome, finding = target.check(value), None
    except Finding as error:
        outcome, finding = "finding", str(error)
    except BaseException as error:  # also SystemExit and KeyboardInterrupt, which no reader may raise
        outcome, finding = (
            "finding",
            f"{type(error).__name__}: {error}\n" + "".join(traceback.format_tb(error.__traceback__)[-6:]),
        )
    if canary.exists():
        canary.unlink()
        outcome, finding = "finding", "a payload ran: the canary file was created"
    if (growth := peak() - before) > GROWTH_BYTES:
        outcome, finding = "finding", f"memory grew by {growth / 1e6:.0f} MB"
    answer = {"outcome": outcome, "seconds": time.perf_counter() - start}
    if hasattr(target, "label"):
        answer["label"] = target.label(value)
    return answer if finding is None else answer | {"finding": finding, "input": target.describe(value)[:2000]}


def forget_peak() -> int:
    """Reset `peak`, where supported, and return the memory of this process."""
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """Peak memory of this process in bytes since `forget_peak`; on systems without /proc, since its start."""
    with contextlib.suppress(OSError):
        if found := re.search(r"^VmHWM:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text(), re.MULTILINE):
            return 1024 * int(found[1])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---------------------------------------------------------------------- the driver
class Worker:
    """A process that runs cases. A case that ends it or takes too long is a finding, and a new process continues."""

    def __init__(self, wall_seconds: float = WALL_SECONDS):
        self.wall_seconds, self.served = wall_seconds, 0
        self.process: Any = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def stop(self) -> None:
        if self.process is not None:
            self.process.stdin.close()
            try:
                self.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process.stdout.close()
            self.process = None

    def run(self, target: str, seed: int, start: int, stop: int) -> Iterator[dict[str, Any]]:
        """Yield {target, number, outcome, seconds} and possibly {finding, input} for each case."""
        while start < stop:
            end = min(stop, start + 100)
            for answer in self._job({"target": target, "seed": seed, "start": start, "stop": end}):
                yield {"target": target, **answer}
                start = answer["number"] + 1
            start = start if self.process is None else end

    def _job(self, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self.process is None or self.served > RESTART_AFTER:
            self.stop()
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "OMP_WAIT_POLICY": "PASSIVE",
                "SDL_VIDEODRIVER": "dummy",
            }
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.fuzz", "--worker"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self.served, self.text = 0, b""
        self.process.stdin.write(json.dumps(job).encode() + b"\n")
        self.process.stdin.flush()
        began = None
        while True:
            answer = self._answer(started=began is not None)
            if isinstance(answer, str):
                self.process.kill()
                code = self.process.wait()
                self.process.stdout.close()
                self.process = None
                if began is None:
                    raise RuntimeError(
                        f"the worker for {job} did not start a case: {answer}, exit code {code}; --reproduce shows why"
                    )
                crash = f"crash (signal {-code})" if code < 0 else f"crash (exit code {code})"
                what = answer if answer == "hang" else crash
                yield {"number": began, "outcome": "finding", "seconds": 0.0, "finding": what, "input": ""}
                return
            if "done" in answer:
                return
            if "outcome" not in answer:
                began = answer["number"]
            else:
                self.served += 1
                yield answer

    def _answer(self, started: bool) -> dict[str, Any] | str:
        deadline = time.monotonic() + (self.wall_seconds if started else START_SECONDS)
        cpu = cpu_seconds(self.process.pid)
        while b"\n" not in self.text:
            ready, _, _ = select.select([self.process.stdout], [], [], 0.5)
            if not ready:
                if time.monotonic() > deadline or (started and cpu_seconds(self.process.pid) - cpu > CPU_SECONDS):
                    return "hang"
                continue
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            if not part:
                return "crash"
            self.text += part
        line, _, self.text = self.text.partition(b"\n")
        return json.loads(line)


def cpu_seconds(pid: int) -> float:
    """Processor time of a process; 0 on systems without /proc."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fuzz(cases: dict[str, int], seed: int = 0) -> dict[str, Any]:
    """Run {target: number of cases} and return a report."""
    counts: dict[str, collections.Counter] = {target: collections.Counter() for target in cases}
    seconds = dict.fromkeys(cases, 0.0)
    slowest: dict[str, tuple[float, int]] = dict.fromkeys(cases, (0.0, -1))
    tried: dict[str, dict[str, collections.Counter]] = {target: {} for target in cases}
    findings = []
    with Worker() as process, tqdm(total=sum(cases.values()), desc="fuzz", disable=None) as bar:
        for target, number in cases.items():
            started = time.monotonic()
            for answer in process.run(target, seed, 0, number):
                counts[target][answer["outcome"]] += 1
                if "label" in answer:
                    tried[target].setdefault(answer["label"], collections.Counter())[answer["outcome"]] += 1
                slowest[target] = max(slowest[target], (answer["seconds"], answer["number"]))
                if "finding" in answer:
                    findings.append(
                        {"target": target, "seed": seed, **{key: answer[key] for key in ("number", "finding", "input")}}
                    )
                    tqdm.write(
                        f"finding in {target} {seed} {answer['number']}: {answer['finding'].splitlines()[0][:200]}",
                        file=sys.stderr,
                    )
                bar.set_postfix_str(f"{target}, {len(findings)} findings", refresh=False)
                bar.update()
            seconds[target] = time.monotonic() - started
    return {
        "cases": sum(cases.values()),
        "findings": findings,
        "targets": {
            target: {
                "cases": cases[target],
                "outcomes": dict(counts[target].most_common()),
                "seconds": round(seconds[target], 1),
                "slowest_case": {"seconds": round(slowest[target][0], 3), "number": slowest[target][1]},
                **(
                    {"tried": {name: dict(each) for name, each in sorted(tried[target].items())}}
                    if tried[target]
                    else {}
                ),
            }
            for target in cases
        },
    }


def table(result: dict[str, Any]) -> str:
    lines = [f"{'target':14}{'cases':>7}{'read':>7}{'refused':>9}{'findings':>10}{'seconds':>9}  errors"]
    for name, target in result["targets"].items():
        outcomes = target["outcomes"]
        read = sum(value for key, value in outcomes.items() if key.endswith("read"))
        errors = {key: value for key, value in outcomes.items() if not key.endswith(("read", "finding"))}
        words = ", ".join(f"{key} {value}" for key, value in errors.items())
        findings = outcomes.get("finding", 0)
        numbers = f"{target['cases']:7}{read:7}{sum(errors.values()):9}{findings:10}{target['seconds']:9.0f}"
        lines.append(f"{name:14}{numbers}  {words[:90]}")
    return "\n".join(lines)


def reproduce(target: str, seed: int, number: int) -> None:
    """Run one case in this process and print it."""
    from benchmarks.fuzz_targets import load

    with tempfile.TemporaryDirectory(prefix="fuzz_", dir=SCRATCH) as folder:
        canary = pathlib.Path(folder) / "canary"
        runner = load(target)(pathlib.Path(folder), canary)

        def use(n: int, value: Any) -> None:
            if n == number:
                print(runner.describe(value))
                print(runner.check(value), "canary" if canary.exists() else "")

        runner.inputs(seed, number, number + 1, use)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", default=",".join(CASES), help="comma-separated (default: all)")
    parser.add_argument(
        "--cases", type=int, help=f"total number of cases, divided as by default (default: {sum(CASES.values())})"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", help="a JSON file for the result")
    parser.add_argument(
        "--reproduce", nargs=3, metavar=("TARGET", "SEED", "NUMBER"), help="run one case here, with its traceback"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        return worker()
    if options.reproduce:
        return reproduce(options.reproduce[0], int(options.reproduce[1]), int(options.reproduce[2]))
    targets = {name: CASES[name] for name in options.targets.split(",")}
    share = 1.0 if options.cases is None else options.cases / sum(targets.values())
    result = fuzz({name: math.ceil(cases * share) for name, cases in targets.items()}, options.seed)
    print(table(result))
    for finding in result["findings"][:20]:
        print(f"\n--reproduce {finding['target']} {finding['seed']} {finding['number']}: {finding['finding']}")
    if options.output:
        from diffusion_policy.storage.checkpoint_io import versions

        path = pathlib.Path(options.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        command = "python -m benchmarks.fuzz " + shlex.join(sys.argv[1:] if arguments is None else arguments)
        path.write_text(
            json.dumps({"command": command, "seed": options.seed, "versions": versions(), **result}, indent=2) + "\n"
        )
    print(f"{result['cases']} cases, {len(result['findings'])} findings")
    sys.exit(1 if result["findings"] else 0)


if __name__ == "__main__":
    main()
