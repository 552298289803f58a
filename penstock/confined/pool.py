"""ConfinedPool: decides which job runs in which confined process, and when a process is killed.

A process starts when there is a job for it and ends when it is idle. A job that has used more than
a quantum of CPU time is *slow*: its process gets a low priority, see `Limits`, and is replaced
afterwards. A slow job is put off while jobs wait that are not slow yet, but never for a tenant that
has as many jobs running as its own. One slow job at a time is never put off, so that every job
reaches its end or its limit.

If a process dies or stalls, its job is retried once in another process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from penstock.confined.errors import (
    PoolClosed,
    PoolFull,
    TooMuchMemory,
    TooMuchTime,
    WorkerLost,
)
from penstock.confined.fair_queue import FairQueue
from penstock.confined.process import Activity, ConfinedProcess, ProcessDied
from penstock.confined.worker import Start

logger = logging.getLogger(__name__)

TICK_S = 0.05  # between checks of running jobs
MAX_LOSSES = 2  # processes that a job may lose before it fails
START_STALL_S = 60.0  # stall limit for a starting process: disks can be slow


@dataclass(frozen=True)
class Limits:
    """Limits of a pool and its jobs."""

    cpu_s: float  # per job
    memory_bytes: int  # per job, in addition to what its process has after its setup
    num_workers: int = 4
    max_queued: int = 256
    quantum_s: float = 0.25  # CPU time after which a job is slow
    # CPU time after which a job's process gets a low priority; None: as soon as the job is slow.
    # Processes that start slowly should be replaced rarely.
    low_priority_s: float | None = None
    stall_s: float = 5.0  # a process that is not runnable for this long counts as stalled
    idle_s: float = 60.0  # a process without jobs ends after this time


class Job:
    """A submitted job. `future` gets its result or one of `penstock.confined.errors`."""

    def __init__(self, pool: ConfinedPool, payload: bytes, tenant: str) -> None:
        self._pool = pool
        self.payload = payload
        self.tenant = tenant
        self.future: Future[bytes] = Future()
        self.cpu_s = 0.0  # CPU time used, set with the result
        self.num_losses = 0
        self.was_put_off = False
        self.is_abandoned = False

    def result(self) -> bytes:
        """Wait for the result. Raises the future's error."""
        return self.future.result()

    def cancel(self) -> None:
        """Cancel the job. Has no effect if it is done."""
        self._pool.cancel(self)


class _Worker:
    """A thread and its process, if one runs. The pool's lock guards the state."""

    def __init__(self) -> None:
        self.process: ConfinedProcess | None = None
        self.job: Job | None = None
        self.is_starting = False
        self.is_slow = False
        self.has_low_priority = False  # cannot be undone: a process may not raise its priority
        self.killed_for: str | None = None
        self.cpu_before = 0.0  # CPU time of the process when the job began
        self.last_cpu = 0.0
        self.last_progress = 0.0
        self.started = 0.0

    def begin(self, is_starting: bool) -> None:
        now = time.monotonic()
        activity = self.process.activity() if self.process else None
        cpu = activity.cpu_s if activity else 0.0
        self.is_starting, self.killed_for = is_starting, None
        self.is_slow = self.job is not None and self.job.was_put_off
        self.cpu_before = self.last_cpu = cpu
        self.last_progress = self.started = now

    def kill(self, why: str) -> None:
        if self.killed_for is None and self.process is not None:
            self.killed_for = why
            self.process.kill()


