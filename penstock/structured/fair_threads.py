"""FairThreads: decides whose work runs next on a few threads. Tenants take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from penstock.confined.errors import PoolClosed, PoolFull
from penstock.confined.fair_queue import FairQueue

T = TypeVar("T")
Task = tuple[Future[Any], Callable[[], Any]]


class FairThreads:
    """An executor with a fair queue: one tenant's work does not wait for all of another's.

    Threads start when there is work. A future that is cancelled before its turn costs nothing.
    """

    def __init__(self, num_threads: int, max_queued: int, name: str) -> None:
        self._max_threads = num_threads
        self._name = name
        self._queue: FairQueue[Task] = FairQueue(max_queued)
        self._changed = threading.Condition()
        self._num_threads = 0
        self._num_idle = 0
        self._is_closed = False

    def submit(self, tenant: str, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Queue work. Its future fails with `PoolFull` if the queue is full."""
        future: Future[T] = Future()
        with self._changed:
            if self._is_closed:
                future.set_exception(PoolClosed("nothing more is begun"))
                return future
            dropped = self._queue.push(tenant, (future, lambda: work(*arguments)))
            if len(self._queue) > self._num_idle and self._num_threads < self._max_threads:
                self._num_threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            self._changed.notify()
        if dropped is not None and dropped[0].set_running_or_notify_cancel():
            dropped[0].set_exception(PoolFull("too much waits; try again later"))
        return future

    def close(self) -> None:
        """Start no more work. Queued work fails with `PoolClosed`."""
        with self._changed:
            self._is_closed = True
            left = self._queue.clear()
            self._changed.notify_all()
        for future, _ in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(PoolClosed("nothing more is begun"))

    def _work(self) -> None:
        while (task := self._take()) is not None:
            future, work = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del task, future, work

    def _take(self) -> Task | None:
        with self._changed:
            self._num_idle += 1
            while not self._is_closed and (task := self._queue.pop()) is None:
                self._changed.wait()
            self._num_idle -= 1
            return None if self._is_closed else task
