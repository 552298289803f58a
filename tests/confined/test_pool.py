"""Jobs in confined processes: what one takes, or runs into, is its own affair."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, wait
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

from penstock.confined.errors import (
    JobError,
    PoolClosed,
    PoolFull,
    TooMuchMemory,
    TooMuchTime,
    WorkerLost,
)
from penstock.confined.pool import ConfinedPool, Job, Limits

MakePool = Callable[..., ConfinedPool]
STALL_S = 3.0  # far longer than a process on a busy machine waits for its next message


@pytest.fixture
def make_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePool]:
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    pools: list[ConfinedPool] = []

    def make(setup: bytes = b"", **limits: Any) -> ConfinedPool:
        options = {"cpu_s": 600.0, "memory_bytes": 2**28, "num_workers": 2, **limits}
        pools.append(ConfinedPool("jobs:make", lambda: setup, Limits(**options)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def ask(pool: ConfinedPool, payload: str, tenant: str = "") -> str:
    return pool.submit(payload.encode(), tenant).result().decode()


def test_jobs_are_answered_by_a_process_that_stays(make_pool: MakePool) -> None:
    pool = make_pool(b"hello ")
    assert pool.pids() == []  # nothing is started before there is something to do
    assert ask(pool, "echo you") == "hello you"
    pid = ask(pool, "pid")
    assert int(pid) != os.getpid()
    assert ask(pool, "pid") == pid


def test_a_worker_whose_job_has_ended_takes_the_next_one(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the next one comes before the worker asks for it: no other process is started."""
    pool = make_pool()
    take, may_ask = pool._take, threading.Event()

    def take_late(worker: Any) -> Job | None:
        assert worker.process is None or may_ask.wait(120)
        return take(worker)

    monkeypatch.setattr(pool, "_take", take_late)
    pid = ask(pool, "pid")
    again = pool.submit(b"pid")
    may_ask.set()
    assert again.result().decode() == pid


@pytest.mark.parametrize(("low_priority_s", "stays"), [(None, False), (600.0, True)])
def test_a_process_is_replaced_if_its_priority_was_lowered(
    make_pool: MakePool, tmp_path: Path, low_priority_s: float | None, stays: bool
) -> None:
    pool = make_pool(quantum_s=0.1, low_priority_s=low_priority_s)
    pid = int(ask(pool, "pid"))
    slow = pool.submit(f"spin {tmp_path}/end".encode())
    eventually(lambda: any(each.is_slow for each in pool._workers))
    if not stays:
        eventually(lambda: any(each.has_low_priority for each in pool._workers))
    (tmp_path / "end").touch()
    slow.result()
    assert (int(ask(pool, "pid")) == pid) == stays


def test_a_job_that_uses_up_its_cpu_time_ends_and_the_next_one_does_not_suffer(
    make_pool: MakePool,
) -> None:
    pool = make_pool(cpu_s=0.3)
    with pytest.raises(TooMuchTime, match=r"more than 0\.3 s of CPU time"):
        ask(pool, "spin")
    assert ask(pool, "echo again") == "again"


def test_memory_is_limited_by_the_kernel(make_pool: MakePool) -> None:
    pool = make_pool()
    with pytest.raises(TooMuchMemory, match="256 MiB"):
        ask(pool, "allocate")
    with pytest.raises(TooMuchMemory, match=r"ends its process \(-6\)"):
        ask(pool, "abort")
    assert ask(pool, "echo again") == "again"