class ConfinedPool:
    """A pool of confined processes. Thread-safe.

    `entry` is "module:function". Each process calls it with the result of `make_setup`. It returns
    the function that turns a job's payload into its result.
    """

    def __init__(self, entry: str, make_setup: Callable[[], bytes], limits: Limits) -> None:
        self.limits = limits
        self._start = Start(entry, limits.cpu_s, limits.memory_bytes)
        self._make_setup = make_setup
        self._changed = threading.Condition()
        self._queue: FairQueue[Job] = FairQueue(limits.max_queued)
        self._put_off: FairQueue[Job] = FairQueue(limits.max_queued)  # slow jobs
        self._workers: list[_Worker] = []
        self._has_monitor = False
        self._is_closed = False

    def submit(self, payload: bytes, tenant: str = "") -> Job:
        """Queue a job. Tenants take turns. Never blocks. Errors go to the job's future."""
        job = Job(self, payload, tenant)
        with self._changed:
            if self._is_closed:
                job.future.set_exception(PoolClosed("no more jobs are taken"))
                return job
            dropped = self._queue.push(tenant, job)
            if len(self._queue) > self._num_idle() and len(self._workers) < self.limits.num_workers:
                self._add_worker()
            self._changed.notify_all()
        if dropped is not None:
            _refuse(dropped)
        return job

    def cancel(self, job: Job) -> None:
        with self._changed:
            job.is_abandoned = True  # `_look` kills a running job once it is slow
            queued = self._queue.remove(job.tenant, job) or self._put_off.remove(job.tenant, job)
        if queued:
            _drop(job)

    def pids(self) -> list[int]:
        """Ids of the current processes."""
        with self._changed:
            return [worker.process.pid for worker in self._workers if worker.process is not None]

    def close(self) -> None:
        """Kill all processes and fail all jobs. Safe to call twice and from any thread."""
        with self._changed:
            self._is_closed = True
            left = [*self._queue.clear(), *self._put_off.clear()]
            for worker in self._workers:
                worker.kill("closed")
            self._changed.notify_all()
        for job in left:
            _fail(job, PoolClosed("the pool was closed"))

    # -- worker threads

    def _num_idle(self) -> int:
        """Workers without a job. A job that ends leaves its worker before its result is known."""
        return sum(worker.job is None for worker in self._workers)

    def _add_worker(self) -> None:
        worker = _Worker()
        self._workers.append(worker)
        threading.Thread(target=self._work, args=(worker,), name="confined", daemon=True).start()
        if not self._has_monitor:
            self._has_monitor = True
            threading.Thread(target=self._monitor, name="confined-monitor", daemon=True).start()

    def _work(self, worker: _Worker) -> None:
        while (job := self._take(worker)) is not None:
            self._run(worker, job)
        if worker.process is not None:
            worker.process.close()

    def _take(self, worker: _Worker) -> Job | None:
        """Wait for the next job of a worker. Returns None if the worker must end."""
        with self._changed:
            deadline = time.monotonic() + self.limits.idle_s
            while not self._is_closed:
                if (job := self._next()) is not None:
                    worker.job = job
                    worker.begin(is_starting=worker.process is None)
                    self._changed.notify_all()  # wake the monitor
                    return job
                if (left_s := deadline - time.monotonic()) <= 0.0:
                    break
                self._changed.wait(left_s)
            self._workers.remove(worker)
            self._changed.notify_all()
            return None

    def _next(self) -> Job | None:
        """New jobs first, unless no slow job runs or a put-off job's tenant has fewer running."""
        if (late := self._put_off.next_tenant()) is None:
            return self._queue.pop()
        new = self._queue.next_tenant()
        num_running = Counter(each.job.tenant for each in self._workers if each.job is not None)
        has_slow = any(each.is_slow for each in self._workers)
        if new is None or not has_slow or num_running[late] < num_running[new]:
            return self._put_off.pop()
        return self._queue.pop()

    def _run(self, worker: _Worker, job: Job) -> None:
        try:
            if worker.process is None:
                self._start_process(worker)
            assert worker.process is not None
            result, job.cpu_s = worker.process.ask(job.payload)
        except ProcessDied as death:
            self._discard(worker)
            self._after_death(worker, job, death)
        except Exception as error:  # from the job or from the setup of its process
            self._discard(worker)
            _fail(job, error)
        else:
            with self._changed:
                worker.job = None  # the monitor must not kill the process for this job
                worker.is_slow = False
                is_spent = worker.has_low_priority or worker.killed_for is not None
            if is_spent:
                self._discard(worker)
            job.payload = b""
            if not job.future.done():
                job.future.set_result(result)

    def _start_process(self, worker: _Worker) -> None:
        setup = self._make_setup()
        process = ConfinedProcess(self._start)
        with self._changed:
            worker.process = process
            worker.begin(is_starting=True)
            if self._is_closed:
                worker.kill("closed")
        process.set_up(setup)
        with self._changed:
            if worker.killed_for is None:
                worker.begin(is_starting=False)

    def _discard(self, worker: _Worker) -> None:
        with self._changed:
            process, worker.process, worker.job = worker.process, None, None
            worker.is_slow = worker.has_low_priority = False
        if process is not None:
            process.close()

    def _after_death(self, worker: _Worker, job: Job, death: ProcessDied) -> None:
        why, limits = worker.killed_for, self.limits
        if why == "closed" or self._is_closed:
            _fail(job, PoolClosed("the pool was closed"))
        elif why == "abandoned" or job.is_abandoned:
            _drop(job)
        elif why == "put off":
            job.was_put_off = True
            self._queue_again(self._put_off, job)
        elif death.is_time_up:
            _fail(job, TooMuchTime(f"it takes more than {limits.cpu_s:g} s of CPU time"))
        else:
            job.num_losses += 1
            how = "stood still" if why == "stalled" else f"ended with {death.returncode}"
            logger.warning("A confined process (%s) %s", self._start.entry, how)
            if job.num_losses < MAX_LOSSES:
                self._queue_again(self._queue, job)
            elif death.is_crash and why is None and not worker.is_starting:
                _fail(
                    job,
                    TooMuchMemory(
                        f"it ends its process ({death.returncode}), as what needs more than "
                        f"{limits.memory_bytes // 2**20} MiB does"
                    ),
                )
            else:
                _fail(job, WorkerLost(f"its process {how}, {MAX_LOSSES} times"))

    def _queue_again(self, queue: FairQueue[Job], job: Job) -> None:
        with self._changed:
            is_closed = self._is_closed
            dropped = None if is_closed else queue.push(job.tenant, job)
            self._changed.notify_all()
        if is_closed:
            _fail(job, PoolClosed("the pool was closed"))
        if dropped is not None:
            _refuse(dropped)

    # -- the monitor thread

    def _monitor(self) -> None:
        while True:
            with self._changed:
                if self._is_closed or not self._workers:
                    self._has_monitor = False
                    return
                running = [(each, each.job) for each in self._workers if each.job is not None]
                for worker, job in running:
                    self._look(worker, job)
                if len(self._queue) and self._num_idle() == 0:
                    self._make_room(running)
                if not running:
                    self._changed.wait()
                    continue
            time.sleep(TICK_S)

    def _look(self, worker: _Worker, job: Job) -> None:
        if worker.process is None:
            return
        now, activity = time.monotonic(), worker.process.activity()
        if activity is None:  # not available on this system: count elapsed time
            activity = Activity(worker.cpu_before + now - worker.started, is_runnable=True)
        cpu = activity.cpu_s
        if cpu > worker.last_cpu or activity.is_runnable:
            worker.last_cpu, worker.last_progress = cpu, now
        limit_s = START_STALL_S if worker.is_starting else self.limits.stall_s
        if now - worker.last_progress > limit_s:
            worker.kill("stalled")
        if worker.is_starting:
            return
        used_s = cpu - worker.cpu_before
        worker.is_slow |= used_s >= self.limits.quantum_s
        late = used_s >= (self.limits.low_priority_s or 0.0)
        if worker.is_slow and late and not worker.has_low_priority:
            worker.has_low_priority = True
            worker.process.lower_priority()
        if worker.is_slow and job.is_abandoned:
            worker.kill("abandoned")

    def _make_room(self, running: list[tuple[_Worker, Job]]) -> None:
        """Put off a slow job for the next queued one: of its own tenant, or of one with more jobs.

        The tenant with the most slow jobs loses one. The oldest slow job stays.
        """
        slow = sorted(
            ((worker, job) for worker, job in running if worker.is_slow),
            key=lambda pair: pair[0].started,
        )
        if len(slow) < 2 or any(worker.killed_for for worker, _ in running):
            return  # a killed process makes room soon
        new = self._queue.next_tenant()
        assert new is not None, "room is made for a queued job"
        num_running = Counter(job.tenant for _, job in running)
        may_go = [
            (worker, job)
            for worker, job in slow[1:]
            if job.tenant == new or num_running[job.tenant] > num_running[new]
        ]
        if may_go:
            num_slow = Counter(job.tenant for _, job in slow)
            worker, _ = max(may_go, key=lambda pair: (num_slow[pair[1].tenant], pair[0].started))
            worker.kill("put off")


def _fail(job: Job, error: Exception) -> None:
    job.payload = b""
    if not job.future.done():
        job.future.set_exception(error)


def _refuse(job: Job) -> None:
    _fail(job, PoolFull("too many jobs wait; try again later"))


def _drop(job: Job) -> None:
    if job.future.cancel():
        job.future.set_running_or_notify_cancel()
