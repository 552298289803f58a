"""How many threads compute, on machines of all sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.platforms.cores import default_threads, usable_cores


def machine(root: Path, cores: int, threads_per_core: int = 1) -> set[int]:
    """A machine whose hardware threads are numbered as Linux does it; all of them."""
    for cpu in range(cores * threads_per_core):
        siblings = [cpu % cores + cores * number for number in range(threads_per_core)]
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(",".join(map(str, siblings)) + "\n")
    return set(range(cores * threads_per_core))


def limit(root: Path, group: str, **files: str) -> None:
    folder = root / "sys/fs/cgroup" / group
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.mark.parametrize(
    ("cores", "threads"), [(1, 1), (2, 2), (8, 8), (9, 8), (16, 15), (64, 48), (256, 48)]
)
def test_a_thread_a_core_but_one_is_left_to_the_server_where_there_are_many(
    cores: int, threads: int
) -> None:
    assert default_threads(cores=cores) == threads


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(2, 2, 1), (2, 4, 1), (8, 2, 4), (64, 2, 31), (128, 2, 48)]
)
def test_ranks_share_the_cores(cores: int, ranks: int, threads: int) -> None:
    assert default_threads(ranks, cores) == threads


@pytest.mark.parametrize(("cores", "per_core"), [(2, 1), (8, 2), (64, 2)])
def test_threads_of_one_core_count_once(tmp_path: Path, cores: int, per_core: int) -> None:
    assert usable_cores(tmp_path, machine(tmp_path, cores, per_core)) == cores


def test_only_cores_of_the_affinity_count(tmp_path: Path) -> None:
    machine(tmp_path, 8, 2)
    assert usable_cores(tmp_path, {0, 8, 3}) == 2


def test_a_system_that_tells_nothing_gives_a_core_a_cpu(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, {0, 1, 2}) == 3


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 64), ("200000 100000", 2), ("250000 100000", 3), ("1000 100000", 1)],
)
def test_a_containers_quota_bounds_them(tmp_path: Path, quota: str, cores: int) -> None:
    cpus = machine(tmp_path, 64)
    limit(tmp_path, ".", cpu__max=quota + "\n")
    assert usable_cores(tmp_path, cpus) == cores


def test_the_tightest_group_around_the_process_counts(tmp_path: Path) -> None:
    cpus = machine(tmp_path, 64)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/user.slice/job.scope\n")
    limit(tmp_path, "user.slice", cpu__max="400000 100000")
    limit(tmp_path, "user.slice/job.scope", cpu__max="800000 100000")
    assert usable_cores(tmp_path, cpus) == 4


@pytest.mark.parametrize(("quota", "cores"), [("-1", 16), ("600000", 6)])
def test_control_groups_of_version_1_are_read_too(tmp_path: Path, quota: str, cores: int) -> None:
    cpus = machine(tmp_path, 16)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("5:memory:/job\n3:cpu,cpuacct:/job\n")
    limit(tmp_path, "cpu/job", cpu__cfs_quota_us=quota, cpu__cfs_period_us="100000")
    assert usable_cores(tmp_path, cpus) == cores


def test_this_machine_has_cores() -> None:
    assert 1 <= default_threads() <= usable_cores()