def test_a_job_whose_process_is_killed_is_tried_once_more(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool()
    assert ask(pool, f"die {tmp_path / 'mark'}") == "done"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_stopped_costs_no_job(
    make_pool: MakePool, number: signal.Signals
) -> None:
    pool = make_pool(stall_s=STALL_S)
    pid = int(ask(pool, "pid"))
    os.kill(pid, number)
    assert int(ask(pool, "pid")) != pid


def test_a_job_that_loses_its_process_twice_is_told_so(make_pool: MakePool) -> None:
    pool = make_pool(stall_s=STALL_S)
    with pytest.raises(WorkerLost, match="stood still, 2 times"):
        ask(pool, "stop")
    assert ask(pool, "echo again") == "again"


def test_a_process_that_cannot_start_says_nothing_about_its_job(make_pool: MakePool) -> None:
    with pytest.raises(WorkerLost, match="2 times"):
        ask(make_pool(b"abort"), "echo x")


def test_a_quick_job_never_waits_behind_slow_ones(make_pool: MakePool, tmp_path: Path) -> None:
    """Not behind those of the same tenant either, however many there are."""
    pool = make_pool(quantum_s=0.05)
    end = tmp_path / "end"
    slow = [pool.submit(f"spin {end}".encode(), "greedy") for _ in range(6)]
    assert ask(pool, "echo one", "other") == "one"
    assert ask(pool, "echo two", "greedy") == "two"
    assert not any(job.future.done() for job in slow)
    end.touch()
    assert [job.result() for job in slow] == [b"done"] * 6  # each gets to its end


def test_a_slow_job_is_not_put_off_for_another_tenants_backlog(
    make_pool: MakePool, tmp_path: Path
) -> None:
    """However many jobs the other tenant goes on to send."""
    pool = make_pool(quantum_s=0.05)
    end = tmp_path / "end"
    endless = f"spin {end}".encode()
    for _ in range(8):
        pool.submit(endless, "greedy")
    modest = pool.submit(b"count 20000000", "modest")
    while not modest.future.done():
        pool.submit(endless, "greedy")
        wait([modest.future], timeout=0.02)
    assert modest.result() == b"done"


def test_slow_jobs_come_to_their_limit_one_after_the_other(make_pool: MakePool) -> None:
    pool = make_pool(cpu_s=0.4, quantum_s=0.05)
    jobs = [pool.submit(b"spin") for _ in range(4)]
    for job in jobs:
        with pytest.raises(TooMuchTime):
            job.result()


def test_a_job_that_nobody_waits_for_is_ended(make_pool: MakePool) -> None:
    pool = make_pool(num_workers=1, quantum_s=0.05)
    running, queued = pool.submit(b"spin"), pool.submit(b"spin")
    (pid,) = eventually_pids(pool)
    queued.cancel()
    running.cancel()
    for job in (running, queued):
        with pytest.raises(CancelledError):
            job.result()
    eventually(lambda: not is_running(pid))
    assert ask(pool, "echo again") == "again"
    running.cancel()  # of no effect by now


def eventually_pids(pool: ConfinedPool) -> list[int]:
    eventually(lambda: len(pool.pids()) > 0)
    return pool.pids()


def test_a_backlog_is_bounded_and_who_sends_little_finds_room(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool(num_workers=1, max_queued=3)
    end = tmp_path / "end"
    greedy = [pool.submit(f"spin {end}".encode(), "greedy") for _ in range(10)]
    modest = pool.submit(b"echo modest", "modest")
    end.touch()
    assert modest.result() == b"modest"
    refused = [job for job in greedy if job.future.exception() is not None]
    assert len(refused) >= 6
    assert all(isinstance(job.future.exception(), PoolFull) for job in refused)
    assert greedy[0] not in refused


def test_closing_ends_processes_and_jobs(make_pool: MakePool) -> None:
    pool = make_pool(num_workers=1)
    jobs = [pool.submit(b"spin") for _ in range(3)]
    pids = eventually_pids(pool)
    pool.close()
    pool.close()
    for job in [*jobs, pool.submit(b"echo late")]:
        with pytest.raises(PoolClosed):
            job.result()
    eventually(lambda: not any(map(is_running, pids)))


def test_a_job_that_loses_its_process_as_the_pool_is_closed_ends(make_pool: MakePool) -> None:
    pool = make_pool()
    job = Job(pool, b"echo x", "")
    pool.close()
    pool._queue_again(pool._queue, job)
    with pytest.raises(PoolClosed):
        job.result()


def test_a_process_without_jobs_ends_after_a_while(make_pool: MakePool) -> None:
    pool = make_pool(idle_s=0.2)
    first = int(ask(pool, "pid"))
    eventually(lambda: not is_running(first))
    assert int(ask(pool, "pid")) != first


def test_what_is_broken_says_so(make_pool: MakePool) -> None:
    with pytest.raises(JobError, match="no such setup"):
        ask(make_pool(b"broken"), "echo x")
    with pytest.raises(JobError, match=r"jobs:make failed in its process: KeyError\('what'\)"):
        ask(make_pool(), "what is this")


def test_no_file_of_the_working_directory_is_run(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    for name in ("msgspec", "penstock", "runpy"):
        (tmp_path / f"{name}.py").write_text(f"open({str(seen)!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    assert ask(make_pool(b"hello "), "echo you") == "hello you"
    assert not seen.exists()


def test_a_confined_process_has_no_torch() -> None:
    code = "import sys, penstock.confined.worker; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
