"""Memory of a process that steps for weeks: what Python collects, what the C library keeps."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

SOME = 5000  # Python 3.12 starts with a few hundred such objects, an engine has tens of thousands
MANY = 50_000  # objects: more than a step of thousands of requests makes and drops again
TRIM_INTERVAL_S = 10.0
M_MMAP_THRESHOLD = -3  # of glibc's mallopt
LARGE_BLOCK_BYTES = 1024 * 1024


@contextmanager
def settled_heap() -> Iterator[None]:
    """Take what exists already out of the collector's sight, for as long as steps are run.

    Steps make short-lived objects by the thousand, which sets off full collections; each walks all
    that the imported modules are made of, for longer than several steps of a GPU take. What is made
    meanwhile is collected, but not before there is more of it than a step makes; and everything
    else again afterwards.
    """
    if gc.get_freeze_count() > SOME:  # the caller, or one further out, has done so
        yield
        return
    gc.freeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(MANY, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Collect nothing meanwhile: for imports.

    The objects of modules stay. A collector that walks them, again and again as they come, takes a
    tenth of the time that it takes to import torch.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def return_large_blocks() -> None:
    """Have the C library give large blocks back to the system as soon as they are freed.

    glibc would take a freed block of 32 MiB as a hint to keep the next ones, in one heap a thread.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


class HeapTrimmer:
    """Gives back, every few seconds, what has become free inside the C library's heap.

    Steps of many sizes leave holes there, which glibc keeps: after every unusual mix of requests
    the process would be a little larger than before, for ever. Other C libraries keep less.
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
