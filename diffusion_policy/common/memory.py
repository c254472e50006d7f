"""How much memory is free."""

import os


def available_bytes() -> float:
    """Memory that can be had without swapping, within the limits of a container; infinite where the system does not say."""
    limits = [float("inf")]
    try:
        with open("/proc/meminfo") as file:
            limits += [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable")]
    except OSError:
        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:  # macOS: all there is, used or not
            limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            limits.append(int(limit.read()) - int(used.read()))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        pass
    return min(limits)


def readable_bytes(size: float) -> str:
    """1536 -> '1.5 KB'."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
