"""Benchmarks: python -m benchmarks. Each bench_*.py has run(quick) -> rows; see `common.row`."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch's profiler announces every start and stop
