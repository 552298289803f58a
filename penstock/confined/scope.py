"""JobScope: decides to which tenant a thread's confined jobs belong, and cancels them.

Work on a request runs in a thread and submits confined jobs deep in the call stack. The thread's
scope knows the tenant. It is cancelled when the client leaves.

Work that may wait for seconds, on media or long texts, needs a turn. Each tenant has a few, so that
no tenant's work takes all threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Protocol, TypeVar

from penstock.confined.pool import ConfinedPool

T = TypeVar("T")


class Cancellable(Protocol):
    def cancel(self) -> object: ...


class Cancellation:
    """Cancels the work that is attached, whichever of the two comes first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work: Cancellable | None = None
        self._is_cancelled = False

    def attach(self, work: Cancellable | None) -> None:
        """Replace the work to cancel. None: it is done."""
        with self._lock:
            self._work = work
            is_cancelled = self._is_cancelled
        if is_cancelled and work is not None:
            work.cancel()

    def cancel(self) -> None:
        """Cancel the attached work, and any that follows."""
        with self._lock:
            self._is_cancelled = True
            work = self._work
        if work is not None:
            work.cancel()


class NeedsTurn(BaseException):
    """The work in this thread needs a turn of its tenant. Run it again when there is one."""


class JobScope(Cancellation):
    """`slots` limits the computing threads. A thread that waits for a job releases its slot."""

    def __init__(
        self, tenant: str = "", slots: threading.Semaphore | None = None, has_turn: bool = True
    ) -> None:
        super().__init__()
        self.tenant = tenant
        self.has_turn = has_turn
        self._slots = slots or threading.Semaphore()

    def run(self, work: Callable[..., T], *arguments: object) -> T:
        """Run work in this thread, under this scope."""
        token = _current.set(self)
        try:
            with self._slots:
                return work(*arguments)
        finally:
            _current.reset(token)

    def wait_for(self, pool: ConfinedPool, payload: bytes) -> bytes:
        job = pool.submit(payload, self.tenant)
        with self.waiting(job):
            return job.result()

    @contextlib.contextmanager
    def waiting(self, work: Cancellable) -> Iterator[None]:
        """The thread waits for this work, without its slot."""
        self.attach(work)
        self._slots.release()
        try:
            yield
        finally:
            self._slots.acquire()
            self.attach(None)


_current: ContextVar[JobScope | None] = ContextVar("current_job_scope", default=None)


def run_confined(pool: ConfinedPool, payload: bytes) -> bytes:
    """Run a job under the scope of this thread. Raises the error of the job's future."""
    scope = _current.get()
    return pool.submit(payload).result() if scope is None else scope.wait_for(pool, payload)


def need_turn() -> None:
    """Raise `NeedsTurn` if the work of this thread has none."""
    scope = _current.get()
    if scope is not None and not scope.has_turn:
        raise NeedsTurn


@contextlib.contextmanager
def waiting(work: Cancellable) -> Iterator[None]:
    """Wait for other work under the scope of this thread, which may cancel it."""
    scope = _current.get()
    with contextlib.nullcontext() if scope is None else scope.waiting(work):
        yield


def current_tenant() -> str:
    """Whose work this thread does; empty outside of the server."""
    scope = _current.get()
    return "" if scope is None else scope.tenant
