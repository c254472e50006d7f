"""Free memory, and sizes as text."""

from __future__ import annotations

import os


def available_bytes() -> float:
    """Memory available without swapping, within the limits of a container; infinite if unknown."""
    limits = [float("inf")]
    try:
        with open("/proc/meminfo") as file:
            limits += [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable")]
    except OSError:
        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:  # macOS: the total, used or not
            limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            limits.append(int(limit.read()) - int(used.read()))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        pass
    return min(limits)


def readable_bytes(size: float) -> str:
    """1536 -> '1.5 KB'."""
    if size < 1024:
        return f"{size:.0f} bytes"
    for unit in ("KB", "MB", "GB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TB"
