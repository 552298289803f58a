"""How many threads should compute on this machine's cores."""

from __future__ import annotations

import os
from pathlib import Path

MOST_THREADS = 48
"""More do not help one model: decoding waits for memory long before."""

SPARE_ABOVE = 8
"""With more cores than this, one is left to the processes that serve requests."""


def default_threads(ranks: int = 1) -> int:
    """Threads for each of `ranks` processes: one a physical core that this process may use."""
    cores = usable_cores()
    if cores > SPARE_ABOVE:
        cores -= 1
    return max(min(cores // ranks, MOST_THREADS), 1)


def usable_cores() -> int:
    """Physical cores within the process's affinity and its container's quota; at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cpus = os.sched_getaffinity(0)
    else:
        cpus = set(range(os.cpu_count() or 1))
    cores = {_siblings(cpu) for cpu in cpus}
    quota = _cgroup_quota()
    return max(min(len(cores), quota) if quota is not None else len(cores), 1)


def _siblings(cpu: int) -> str:
    """Names the core of a hardware thread; its own number where the system does not say."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)


def _cgroup_quota() -> int | None:
    """Whole cores that the control group may use, rounded up; None without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return -(-int(quota) // int(period))
    except (OSError, ValueError):  # no such file, or "max"
        return None
