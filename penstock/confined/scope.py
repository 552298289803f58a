"""JobScope: decides to which tenant a thread's confined jobs belong, and cancels them.

Work on a request runs in a thread and submits confined jobs deep in the call stack. The thread's
scope knows the tenant. It is cancelled when the client leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

from penstock.confined.pool import ConfinedPool, Job

T = TypeVar("T")


class JobScope:
    """`slots` limits the computing threads. A thread that waits for a job releases its slot."""

    def __init__(self, tenant: str = "", slots: threading.Semaphore | None = None) -> None:
        self._tenant = tenant
        self._slots = slots or threading.Semaphore()
        self._lock = threading.Lock()
        self._job: Job | None = None
        self._is_cancelled = False

    def run(self, work: Callable[..., T], *arguments: object) -> T:
        """Run work in this thread, under this scope."""
        token = _current.set(self)
        try:
            with self._slots:
                return work(*arguments)
        finally:
            _current.reset(token)

    def cancel(self) -> None:
        """Cancel the job that this work waits for, and any later one."""
        with self._lock:
            self._is_cancelled = True
            job = self._job
        if job is not None:
            job.cancel()

    def wait_for(self, pool: ConfinedPool, payload: bytes) -> bytes:
        job = pool.submit(payload, self._tenant)
        with self._lock:
            self._job = job
            is_cancelled = self._is_cancelled
        if is_cancelled:
            job.cancel()
        self._slots.release()
        try:
            return job.result()
        finally:
            self._slots.acquire()
            with self._lock:
                self._job = None


_current: ContextVar[JobScope | None] = ContextVar("current_job_scope", default=None)


def run_confined(pool: ConfinedPool, payload: bytes) -> bytes:
    """Run a job under the scope of this thread. Raises the error of the job's future."""
    scope = _current.get()
    return pool.submit(payload).result() if scope is None else scope.wait_for(pool, payload)
