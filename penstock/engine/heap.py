"""Python's cyclic garbage collector, kept from stopping the engine between two steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SOME = 5000  # Python 3.12 starts with a few hundred such objects, an engine has tens of thousands


@contextmanager
def settled_heap() -> Iterator[None]:
    """Take what exists already out of the collector's sight, for as long as steps are run.

    Steps make short-lived objects by the thousand, which sets off full collections; each walks all
    that the imported modules are made of, for longer than several steps of a GPU take. What is made
    meanwhile is collected as ever, and everything else again afterwards.
    """
    if gc.get_freeze_count() > SOME:  # the caller, or one further out, has done so
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
