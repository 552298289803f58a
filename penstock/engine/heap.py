"""Decides when Python's garbage collector runs and when the C library returns freed memory."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 50_000  # objects: more than a step of thousands of requests creates and drops
TRIM_INTERVAL_S = 10.0
M_MMAP_THRESHOLD = -3  # of glibc's mallopt
LARGE_BLOCK_BYTES = 1024 * 1024


@contextmanager
def settled_heap() -> Iterator[None]:
    """Freeze all existing objects in the garbage collector while steps run.

    Steps create thousands of short-lived objects, which triggers full collections. A full
    collection walks all objects of the imported modules and takes longer than several GPU steps.
    New objects are still collected, once there are more than one step creates. On exit the frozen
    objects are collected as before.
    """
    thresholds = gc.get_threshold()
    if thresholds[0] == MANY:  # an outer call has frozen them already
        yield
        return
    gc.freeze()
    gc.set_threshold(MANY, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def return_large_blocks() -> None:
    """Make the C library return large memory blocks to the system as soon as they are freed.

    Otherwise glibc raises its threshold after a freed block of up to 32 MiB, and keeps later blocks
    in a heap per thread.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


class HeapTrimmer:
    """Returns free memory inside the C library's heap to the system every few seconds.

    Steps of many sizes fragment the heap, and glibc keeps the holes: each unusual mix of requests
    would make the process a little larger for good. Other C libraries keep less.
    """

    def __init__(self, interval_s: float = TRIM_INTERVAL_S) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._interval_s = interval_s
        self._trimmed_at = time.monotonic()

    def trim_if_due(self) -> None:
        now = time.monotonic()
        if self._trim is not None and now - self._trimmed_at >= self._interval_s:
            self._trim(0)
            self._trimmed_at = now
