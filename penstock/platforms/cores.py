"""Decides how many threads compute on this machine's cores.

Threads are not pinned. Loops hand out their work piece by piece, so a delayed thread delays no
other. Several engines on one machine that pinned their threads would pick the same cores and leave
others idle. To bind threads to cores or to a NUMA node, use ``taskset`` or ``numactl``: the
defaults follow the affinity.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from penstock.protocol.errors import ConfigError

MOST_THREADS = 48
"""More threads do not speed up one model: decoding is bound by memory long before."""

SPARE_ABOVE = 8
"""With more cores than this, one is left to the processes that serve requests."""


def default_threads(ranks: int = 1, cores: int | None = None) -> int:
    """Threads for each of `ranks` processes: one per physical core (default: the usable ones)."""
    if cores is None:
        cores = usable_cores()
    if cores > SPARE_ABOVE:
        cores -= 1
    return max(min(cores // ranks, MOST_THREADS), 1)


def threads_of_replica(num_replicas: int, ranks: int = 1) -> int:
    """Threads for each process of replicas that share the cores. Raises `ConfigError`."""
    if num_replicas > 1 and (cores := usable_cores()) < num_replicas * ranks:
        raise ConfigError(
            f"{num_replicas} replicas (data_parallel_size) are more than the {cores} cores here: "
            "use fewer, or set cpu_threads to let them share cores"
        )
    return default_threads(num_replicas * ranks)


def usable_cores(root: Path = Path("/"), cpus: set[int] | None = None) -> int:
    """Physical cores within the process's affinity and its container's quota; at least 1.

    root: the root of the file system to read; cpus: the affinity, by default this process's.
    """
    if cpus is None:
        has_affinity = hasattr(os, "sched_getaffinity")
        cpus = os.sched_getaffinity(0) if has_affinity else set(range(os.cpu_count() or 1))
    cores = len({_siblings(root, cpu) for cpu in cpus})
    return max(min([cores, *_quotas(root)]), 1)


def _siblings(root: Path, cpu: int) -> str:
    """A name of a hardware thread's core; its own number if the system has no topology."""
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)


def _quotas(root: Path) -> Iterator[int]:
    """The CPU quota of each control group above this process, in whole cores, rounded up."""
    mount = root / "sys/fs/cgroup"
    for folder in [mount, *(mount / own for own in _own_groups(root))]:
        quota = _version_2(folder) or _version_1(folder)
        if quota is not None:
            yield quota


def _own_groups(root: Path) -> Iterator[str]:
    """This process's control groups and their parents, relative to the mount."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = Path(path.lstrip("/"))
        below = "cpu" if controllers else ""  # version 1 has a tree for each controller
        for group in (folder, *folder.parents):
            yield str(below / group)


def _version_2(folder: Path) -> int | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return -(-int(quota) // int(period))
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _version_1(folder: Path) -> int | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return -(-quota // period) if quota > 0 else None  # -1: no limit
